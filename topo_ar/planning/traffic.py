"""How much every rank sends and receives in a schedule, and where to.

Between nodes a member of a reduce-scatter sends to each owner what that one owns, and an owner
sends its sum to each member of an all-gather: with n members and the share w of owner i, i sends
and receives ``S [1 + w (n - 2)]`` in both together. Inside a node both go round a ring, so that no
port moves more than the whole interval once; all of torch's all-reduce does, in the order of its
group, and so do the steps between nodes that say so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from topo_ar.planning.schedule import Op, Schedule, Step
from topo_ar.planning.step_list import RINGS, cut

# Elements that a member sends and receives.
Flow = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one all-reduce for each rank: to ranks of its own node, and to other nodes.

    `nodes` are the ranks of each node.
    """

    nodes: tuple[tuple[int, ...], ...]
    sent_inside: tuple[int, ...]
    received_inside: tuple[int, ...]
    sent_between: tuple[int, ...]
    received_between: tuple[int, ...]

    @property
    def node_sent(self) -> tuple[int, ...]:
        """Bytes that leave each node."""
        return tuple(sum(self.sent_between[rank] for rank in node) for node in self.nodes)

    @property
    def node_received(self) -> tuple[int, ...]:
        """Bytes that reach each node."""
        return tuple(sum(self.received_between[rank] for rank in node) for node in self.nodes)


def bytes_sent(schedule: Schedule, nodes: Sequence[Sequence[int]]) -> Traffic:
    """Count the bytes of `schedule` when the ranks sit on `nodes`."""
    place = places(nodes, schedule.world_size)
    counts = [[0] * schedule.world_size for _ in range(4)]
    for step in schedule.steps:
        for held, found in ((counts[:2], within(step, place)), (counts[2:], crossing(step, place))):
            for rank, (sent, received) in zip(step.group, found, strict=True):
                held[0][rank] += sent * schedule.itemsize
                held[1][rank] += received * schedule.itemsize
    return Traffic(tuple(tuple(node) for node in nodes), *(tuple(count) for count in counts))


def places(groups: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return for each of `count` members the position of its group; -1 where it has none."""
    place = [-1] * count
    for position, group in enumerate(groups):
        for member in group:
            place[member] = position
    return place


def crossing(step: Step, place: Sequence[int]) -> list[Flow]:
    """Return what each member sends to and receives from members at other places."""
    homes = [place[rank] for rank in step.group]
    if len(set(homes)) == 1:
        return [(0, 0)] * len(homes)
    if step.op is Op.ALL_REDUCE or step.stage in RINGS:
        return _ring(step, [a != b for a, b in zip(homes, homes[1:] + homes[:1], strict=True)])
    members, held = Counter(homes), _held(step, homes)
    whole, count = sum(held.values()), len(homes)
    flows = []
    for home, (begin, end) in zip(homes, step.shards, strict=True):
        others = (end - begin) * (count - members[home])
        if step.op is Op.EXCHANGE:
            flows.append((others, others))
        else:
            flows.append(_turned(step, whole - held[home], others))
    return flows


def within(step: Step, place: Sequence[int]) -> list[Flow]:
    """Return what each member sends to and receives from members at its own place."""
    homes = [place[rank] for rank in step.group]
    sizes = [end - begin for begin, end in step.shards]
    members = Counter(homes)
    if step.op is Op.EXCHANGE:
        return [(size * (members[home] - 1),) * 2 for home, size in zip(homes, sizes, strict=True)]
    if len(members) == 1 or step.op is Op.ALL_REDUCE or step.stage in RINGS:
        return _ring(step, [a == b for a, b in zip(homes, homes[1:] + homes[:1], strict=True)])
    held = _held(step, homes)
    return [
        _turned(step, held[home] - size, size * (members[home] - 1))
        for home, size in zip(homes, sizes, strict=True)
    ]


def _held(step: Step, homes: Sequence[int]) -> Counter[int]:
    """Return how many elements the owners at each place hold together."""
    held: Counter[int] = Counter()
    for home, (begin, end) in zip(homes, step.shards, strict=True):
        held[home] += end - begin
    return held


def _turned(step: Step, sent: int, received: int) -> Flow:
    """Return the flow of a reduce-scatter; an all-gather is one backwards."""
    return (sent, received) if step.op is Op.REDUCE_SCATTER else (received, sent)


def _ring(step: Step, counted: Sequence[bool]) -> list[Flow]:
    """Return what goes over those hops of a ring that count.

    Hop i leads from member i to the next. A block ends at its owner, or begins there: it passes
    every other hop, in an all-reduce twice.
    """
    sizes = [end - begin for begin, end in step.shards]
    if step.op is Op.ALL_REDUCE:
        sizes = [last - first for first, last in cut(*step.shards[0], (1,) * len(sizes))]
    whole, after = sum(sizes), sizes[1:] + sizes[:1]
    hops = [0] * len(sizes)
    if step.op is not Op.ALL_GATHER:
        hops = [whole - size for size in sizes]
    if step.op is not Op.REDUCE_SCATTER:
        hops = [hop + whole - size for hop, size in zip(hops, after, strict=True)]
    hops = [hop * counts for hop, counts in zip(hops, counted, strict=True)]
    return list(zip(hops, hops[-1:] + hops[:-1], strict=True))
