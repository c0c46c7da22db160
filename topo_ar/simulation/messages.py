"""Who sends how much to whom in a step, and what a step costs beside its bytes.

As `planning.traffic` counts: inside a node a group goes round a ring, between nodes every member
sends to every other. Where the stage or the runtime says that it is a ring between nodes too, the
same bytes leave and reach each member, but go to its neighbour.
"""

from collections.abc import Sequence

from topo_ar.planning.runtime import Runtime
from topo_ar.planning.schedule import Op, Stage, Step
from topo_ar.planning.step_list import RINGS, cut

# From rank, to rank, elements.
Message = tuple[int, int, float]

_AT_ONCE = (Stage.DIRECT_REDUCE_SCATTER, Stage.DIRECT_ALL_GATHER)


def messages(step: Step, place: Sequence[int], ring_rails: bool = False) -> list[Message]:
    """Return all messages of a step with more than 0 elements; `place` is the node of each rank."""
    ranks = step.group
    count = len(ranks)
    if step.op is Op.ALL_REDUCE:
        begin, end = step.shards[0]
        blocks = [b - a for a, b in cut(begin, end, (1,) * count)]
        sent = [2 * (end - begin) - blocks[i] - blocks[(i + 1) % count] for i in range(count)]
        return _round(ranks, sent)
    sizes = [end - begin for begin, end in step.shards]
    if step.op is Op.EXCHANGE:
        return [(a, b, sizes[0]) for a in ranks for b in ranks if a != b and sizes[0]]
    one_place = len({place[rank] for rank in ranks}) == 1
    if (
        one_place
        or step.stage in RINGS
        or (ring_rails and count > 2 and step.stage not in _AT_ONCE)
    ):
        whole = sum(sizes)
        if step.op is Op.REDUCE_SCATTER:
            return _round(ranks, [whole - size for size in sizes])
        return _round(ranks, [whole - size for size in sizes[1:] + sizes[:1]])
    found: list[Message] = []
    for owner, size in zip(ranks, sizes, strict=True):
        if size:
            others = [rank for rank in ranks if rank != owner]
            scatter = step.op is Op.REDUCE_SCATTER
            found += [(a, owner, size) if scatter else (owner, a, size) for a in others]
    return found


def rings(nodes: Sequence[Sequence[int]], step: Step) -> list[Message]:
    """Return the messages of an all-reduce as NCCL runs it: a ring for each rank of a node.

    Each ring has an even part of the buffer and leaves the nodes at ranks of its own, so that all
    NICs are used.
    """
    count = len(step.group)
    channels = max(map(len, nodes))
    begin, end = step.shards[0]
    sent = 2 * (end - begin) * (count - 1) / count / channels
    found = []
    for turned in range(channels):
        ring = [node[(place + turned) % len(node)] for node in nodes for place in range(len(node))]
        after = [*ring[1:], ring[0]]
        found += [(a, b, sent) for a, b in zip(ring, after, strict=True)]
    return found


def _round(ranks: Sequence[int], sent: Sequence[int]) -> list[Message]:
    after = (*ranks[1:], ranks[0])
    return [(a, b, size) for a, b, size in zip(ranks, after, sent, strict=True) if size and a != b]


def elements_added(step: Step) -> int:
    """Return the most elements that a member of the group adds to others."""
    sizes = [end - begin for begin, end in step.shards]
    others = len(step.group) - 1
    if step.op is Op.ALL_GATHER:
        return 0
    return sizes[0] * others // (others + 1) if step.op is Op.ALL_REDUCE else max(sizes) * others


def call_seconds(step: Step, runtime: Runtime) -> float:
    """Return for how long a step keeps its ranks busy before its first byte, latency left out."""
    others = len(step.group) - 1
    if step.op is Op.ALL_REDUCE:
        return 2 * others * runtime.flat_hop_seconds
    seconds = runtime.call_seconds + (runtime.chunk_seconds or 0)
    return seconds + (others * runtime.message_seconds if step.stage in _AT_ONCE else 0)
