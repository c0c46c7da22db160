"""Flows that share links: max-min fair rates, found again only where something has changed.

A flow uses a link with a coefficient: the number of equal flows that it stands for there. The
rates are those of progressive filling: all flows grow together, and a flow stops when one of its
links is full (Bertsekas, Gallager, "Data Networks", 6.5.2). Sums and products are those of the
numbers given: fractions stay exact.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence

# Links that a flow goes through, and how many of its like go through each of them.
Uses = tuple[tuple[int, float], ...]


def max_min_rates(capacities: Mapping[int, float], flows: Mapping[int, Uses]) -> dict[int, float]:
    """Return the max-min fair rate of every flow; each uses at least one link.

    No link carries more than its capacity, and every flow has a full link on which no other flow
    is faster.

    Parameters
    ----------
    capacities : mapping
        Bytes/s of every link that a flow uses.
    flows : mapping
        The links of every flow, with positive coefficients.
    """
    left = dict(capacities)
    load: dict[int, float] = dict.fromkeys(left, 0)
    users: dict[int, list[int]] = {link: [] for link in left}
    for flow, uses in flows.items():
        for link, coefficient in uses:
            load[link] += coefficient
            users[link].append(flow)
    growing = {link: len(own) for link, own in users.items()}
    levels = [(left[link] / load[link], link) for link in left if growing[link]]
    heapq.heapify(levels)
    current = {link: level for level, link in levels}
    rates: dict[int, float] = {}
    while levels:
        level, full = heapq.heappop(levels)
        if not growing[full] or level != current[full]:
            continue
        changed = set()
        for flow in users[full]:
            if flow in rates:
                continue
            rates[flow] = level
            for link, coefficient in flows[flow]:
                left[link] -= coefficient * level
                load[link] -= coefficient
                growing[link] -= 1
                changed.add(link)
        for link in changed:
            if growing[link]:
                # Rounding must not let a level fall.
                current[link] = max(level, left[link] / load[link])
                heapq.heappush(levels, (current[link], link))
    return rates


class _Active:
    """A flow under way; `left` was true at `since`."""

    __slots__ = ("end", "left", "rate", "since", "uses")

    def __init__(self, uses: Uses, nbytes: float, now: float) -> None:
        self.uses = uses
        self.left = nbytes
        self.rate: float = 0
        self.since = now
        self.end: float | None = None


class Network:
    """Links and the flows on them, as time goes by.

    Parameters
    ----------
    capacities : sequence of float
        Bytes/s of every link; links are their positions.

    Attributes
    ----------
    carried : list of float
        Bytes that went through every link so far: rates times durations, as counted on the way.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self.carried: list[float] = [0] * len(capacities)
        self._capacities = capacities
        self._flows: dict[int, _Active] = {}
        self._users: list[set[int]] = [set() for _ in capacities]
        self._ends: list[tuple[float, int]] = []
        self._changed: set[int] = set()

    def add(self, key: int, uses: Uses, nbytes: float, now: float) -> None:
        """Begin a flow at `now`; its rate is known after `settle`."""
        self._flows[key] = _Active(uses, nbytes, now)
        for link, _ in uses:
            self._users[link].add(key)
            self._changed.add(link)

    def settle(self, now: float) -> None:
        """Find the rates again of all flows that what began or ended at `now` can affect."""
        links = self._reached()
        affected = {key for link in links for key in self._users[link]}
        rates = max_min_rates(
            {link: self._capacities[link] for link in links},
            {key: self._flows[key].uses for key in affected},
        )
        for key, rate in rates.items():
            flow = self._flows[key]
            if flow.end is not None and rate == flow.rate:
                continue
            self._move(flow, now)
            flow.rate = rate
            flow.end = now + flow.left / rate
            heapq.heappush(self._ends, (flow.end, key))

    def next_end(self) -> float | None:
        """Return when the next flow ends; None without flows."""
        while self._ends:
            end, key = self._ends[0]
            if key in self._flows and self._flows[key].end == end:
                return end
            heapq.heappop(self._ends)
        return None

    def ended(self, until: float) -> Iterable[int]:
        """Take away and yield the flows that end at `until` or before."""
        while (end := self.next_end()) is not None and end <= until:
            _, key = heapq.heappop(self._ends)
            flow = self._flows.pop(key)
            for link, coefficient in flow.uses:
                self.carried[link] += coefficient * flow.left
                self._users[link].discard(key)
                self._changed.add(link)
            yield key

    def _move(self, flow: _Active, now: float) -> None:
        moved = flow.rate * (now - flow.since)
        for link, coefficient in flow.uses:
            self.carried[link] += coefficient * moved
        flow.left = max(flow.left - moved, 0)
        flow.since = now

    def _reached(self) -> set[int]:
        """Return the links that share flows, directly or not, with those that have changed."""
        reached: set[int] = set()
        while self._changed:
            link = self._changed.pop()
            if link in reached:
                continue
            reached.add(link)
            for key in self._users[link]:
                self._changed.update(
                    other for other, _ in self._flows[key].uses if other not in reached
                )
        return reached
