"""What would have to change for another plan to win, and what a degraded link would cost."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from topo_ar.planning.candidates import (
    Candidate,
    Setting,
    candidate,
    candidates,
    choose,
    seconds_as_it_is,
)
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.nccl_machine import changed
from topo_ar.planning.plan import Family, Shards
from topo_ar.planning.reasons import Verdict
from topo_ar.topology.levels import Levels, Rate
from topo_ar.units import format_seconds

# It is looked for when the runner-up wins up to 64 times the rate and down to a 64th.
_STEPS = 3
_HALVINGS = 6
_MOST_RANKS = 1024


def advice(verdict: Verdict, shards: Shards) -> Iterator[str]:
    """Yield sentences on rates of NICs, numbers of nodes and degraded links.

    Nothing is said of an empty buffer or a single rank, nor where times were measured: they hold
    for the cluster as it is.
    """
    if verdict.nbytes == 0 or verdict.setting.parameters.world_size == 1:
        return
    if any(each.measured for each in verdict.found):
        return
    others = [c for c in verdict.found if c is not verdict.chosen and not c.excluded]
    if others and len(verdict.levels.nodes) > 1:
        other = min(others, key=lambda each: each.seconds)
        yield from _nic_rates(verdict, other.family)
        yield from _node_counts(verdict, other.family)
    yield from _degraded(verdict, shards)


def _nic_rates(verdict: Verdict, other: Family) -> Iterator[str]:
    def wins(factor: float) -> bool:
        scaled = _scaled(verdict.levels, nic=factor)
        return _ahead(verdict.setting, scaled, verdict, other)

    for step, word in ((4.0, "faster"), (0.25, "slower")):
        factor = _first(wins, step)
        if factor is not None:
            times = factor if factor > 1 else 1 / factor
            yield f"{other} would win if the NICs were {times:.2g} times {word}."


def _first(wins: Callable[[float], bool], step: float) -> float | None:
    """Return about the first power of `step` at which `wins`, to some 2 %."""
    factor = next((step**k for k in range(1, _STEPS + 1) if wins(step**k)), None)
    if factor is None:
        return None
    before = factor / step
    for _ in range(_HALVINGS):
        middle = math.sqrt(before * factor)
        before, factor = (before, middle) if wins(middle) else (middle, factor)
    return factor


def _node_counts(verdict: Verdict, other: Family) -> Iterator[str]:
    nodes = verdict.levels.nodes
    alike = {(len(n.ranks), n.intra, n.nics, n.rank_nics, len(n.islands)) for n in nodes}
    if len(alike) > 1 or verdict.levels.racks or nodes[0].islands:
        return
    width = len(nodes[0].ranks)
    for factors in ((2, 4, 8, 16), (0.5, 0.25, 0.125)):
        for factor in factors:
            count = int(len(nodes) * factor)
            if count < 2 or count * width > _MOST_RANKS:
                break
            same = tuple(
                replace(nodes[0], ranks=tuple(range(i * width, (i + 1) * width)))
                for i in range(count)
            )
            if _ahead(verdict.setting, Levels(same), verdict, other):
                yield f"With {count} nodes {other} would be ahead of {verdict.chosen.family}."
                break


def _ahead(setting: Setting, levels: Levels, verdict: Verdict, other: Family) -> bool:
    """Return whether `other` would be faster on `levels` than the family that was chosen."""
    there = _elsewhere(setting, levels)
    mine, theirs = (
        candidate(there, family, verdict.nbytes) for family in (verdict.chosen.family, other)
    )
    return theirs.seconds < mine.seconds and not theirs.excluded


def _degraded(verdict: Verdict, shards: Shards) -> Iterator[str]:
    nodes = verdict.levels.nodes
    last = nodes[-1]
    cases = []
    if len(nodes) > 1:
        cases.append((f"the NICs of {last.name}", _scaled(verdict.levels, nic=0.5, only=last.name)))
    if len(last.ranks) > 1:
        cases.append(
            (f"the rank ports of {last.name}", _scaled(verdict.levels, port=0.5, only=last.name))
        )
    for rack in verdict.levels.racks[-1:]:
        cases.append((f"the uplinks of {rack.name}", _scaled(verdict.levels, uplink=0.5)))
    for what, levels in cases:
        yield _sentence(verdict, what, _elsewhere(verdict.setting, levels), shards)


def _sentence(verdict: Verdict, what: str, there: Setting, shards: Shards) -> str:
    mine = seconds_as_it_is(there, verdict.chosen, shards)
    best = choose(candidates(there, verdict.nbytes))
    text = f"With {what} at half rate this plan would take {format_seconds(mine)}"
    if mine <= best.seconds * 1.005:
        return f"{text}, and no other less."
    return f"{text}, the best one then, {_named(best)}, {format_seconds(best.seconds)}."


def _named(best: Candidate) -> str:
    chunks = len(best.chunk_nbytes)
    return f"{best.family} in {chunks} chunks" if chunks > 1 else str(best.family)


def _elsewhere(setting: Setting, levels: Levels) -> Setting:
    p = CostParameters.from_levels(levels, setting.parameters.rate, setting.runtime)
    nccl = setting.nccl and changed(setting.nccl, setting.parameters.levels, levels)
    return replace(setting, parameters=p, nccl=nccl)


def _scaled(
    levels: Levels, nic: float = 1, port: float = 1, uplink: float = 1, only: str = ""
) -> Levels:
    """Return `levels` with rates multiplied, of one node or all, or of the last rack's uplink."""
    nodes = tuple(
        replace(
            node,
            nics=tuple(_times(each, nic) for each in node.nics),
            intra=_times(node.intra, port),
            island=_times(node.island, port) if node.island else None,
        )
        if only in ("", node.name)
        else node
        for node in levels.nodes
    )
    racks = levels.racks
    if racks and uplink != 1:
        racks = (*racks[:-1], replace(racks[-1], uplink=_times(racks[-1].uplink, uplink)))
    return Levels(nodes, racks)


def _times(rate: Rate, factor: float) -> Rate:
    return replace(rate, nominal=rate.nominal * factor, payload=rate.payload * factor)
