"""From a plan to its schedule: every step of every chunk, in one order for all ranks."""

from collections.abc import Sequence

from topo_ar.errors import PlanError
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.schedule import Op, Schedule, Stage, Step

Interval = tuple[int, int]


def lower(plan: Plan, numel: int, itemsize: int) -> Schedule:
    """Return the schedule of `plan` for a buffer of `numel` elements of `itemsize` bytes.

    Steps are ordered chunk by chunk, stage by stage, then by node or rail; `after` holds true data
    dependencies only. An empty buffer and a single rank need no steps.

    Raises
    ------
    PlanError
        If the buffer is not the one that was planned for, or a chunk would split an element.
    """
    if numel * itemsize != plan.nbytes:
        raise PlanError(
            f"the plan is for {plan.nbytes} bytes, the buffer has {numel} elements of {itemsize} "
            f"bytes ({numel * itemsize}); plan for this size"
        )
    lowering = _Lowering(plan)
    for number, (begin, end) in enumerate(_chunk_intervals(plan, itemsize)):
        if begin < end and plan.world_size > 1:
            lowering.add_chunk(number, begin, end)
    return Schedule(
        plan_hash=plan.hash,
        world_size=plan.world_size,
        numel=numel,
        itemsize=itemsize,
        steps=tuple(lowering.steps),
    )


def _chunk_intervals(plan: Plan, itemsize: int) -> list[Interval]:
    intervals = []
    begin = 0
    for number, size in enumerate(plan.chunk_nbytes):
        if size % itemsize:
            raise PlanError(
                f"chunk {number} of the plan has {size} bytes, which is no multiple of the "
                f"element size {itemsize}; plan with itemsize={itemsize}"
            )
        intervals.append((begin // itemsize, (begin + size) // itemsize))
        begin += size
    if begin != plan.nbytes:
        raise PlanError(f"the plan's chunks hold {begin} of {plan.nbytes} bytes; make a new plan")
    return intervals


def cut(begin: int, end: int, weights: Sequence[int]) -> tuple[Interval, ...]:
    """Cut an interval into one part for each weight; parts tile it and may be empty."""
    total, length, seen = sum(weights), end - begin, 0
    parts = []
    for weight in weights:
        first = begin + length * seen // total
        seen += weight
        parts.append((first, begin + length * seen // total))
    return tuple(parts)


class _Lowering:
    """The list of steps as it grows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.steps: list[Step] = []
        sizes = {len(node) for node in plan.nodes}
        shares = {len(weights) for weights in plan.shards.ranks}
        if plan.family != Family.FLAT_RING and (sizes != shares or len(sizes) > 1):
            raise PlanError(
                f"the plan gives {sorted(shares)} shares to nodes of {sorted(sizes)} ranks; "
                f"{plan.family} needs one share for each rank of equal nodes"
            )

    def add_chunk(self, chunk: int, begin: int, end: int) -> None:
        plan = self.plan
        if plan.family == Family.FLAT_RING:
            world = tuple(range(plan.world_size))
            self._add(Stage.FLAT, Op.ALL_REDUCE, world, ((begin, end),) * len(world), chunk)
            return
        shards = cut(begin, end, plan.shards.ranks[0])
        ready = self._intra(Stage.INTRA_REDUCE_SCATTER, Op.REDUCE_SCATTER, shards, chunk, ())
        if len(plan.nodes) > 1:
            ready = tuple(
                self._rail(local, shard, chunk, ready)
                for local, shard in enumerate(shards)
                if shard[0] < shard[1]
            )
        self._intra(Stage.INTRA_ALL_GATHER, Op.ALL_GATHER, shards, chunk, ready)

    def _intra(
        self,
        stage: Stage,
        op: Op,
        shards: tuple[Interval, ...],
        chunk: int,
        after: tuple[int, ...],
    ) -> tuple[int, ...]:
        """One step in every node, none where a node is a single rank."""
        if len(shards) == 1:
            return ()
        return tuple(self._add(stage, op, node, shards, chunk, after) for node in self.plan.nodes)

    def _rail(self, local: int, shard: Interval, chunk: int, after: tuple[int, ...]) -> int:
        """Add the all-reduce of one shard over the ranks that own it and return its last step."""
        group = tuple(node[local] for node in self.plan.nodes)
        if len(group) == 2 or self.plan.family == Family.HIERARCHICAL_LEADER:
            shards: tuple[Interval, ...] = (shard,) * len(group)
            return self._add(Stage.INTER_EXCHANGE, Op.EXCHANGE, group, shards, chunk, after)
        shards = cut(*shard, (1,) * len(group))
        reduced = self._add(
            Stage.INTER_REDUCE_SCATTER, Op.REDUCE_SCATTER, group, shards, chunk, after
        )
        return self._add(Stage.INTER_ALL_GATHER, Op.ALL_GATHER, group, shards, chunk, (reduced,))

    def _add(
        self,
        stage: Stage,
        op: Op,
        group: tuple[int, ...],
        shards: tuple[Interval, ...],
        chunk: int,
        after: tuple[int, ...] = (),
    ) -> int:
        index = len(self.steps)
        self.steps.append(Step(index, stage, op, group, shards, chunk, after))
        return index
