"""Latency and rate between all ranks of a job, measured in rounds of disjoint pairs."""

import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import msgspec

from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.execution.gather import Channel, agree_on_nonce
from topo_ar.execution.network import Nic
from topo_ar.execution.pair_flow import PairFlow
from topo_ar.execution.transports.rendezvous import Way, connect, listen
from topo_ar.topology.clustering import (
    Groups,
    group_hosts,
    group_ranks,
    pairs_across,
    uplinks_are_shared,
)
from topo_ar.topology.pair_times import Measurement, PairTimes, Table

Pair = tuple[int, int]
Progress = Callable[[str, int, int], None]

_DEADLINE_S = 20.0
_ROUND_OVERHEAD_S = 0.01
_LOOPBACK_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the measurement: its share of the budget, and the seconds of one of its slots."""

    share: float
    least: float
    most: float

    def slot(self, budget: float, slots: int) -> float:
        """Return the seconds of one slot."""
        return min(max(self.share * budget / max(1, slots), self.least), self.most)


_PING = _Part(0.1, 0.004, 0.05)
_RANKS = _Part(0.2, 0.03, 0.1)
_HOSTS = _Part(0.5, 0.15, 1.0)
_UPLINKS = _Part(0.2, 0.3, 1.5)
_HOST_TRY_S = 0.4
_MOST_TRIES = 4


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """One figure that one rank measured of a pair."""

    sender: int
    receiver: int
    value: float
    spread: float


def tournament(size: int) -> list[list[Pair]]:
    """Return rounds in which every member meets every other once; one sits out of an odd number.

    In a round every member is in one pair at most (the circle method).

    Examples
    --------
    >>> tournament(4)
    [[(0, 3), (1, 2)], [(1, 3), (0, 2)], [(2, 3), (0, 1)]]
    """
    if size < 2:
        return []
    seats = size + size % 2
    rounds = []
    for turn in range(seats - 1):
        circle = [(turn + i) % (seats - 1) for i in range(seats - 1)]
        pairs = [(circle[0], seats - 1)]
        pairs += [(circle[i], circle[-i]) for i in range(1, seats // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < size])
    return rounds


def measure_pairs(
    channel: Channel, budget_seconds: float = 20.0, on_progress: Progress | None = None
) -> Measurement:
    """Return what the ranks of a job measure of their network, the same on all ranks. Collective.

    First every rank meets every other, one pair a rank at a time: from this the hosts are told.
    Then one rank of each host meets one of each other host, each direction on its own, for the
    rates of NICs. Where pairs of hosts get less than their NICs carry while other pairs flow the
    same way, racks are told from it, and all hosts of a rack send to others at once for the rate
    of its uplink.

    Parameters
    ----------
    channel : Channel
        The ranks of the job; its address is the one that flows take.
    budget_seconds : float
        About how long to measure. With little time, not all pairs of ranks meet; a note says so.
    on_progress : callable, optional
        Called with what is measured, and how many of how many rounds are done.

    Raises
    ------
    ConfigError
        If the budget is not positive.
    ExecutionError
        If a rank is gone or does not answer within 20 s.
    """
    if not budget_seconds > 0:
        raise ConfigError(f"a budget of {budget_seconds} s measures nothing; give some seconds")
    with _Meeting(channel, on_progress or (lambda phase, done, total: None)) as meeting:
        return meeting.measure(budget_seconds)


class _Meeting:
    """The ranks while they measure: where each is reached, and what this one has seen."""

    def __init__(self, channel: Channel, on_progress: Progress) -> None:
        self._channel = channel
        self._on_progress = on_progress
        self._nonce = agree_on_nonce(channel)
        self._listener = listen(Nic("", channel.address))
        mine = msgspec.json.encode((channel.address, self._listener.getsockname()[1]))
        self._addresses = {
            rank: msgspec.json.decode(data, type=tuple[str, int])
            for rank, data in enumerate(channel.all_gather(mine))
        }

    def __enter__(self) -> "_Meeting":
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def measure(self, budget: float) -> Measurement:
        size = self._channel.world_size
        rounds = tournament(size)
        cost = _PING.least + 2 * _RANKS.least + _ROUND_OVERHEAD_S
        affordable = (_PING.share + _RANKS.share) * budget / cost
        kept = rounds[: max(1, int(affordable))]
        notes = []
        if len(kept) < len(rounds):
            notes.append(
                f"{len(kept)} of {len(rounds)} rounds of ranks fitted into {budget:g} s, so ranks "
                "of one host may be seen as separate; give more time"
            )
        own_latency, own_rate = self._reference()
        # Whatever else a host does makes its pairs look far, never near: the best of tries counts.
        tries = min(max(int(affordable / max(len(kept), 1)), 1), _MOST_TRIES)
        latency = self._latencies(kept * tries, budget)
        rate = self._flows(
            "pairs of ranks", _each_way(kept) * tries, budget, _RANKS, _LOOPBACK_NBYTES
        )
        times = _tables(
            [*self._gather([own_latency]), *latency],
            [*self._gather([own_rate]), *self._gather(rate)],
            range(size),
            of_tries=max,
        )
        cut = group_ranks(times)
        if not cut.clean:
            notes.append(
                "which ranks share a host is not clear from the figures: some were joined that "
                "are not all near to each other"
            )
        return self._between(times, cut.groups, budget, notes)

    def _between(
        self,
        times: PairTimes,
        groups: Sequence[tuple[int, ...]],
        budget: float,
        notes: Sequence[str],
    ) -> Measurement:
        first = [group[0] for group in groups]
        rounds = [[(first[a], first[b]) for a, b in pairs] for pairs in tournament(len(groups))]
        latency = self._latencies(rounds, budget)
        # Flows share an uplink only where they take it the same way: so pairs flow alike, and in
        # turns. Which of two gets more of it is chance, so each does it several times.
        turns = [_each_way(rounds), _each_way([_alternating(pairs) for pairs in rounds])]
        tries = int(_HOSTS.share * budget / max(1, 2 * len(turns[0]) * _HOST_TRY_S))
        tries = min(max(tries, 1), _MOST_TRIES)
        seen = [
            self._gather(self._flows("pairs of hosts", turn * tries, budget / len(turns), _HOSTS))
            for turn in turns
        ]
        hosts = _tables(latency, [each for turn in seen for each in turn], first, of_tries=median)
        loaded = _loaded(seen, first)
        racks = group_hosts(hosts, loaded)
        uplinks = self._uplinks(racks, first, budget)
        if racks and not uplinks_are_shared(racks, uplinks, hosts):
            racks, uplinks = (), ()
        return Measurement(
            ranks=times,
            groups=tuple(groups),
            hosts=hosts,
            loaded=loaded,
            racks=racks,
            uplinks=uplinks,
            notes=tuple(notes),
        )

    def _uplinks(
        self, racks: Groups, first: Sequence[int], budget: float
    ) -> tuple[float | None, ...]:
        """Return what leaves each rack while its hosts, by their `first` ranks, send to others."""
        rounds = [
            [(first[a], first[b]) for a, b in pairs_across(racks, rack)]
            for rack in range(len(racks))
        ]
        seen = self._gather(self._flows("uplinks of racks", rounds, budget, _UPLINKS))
        rates = {(each.sender, each.receiver): each.value for each in seen}
        return tuple(sum(rates[pair] for pair in pairs) or None for pairs in rounds)

    def _reference(self) -> tuple[_Seen, _Seen]:
        """Return latency and rate of this rank with itself: what being on one host looks like."""
        rank = self._channel.rank
        with listen(Nic("", self._channel.address)) as listener:
            listener.settimeout(_DEADLINE_S)
            near = socket.create_connection(listener.getsockname(), _DEADLINE_S)
            far, _ = listener.accept()

        def answer() -> None:
            with PairFlow(far, rank, _DEADLINE_S) as flow:
                flow.pong()
                flow.send(_RANKS.most, _LOOPBACK_NBYTES)

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        with PairFlow(near, rank, _DEADLINE_S) as flow:
            latency, rate = flow.ping(_PING.least), flow.receive()
        answering.join(_DEADLINE_S)
        return (
            _Seen(rank, rank, latency.value, latency.spread),
            _Seen(rank, rank, rate.value, rate.spread),
        )

    def _latencies(self, rounds: Sequence[Sequence[Pair]], budget: float) -> list[_Seen]:
        """Return half of the round trips that all ranks saw."""
        seconds = _PING.slot(budget, len(rounds))
        found = []
        for a, b in self._own_pairs("latencies", rounds):
            with self._meet(a, b) as flow:
                if self._channel.rank == a:
                    seen = flow.ping(seconds)
                    found += [_Seen(*pair, seen.value, seen.spread) for pair in ((a, b), (b, a))]
                else:
                    flow.pong()
        return self._gather(found)

    def _flows(
        self,
        phase: str,
        rounds: Sequence[Sequence[Pair]],
        budget: float,
        part: _Part,
        most: int = 1 << 62,
    ) -> list[_Seen]:
        """Return what this rank received of the flows of (sender, receiver), one round at a time.

        A flow ends after `most` bytes at the latest.
        """
        seconds = part.slot(budget, len(rounds))
        found = []
        for sender, receiver in self._own_pairs(phase, rounds):
            with self._meet(sender, receiver) as flow:
                if self._channel.rank == sender:
                    flow.send(seconds, most)
                else:
                    seen = flow.receive()
                    found.append(_Seen(sender, receiver, seen.value, seen.spread))
        return found

    def _own_pairs(self, phase: str, rounds: Sequence[Sequence[Pair]]) -> Iterator[Pair]:
        """Yield this rank's pair of each round that has one; all ranks begin a round together."""
        for done, pairs in enumerate(rounds):
            self._on_progress(phase, done, len(rounds))
            self._wait_for_all(phase)
            yield from (pair for pair in pairs if self._channel.rank in pair)
        self._wait_for_all(phase)

    def _wait_for_all(self, phase: str) -> None:
        try:
            self._channel.barrier()
        except RuntimeError as error:
            raise ExecutionError(
                f"rank {self._channel.rank} waited in vain for the others ({phase}): {error}"
            ) from None

    def _meet(self, a: int, b: int) -> PairFlow:
        """Return the connection between two ranks, one of which is this one."""
        rank = self._channel.rank
        peer = b if rank == a else a
        ways = {peer: Way(*self._addresses[peer])}
        flows = connect([self._listener], rank, ways, self._nonce, _DEADLINE_S)
        return PairFlow(flows[peer].sock, peer, _DEADLINE_S)

    def _gather(self, mine: Sequence[_Seen]) -> list[_Seen]:
        return [
            seen
            for data in self._channel.all_gather(msgspec.json.encode(mine))
            for seen in msgspec.json.decode(data, type=list[_Seen])
        ]


def _tables(
    latency: Sequence[_Seen],
    rate: Sequence[_Seen],
    members: Sequence[int],
    of_tries: Callable[[Iterable[float]], float],
) -> PairTimes:
    """Return the tables of all ranks' figures: least latency, and the rate `of_tries`."""
    alpha, beta = _by_pair(latency), _by_pair(rate)
    least = {pair: min(tries, key=lambda seen: seen.value) for pair, tries in alpha.items()}
    return PairTimes(
        latency=_table(members, {pair: seen.value for pair, seen in least.items()}),
        latency_spread=_table(members, {pair: seen.spread for pair, seen in least.items()}),
        rate=_table(members, {pair: of_tries(s.value for s in beta[pair]) for pair in beta}),
        rate_spread=_table(members, {pair: median(s.spread for s in beta[pair]) for pair in beta}),
    )


def _by_pair(figures: Sequence[_Seen]) -> dict[Pair, list[_Seen]]:
    found: dict[Pair, list[_Seen]] = {}
    for seen in figures:
        found.setdefault((seen.sender, seen.receiver), []).append(seen)
    return found


def _loaded(turns: Sequence[Sequence[_Seen]], members: Sequence[int]) -> Table:
    """Return what each pair got on average, both directions together, in its worse turn."""
    least: dict[Pair, float] = {}
    for turn in turns:
        rates: dict[Pair, list[float]] = {}
        for seen in turn:
            for pair in ((seen.sender, seen.receiver), (seen.receiver, seen.sender)):
                rates.setdefault(pair, []).append(seen.value)
        for pair, values in rates.items():
            least[pair] = min(mean(values), least.get(pair, math.inf))
    return _table(members, least)


def _each_way(rounds: Sequence[Sequence[Pair]]) -> list[Sequence[Pair]]:
    return [way for pairs in rounds for way in (pairs, [(b, a) for a, b in pairs])]


def _alternating(pairs: Sequence[Pair]) -> list[Pair]:
    return [(b, a) if place % 2 else (a, b) for place, (a, b) in enumerate(pairs)]


def _table(members: Sequence[int], values: Mapping[Pair, float]) -> Table:
    return tuple(tuple(values.get((a, b)) for b in members) for a in members)
