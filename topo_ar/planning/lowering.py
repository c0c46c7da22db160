"""From a plan to its schedule: every step of every chunk, in one order for all ranks."""

from topo_ar.errors import PlanError
from topo_ar.planning import lowering_flat, lowering_nodes
from topo_ar.planning.lowering_tree import double_binary_tree
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.schedule import Schedule
from topo_ar.planning.step_list import Interval, StepList

_LOWER_CHUNK = {
    Family.FLAT_RING: lowering_flat.all_reduce,
    Family.DOUBLE_BINARY_TREE: double_binary_tree,
    Family.HALVING_DOUBLING: lowering_flat.halving_doubling,
    Family.DIRECT: lowering_flat.direct,
    Family.HIERARCHICAL_SEQUENTIAL: lowering_nodes.two_level,
    Family.HIERARCHICAL_PIPELINED: lowering_nodes.two_level,
    Family.HIERARCHICAL_LEADER: lowering_nodes.two_level,
    Family.HIERARCHICAL_WEIGHTED: lowering_nodes.weighted,
    Family.HIERARCHICAL_THREE_LEVEL: lowering_nodes.three_level,
    Family.HIERARCHICAL_RING: lowering_nodes.two_level,
    Family.HIERARCHICAL_HALVING: lowering_nodes.two_level,
    Family.HIERARCHICAL_DOUBLING: lowering_nodes.two_level,
}


def lower(plan: Plan, numel: int, itemsize: int) -> Schedule:
    """Return the schedule of `plan` for a buffer of `numel` elements of `itemsize` bytes.

    Steps are ordered chunk by chunk, then as the family goes: by stage, or by tree; `after` holds
    true data dependencies only. An empty buffer and a single rank need no steps. A flat ring is
    one step, because torch.distributed runs it as a whole; `lower_ring` shows its messages.

    Raises
    ------
    PlanError
        If the buffer is not the one that was planned for, a chunk would split an element, or the
        plan's nodes, shards, islands or racks do not fit its family.
    """
    _check_size(plan, numel, itemsize)
    steps = StepList()
    for number, (begin, end) in enumerate(_chunk_intervals(plan, itemsize)):
        if begin < end and plan.world_size > 1:
            _LOWER_CHUNK[plan.family](steps, plan, number, (begin, end))
    return _schedule(plan, numel, itemsize, steps)


def lower_ring(plan: Plan, numel: int, itemsize: int, channels: int = 1) -> Schedule:
    """Return the messages of a ring all-reduce over the ranks of `plan`, whatever its family.

    The ring leads through ``plan.nodes`` in order. Each channel reduces its part of the buffer
    over a ring of its own, in which the ranks of every node are turned by one place, so that
    another rank of the node, and its NIC, leads to the next. Chunks of the schedule are channels.

    Raises
    ------
    PlanError
        If the buffer is not the one that was planned for, the plan's nodes do not hold its ranks,
        or there is no channel.
    """
    if channels < 1:
        raise PlanError(f"a ring needs at least one channel, not {channels}")
    _check_size(plan, numel, itemsize)
    steps = StepList()
    lowering_flat.rings(steps, plan, (0, numel), channels)
    return _schedule(plan, numel, itemsize, steps)


def _check_size(plan: Plan, numel: int, itemsize: int) -> None:
    if numel * itemsize != plan.nbytes:
        raise PlanError(
            f"the plan is for {plan.nbytes} bytes, the buffer has {numel} elements of {itemsize} "
            f"bytes ({numel * itemsize}); plan for this size"
        )
    ranks = sorted(rank for node in plan.nodes for rank in node)
    if ranks != list(range(plan.world_size)) or not all(plan.nodes):
        raise PlanError(
            f"the plan's nodes hold the ranks {ranks[:16]}, but together they must hold each of "
            f"0..{plan.world_size - 1} once, and none may be empty; make a new plan"
        )


def _schedule(plan: Plan, numel: int, itemsize: int, steps: StepList) -> Schedule:
    return Schedule(
        plan_hash=plan.hash,
        world_size=plan.world_size,
        numel=numel,
        itemsize=itemsize,
        steps=tuple(steps.steps),
    )


def _chunk_intervals(plan: Plan, itemsize: int) -> list[Interval]:
    intervals = []
    begin = 0
    for number, size in enumerate(plan.chunk_nbytes):
        if size % itemsize or size < 0:
            raise PlanError(
                f"chunk {number} of the plan has {size} bytes, which is no multiple of the "
                f"element size {itemsize}; plan with itemsize={itemsize}"
            )
        intervals.append((begin // itemsize, (begin + size) // itemsize))
        begin += size
    if begin != plan.nbytes:
        raise PlanError(f"the plan's chunks hold {begin} of {plan.nbytes} bytes; make a new plan")
    return intervals
