"""Families with a hierarchy: reduce-scatter inside, all-reduce of the shards outside, all-gather.

A level cuts the ranks of a unit (a node, a rack) into groups. After the reduce-scatter of a group
its members own different shards, and the ranks that own the same shard go on to the next level
without the others.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

from topo_ar.errors import PlanError
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.recursion import Recursion, Stages
from topo_ar.planning.schedule import Op, Stage
from topo_ar.planning.step_list import Interval, StepList, cut

Units = Sequence[tuple[int, ...]]
# The stages of a level and the weight of each member's shard in its groups.
Level = tuple[Stage, Stage, tuple[int, ...]]

LEADERS = (Family.HIERARCHICAL_LEADER, Family.HIERARCHICAL_DOUBLING)
_HALVING = Stages(Stage.INTER_FOLD, Stage.INTER_HALVING, Stage.INTER_DOUBLING, Stage.INTER_UNFOLD)
_DOUBLING = Stages(Stage.INTER_FOLD, Stage.INTER_EXCHANGE, Stage.INTER_EXCHANGE, Stage.INTER_UNFOLD)


def two_level(steps: StepList, plan: Plan, chunk: int, interval: Interval) -> None:
    """Add one chunk of a family of two levels: nodes of equal shares."""
    weights = plan.shards.ranks
    _check_shares(plan)
    if len(set(weights)) > 1:
        raise PlanError(
            f"{plan.family} needs nodes of equal numbers of ranks and the same shares in every "
            f"node; use {Family.HIERARCHICAL_WEIGHTED} or {Family.FLAT_RING}"
        )
    level = (Stage.INTRA_REDUCE_SCATTER, Stage.INTRA_ALL_GATHER, weights[0])
    _Grid(steps, plan, chunk).reduce(plan.nodes, [level], interval)


def three_level(steps: StepList, plan: Plan, chunk: int, interval: Interval) -> None:
    """Add one chunk with islands inside the nodes or racks around them, all of equal size."""
    if len({len(node) for node in plan.nodes}) > 1:
        raise PlanError(f"{plan.family} needs nodes of equal numbers of ranks; use flat_ring")
    if bool(plan.islands) == bool(plan.racks):
        raise PlanError(f"{plan.family} needs either islands or racks; make a new plan")
    _check_shares(plan)
    if len({*plan.shards.nodes}) > 1 or len({*chain.from_iterable(plan.shards.ranks)}) > 1:
        raise PlanError(f"{plan.family} needs equal shares of all nodes and ranks; make a new plan")
    units, widths = _units_of_islands(plan) if plan.islands else _units_of_racks(plan)
    stages = (
        (Stage.ISLAND_REDUCE_SCATTER, Stage.ISLAND_ALL_GATHER),
        (Stage.INTRA_REDUCE_SCATTER, Stage.INTRA_ALL_GATHER),
        (Stage.RACK_REDUCE_SCATTER, Stage.RACK_ALL_GATHER),
    )[0 if plan.islands else 1 :]
    levels = [(*names, (1,) * width) for names, width in zip(stages, widths, strict=False)]
    _Grid(steps, plan, chunk).reduce(units, levels, interval)


def weighted(steps: StepList, plan: Plan, chunk: int, interval: Interval) -> None:
    """Add one chunk for nodes of any sizes, each of which cuts it by its own shares.

    Between all edges of all nodes an interval has one owner in every node: these form its rail.
    Neighbouring intervals with the same owners are one.
    """
    _check_shares(plan)
    parts = [cut(*interval, shares) for shares in plan.shards.ranks]
    reduced = [
        steps.add(Stage.INTRA_REDUCE_SCATTER, Op.REDUCE_SCATTER, node, shards, chunk)
        for node, shards in zip(plan.nodes, parts, strict=True)
        if len(node) > 1
    ]
    done = reduced
    if len(plan.nodes) > 1:
        done = [
            _rail(steps, plan, rail, shard, chunk, reduced)
            for rail, shard in _rails(plan.nodes, parts)
        ]
    for node, shards in zip(plan.nodes, parts, strict=True):
        if len(node) > 1:
            steps.add(Stage.INTRA_ALL_GATHER, Op.ALL_GATHER, node, shards, chunk, done)


def _rails(
    nodes: Units, parts: Sequence[Sequence[Interval]]
) -> list[tuple[tuple[int, ...], Interval]]:
    """Return the owners of every interval between the edges of all nodes, neighbours merged."""
    edges = sorted({edge for shards in parts for shard in shards for edge in shard})
    owners = []
    for node, shards in zip(nodes, parts, strict=True):
        filled = [
            (shard, rank) for rank, shard in zip(node, shards, strict=True) if shard[0] < shard[1]
        ]
        at = 0
        column = []
        for begin, _ in pairwise(edges):
            while filled[at][0][1] <= begin:
                at += 1
            column.append(filled[at][1])
        owners.append(column)
    rails: list[tuple[tuple[int, ...], Interval]] = []
    for rail, (begin, end) in zip(zip(*owners, strict=True), pairwise(edges), strict=True):
        if rails and rails[-1][0] == rail:
            rails[-1] = (rail, (rails[-1][1][0], end))
        else:
            rails.append((rail, (begin, end)))
    return rails


def _rail(
    steps: StepList,
    plan: Plan,
    group: tuple[int, ...],
    interval: Interval,
    chunk: int,
    after: Iterable[int],
) -> int:
    """Add the all-reduce of one shard over the ranks that own it and return its last step."""
    if len(group) == 2 or plan.family is Family.HIERARCHICAL_LEADER:
        shards: tuple[Interval, ...] = (interval,) * len(group)
        return steps.add(Stage.INTER_EXCHANGE, Op.EXCHANGE, group, shards, chunk, after)
    roots = plan.shards.nodes if plan.family is Family.HIERARCHICAL_WEIGHTED else (1,) * len(group)
    shards = cut(*interval, roots)
    scatter, gather = Stage.INTER_REDUCE_SCATTER, Stage.INTER_ALL_GATHER
    if plan.family is Family.HIERARCHICAL_RING:
        scatter, gather = Stage.INTER_RING_REDUCE_SCATTER, Stage.INTER_RING_ALL_GATHER
    reduced = steps.add(scatter, Op.REDUCE_SCATTER, group, shards, chunk, after)
    return steps.add(gather, Op.ALL_GATHER, group, shards, chunk, (reduced,))


class _Grid:
    """One chunk of equal units; `last` is the step that each rank's data comes from."""

    def __init__(self, steps: StepList, plan: Plan, chunk: int) -> None:
        self.steps = steps
        self.plan = plan
        self.chunk = chunk
        self.last: dict[int, int] = {}

    def reduce(self, units: Units, levels: Sequence[Level], interval: Interval) -> None:
        """Add the all-reduce of `interval` over all ranks of `units`, innermost level first."""
        if not levels:
            if len(units) > 1:
                self._rail(tuple(unit[0] for unit in units), interval)
            return
        (scatter, gather, weights), *outer = levels
        width = len(weights)
        groups = [
            unit[first : first + width] for unit in units for first in range(0, len(unit), width)
        ]
        shards = cut(*interval, weights)
        if width > 1:
            self._all(scatter, Op.REDUCE_SCATTER, groups, shards)
        for local, shard in enumerate(shards):
            if shard[0] < shard[1]:
                self.reduce([unit[local::width] for unit in units], outer, shard)
        if width > 1:
            self._all(gather, Op.ALL_GATHER, groups, shards)

    def _rail(self, group: tuple[int, ...], interval: Interval) -> None:
        steps, chunk = self.steps, self.chunk
        match self.plan.family:
            case Family.HIERARCHICAL_HALVING:
                Recursion(steps, group, chunk, _HALVING, self.last).halve_and_double(interval)
            case Family.HIERARCHICAL_DOUBLING:
                Recursion(steps, group, chunk, _DOUBLING, self.last).double(interval)
            case _:
                index = _rail(steps, self.plan, group, interval, chunk, self._waits(group))
                self.last.update(dict.fromkeys(group, index))

    def _all(self, stage: Stage, op: Op, groups: Units, shards: tuple[Interval, ...]) -> None:
        for group in groups:
            # What an all-gather needs comes from the owners; the others follow from that.
            sources = (
                group
                if op is Op.REDUCE_SCATTER
                else [rank for rank, (begin, end) in zip(group, shards, strict=True) if begin < end]
            )
            index = self.steps.add(stage, op, group, shards, self.chunk, self._waits(sources))
            self.last.update(dict.fromkeys(group, index))

    def _waits(self, group: Iterable[int]) -> set[int]:
        return {self.last[rank] for rank in group if rank in self.last}


def _check_shares(plan: Plan) -> None:
    shares = plan.shards
    fits = [len(weights) for weights in shares.ranks] == [len(node) for node in plan.nodes]
    if not fits or len(shares.nodes) != len(plan.nodes):
        raise PlanError(
            f"the plan's shards are for {len(shares.nodes)} nodes of "
            f"{[len(weights) for weights in shares.ranks][:16]} ranks, its nodes have "
            f"{[len(node) for node in plan.nodes][:16]}; {plan.family} needs one share for each "
            "node and rank"
        )
    if any(min(weights) < 0 or sum(weights) <= 0 for weights in (shares.nodes, *shares.ranks)):
        raise PlanError(
            "the plan's shards have a negative weight, or nothing but zeros for the nodes or for "
            "the ranks of a node; weights are integers from 0, and one of them is positive"
        )


def _units_of_islands(plan: Plan) -> tuple[Units, tuple[int, ...]]:
    """Return the nodes, their ranks island by island, and the widths of the two inner levels."""
    home = {rank: i for i, node in enumerate(plan.nodes) for rank in node}
    _check_equal("islands", plan.islands, range(plan.world_size))
    units: list[tuple[int, ...]] = [()] * len(plan.nodes)
    for island in plan.islands:
        homes = {home[rank] for rank in island}
        if len(homes) > 1:
            raise PlanError(
                f"the plan's island {list(island)[:16]} lies in more than one node; islands are "
                "parts of nodes"
            )
        units[homes.pop()] += island
    width = len(plan.islands[0])
    return units, (width, len(units[0]) // width)


def _units_of_racks(plan: Plan) -> tuple[Units, tuple[int, ...]]:
    """Return the racks, their ranks node by node, and the widths of the two inner levels."""
    _check_equal("racks", plan.racks, range(len(plan.nodes)))
    units = [tuple(rank for i in rack for rank in plan.nodes[i]) for rack in plan.racks]
    return units, (len(plan.nodes[0]), len(plan.racks[0]))


def _check_equal(what: str, groups: Units, members: range) -> None:
    if len({len(group) for group in groups}) > 1:
        raise PlanError(
            f"the plan's {what} have {[len(group) for group in groups][:16]} members; three "
            f"levels need {what} of equal size"
        )
    if sorted(member for group in groups for member in group) != list(members):
        raise PlanError(
            f"the plan's {what} must hold each of 0..{len(members) - 1} once; make a new plan"
        )
