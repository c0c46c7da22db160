"""A plan's schedule for executors that cut the buffer themselves: one chunk, exact shares."""

import math

import msgspec

from topo_ar.errors import PlanError
from topo_ar.planning.lowering import lower, lower_ring
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.schedule import Schedule

_MOST_ELEMENTS = 1 << 20


def single_chunk(plan: Plan) -> Schedule:
    """Return the schedule of `plan` for one chunk of the fewest elements that its shares divide.

    Elements stand for equal parts of the buffer and are one byte each.

    Raises
    ------
    PlanError
        If the weights are so uneven that more than a million parts would be needed.
    """
    weights = [sum(plan.shards.nodes), *map(sum, plan.shards.ranks)]
    numel = math.lcm(*map(sum, plan.shards.ranks)) * sum(plan.shards.nodes)
    numel = math.lcm(numel, plan.world_size, 1 << (plan.world_size.bit_length() - 1), 2)
    if numel > _MOST_ELEMENTS:
        raise PlanError(
            f"weights that add up to {sorted(set(weights))[:8]} need {numel} equal parts; "
            "plan with rounder weights"
        )
    whole = msgspec.structs.replace(plan, nbytes=numel, chunk_nbytes=(numel,))
    return explicit(whole, 1)


def explicit(plan: Plan, itemsize: int) -> Schedule:
    """Return the schedule of `plan` in messages: a flat ring as the ring it is.

    Raises
    ------
    PlanError
        As for `lower`.
    """
    lowered = lower_ring if plan.family is Family.FLAT_RING else lower
    return lowered(plan, plan.nbytes // itemsize, itemsize)
