"""What a bucket sends in the plan that runs it, and what the plan says it takes."""

from collections.abc import Sequence
from itertools import pairwise

from topo_ar.execution.communicator import Communicator
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.traffic import bytes_sent


def flat_seconds(plan: Plan) -> float | None:
    """Return what the planner says of plain all-reduce beside `plan`; None if it says nothing."""
    if plan.family is Family.FLAT_RING:
        return plan.predicted_seconds
    return next(
        (a.seconds for a in plan.alternatives if a.family is Family.FLAT_RING and not a.excluded),
        None,
    )


def planned_bytes(plan: Plan, itemsize: int) -> tuple[int, int]:
    """Return the bytes that cross links inside nodes, and between them, over all ranks.

    Parameters
    ----------
    plan : Plan
        Of the bucket.
    itemsize : int
        Bytes of an element.
    """
    if plan.family is Family.FLAT_RING:
        return ring_bytes(plan.nodes, plan.nbytes)
    traffic = bytes_sent(lower(plan, plan.nbytes // itemsize, itemsize), plan.nodes)
    return sum(traffic.sent_inside), sum(traffic.sent_between)


def ring_bytes(nodes: Sequence[Sequence[int]], nbytes: int) -> tuple[int, int]:
    """Return the same for a ring in rank order, in which each rank sends 2(n-1)/n of the buffer."""
    node_of = {rank: i for i, node in enumerate(nodes) for rank in node}
    world_size = len(node_of)
    ring = [*range(world_size), 0]
    crossing = sum(node_of[a] != node_of[b] for a, b in pairwise(ring))
    each = 2 * (world_size - 1) * nbytes / world_size
    return round((world_size - crossing) * each), round(crossing * each)


def nic_rates_said(communicator: Communicator) -> list[float]:
    """Return what the topology says that the NICs of each node carry, in bytes/s."""
    from topo_ar.topology.levels import levels

    by_first = {min(node.ranks): node for node in levels(communicator.topology).nodes}
    return [sum(nic.payload for nic in by_first[min(ranks)].nics) for ranks in communicator.nodes]
