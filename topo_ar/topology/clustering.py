"""Levels told from measured pairs: who shares a host, which hosts share a rack.

A level is a gap: pairs on one side of it are several times nearer than all pairs on the other, and
being near is an equivalence, as sharing a host or a switch is.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from topo_ar.topology.pair_times import PairTimes, Table

Groups = tuple[tuple[int, ...], ...]

_HOST_GAP = 2.5
_RACK_GAP = 1.25
_SLOW = 0.75
_FULL = 0.9


@dataclass(frozen=True, slots=True)
class Cut:
    """Members in groups, the factor between near and far, and whether near was an equivalence."""

    groups: Groups
    gap: float
    clean: bool = True


def group_ranks(times: PairTimes) -> Cut:
    """Return the ranks of each host, told from rates and latencies alone.

    The clearest gap of the two decides. A rank's own loopback is near by definition: without a gap
    to it all ranks share one host.
    """
    closeness = (
        _both_ways(times.rate, max),
        _inverse(times.latency),
    )
    cuts = [cut for table in closeness if (cut := _cut(table, _HOST_GAP)) is not None]
    everyone = Cut((tuple(range(times.size)),), 1.0)
    return max(cuts, key=lambda cut: (cut.clean, cut.gap), default=everyone)


def nic_rates(hosts: PairTimes) -> list[tuple[float | None, float | None]]:
    """Return for each host the most that it sent to and received from another, bytes/s.

    A flow is as fast as the slower of its two ends, so the best partner shows a host's own rate.
    """
    n = hosts.size
    sent = [[hosts.rate[a][b] for b in range(n) if b != a] for a in range(n)]
    received = [[hosts.rate[b][a] for b in range(n) if b != a] for a in range(n)]
    return [(_largest(out), _largest(into)) for out, into in zip(sent, received, strict=True)]


def slow_hosts(hosts: PairTimes) -> list[tuple[int, float, float]]:
    """Return hosts whose NIC carries under three quarters of the median: host, its rate, median."""
    rates = {
        host: min(known)
        for host, pair in enumerate(nic_rates(hosts))
        if len(known := [rate for rate in pair if rate is not None]) == 2
    }
    usual = median(rates.values()) if rates else 0.0
    return [(host, rate, usual) for host, rate in rates.items() if rate < _SLOW * usual]


def group_hosts(hosts: PairTimes, loaded: Table) -> Groups:
    """Return the hosts of each rack; empty where every pair gets what its two NICs carry.

    A pair in two racks gets less, because several such pairs share an uplink or because that is
    slower than a NIC. Hosts in racks of their own are no level either: nothing is nearer.

    Parameters
    ----------
    hosts : PairTimes
        What each pair of hosts showed, every host in one pair at a time.
    loaded : tuple of tuple of float or None
        What each pair showed while others flowed, bytes/s.
    """
    if hosts.size < 3:
        return ()
    nics = nic_rates(hosts)

    def alone(a: int, b: int) -> float | None:
        out, into = nics[a][0], nics[b][1]
        return None if out is None or into is None else min(out, into)

    def share(a: int, b: int) -> float | None:
        if a == b:
            return 1.0
        rate, there, back = loaded[a][b], alone(a, b), alone(b, a)
        return None if rate is None or there is None or back is None else 2 * rate / (there + back)

    n = range(hosts.size)
    cut = _cut([[share(a, b) for b in n] for a in n], _RACK_GAP)
    if cut is None or not cut.clean or len(cut.groups) in (1, hosts.size):
        return ()
    return cut.groups


def pairs_across(racks: Groups, rack: int) -> list[tuple[int, int]]:
    """Return pairs of a host of one rack and a host outside it, each host in one pair at most."""
    outside = [host for other, hosts in enumerate(racks) if other != rack for host in hosts]
    return list(zip(racks[rack], outside, strict=False))


def uplinks_are_shared(racks: Groups, uplinks: Sequence[float | None], hosts: PairTimes) -> bool:
    """Return whether some rack sends less than the NICs of `pairs_across` carry.

    If none does, it was chance that made its hosts look nearer to each other.
    """
    nics = nic_rates(hosts)
    for rack, uplink in enumerate(uplinks):
        carried = [min(nics[a][0] or 0.0, nics[b][1] or 0.0) for a, b in pairs_across(racks, rack)]
        if uplink is not None and uplink < _FULL * sum(carried):
            return True
    return False


def _cut(closeness: Sequence[Sequence[float | None]], least: float) -> Cut | None:
    """Return the widest gap that makes groups; one without an equivalence only as a last resort."""
    n = len(closeness)
    values = sorted({v for row in closeness for v in row if v is not None and v > 0})
    own = median(row[i] or math.inf for i, row in enumerate(closeness)) if n else math.inf
    gaps = [
        (above / below, above)
        for below, above in itertools.pairwise(values)
        if above / below >= least and above <= own
    ]
    rough = None
    for gap, threshold in sorted(gaps, reverse=True):
        groups = _joined(closeness, threshold)
        alike = all(
            (closeness[a][b] or math.inf) >= threshold for g in groups for a in g for b in g
        )
        if alike:
            return Cut(groups, gap)
        rough = rough or Cut(groups, gap, clean=False)
    return rough


def _joined(closeness: Sequence[Sequence[float | None]], threshold: float) -> Groups:
    """Return the members that pairs at least as close as `threshold` join."""
    left = set(range(len(closeness)))
    groups = []
    while left:
        pending = [min(left)]
        group = set(pending)
        while pending:
            row = closeness[pending.pop()]
            near = {b for b in left - group if (row[b] or 0.0) >= threshold}
            group |= near
            pending += near
        left -= group
        groups.append(tuple(sorted(group)))
    return tuple(groups)


def _both_ways(
    table: Sequence[Sequence[float | None]], choose: Callable[[Iterable[float]], float]
) -> list[list[float | None]]:
    """Return the table made symmetric: of the two directions of a pair the one to `choose`."""
    n = range(len(table))
    known = [[[v for v in (table[a][b], table[b][a]) if v is not None] for b in n] for a in n]
    return [[choose(values) if values else None for values in row] for row in known]


def _inverse(table: Table) -> list[list[float | None]]:
    return [[1 / value if value else None for value in row] for row in table]


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
