"""A schedule as messages between two ranks, which is what point-to-point executors want."""

from collections.abc import Sequence
from dataclasses import dataclass

from topo_ar.errors import PlanError
from topo_ar.planning.schedule import Op, Schedule, Step
from topo_ar.planning.step_list import RINGS, ring_messages


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: `source` sends elements ``begin..end`` to `target`, which adds or stores them.

    `source_after` are transfers that must have arrived at the source before it sends,
    `target_after` those that must have arrived there before this one is stored, and
    `target_sent` those that the target must have sent, since this one changes what they read.
    """

    index: int
    source: int
    target: int
    begin: int
    end: int
    adds: bool
    source_after: tuple[int, ...]
    target_after: tuple[int, ...]
    target_sent: tuple[int, ...]


def transfers(schedule: Schedule) -> list[Transfer]:
    """Return the messages of `schedule` in an order that every rank may follow.

    The members of a step send in the order of its group. Dependencies are those of the data: a
    message waits for the last that wrote what it reads, and is stored after what it would
    overwrite has been sent.

    Raises
    ------
    PlanError
        If a step is handed to torch.distributed as a whole and so has no messages.
    """
    log = _Log(schedule)
    for step in schedule.steps:
        for part in _hops(step):
            log.add(part)
    return log.found


class _Log:
    """The last writes and the reads since, for every rank and unit of elements."""

    def __init__(self, schedule: Schedule) -> None:
        edges = {0, schedule.numel}
        edges.update(edge for step in schedule.steps for shard in step.shards for edge in shard)
        self._edges = sorted(edges)
        self._at = {edge: position for position, edge in enumerate(self._edges)}
        units = len(self._edges) - 1
        self._written = [[-1] * units for _ in range(schedule.world_size)]
        self._read: list[list[list[int]]] = [
            [[] for _ in range(units)] for _ in range(schedule.world_size)
        ]
        self.found: list[Transfer] = []

    def add(self, step: Step) -> None:
        first = len(self.found)
        drafts = [
            (source, target, begin, end)
            for source, target, begin, end in _messages(step)
            if begin < end
        ]
        # All members send what they held before the step: every read comes before any write.
        sends = [
            self._reads(first + position, source, begin, end)
            for position, (source, _, begin, end) in enumerate(drafts)
        ]
        adds = step.op is not Op.ALL_GATHER
        for (source, target, begin, end), after in zip(drafts, sends, strict=True):
            index = len(self.found)
            arrived, sent = self._writes(index, target, begin, end)
            self.found.append(
                Transfer(index, source, target, begin, end, adds, after, arrived, sent)
            )

    def _units(self, begin: int, end: int) -> range:
        return range(self._at[begin], self._at[end])

    def _reads(self, index: int, rank: int, begin: int, end: int) -> tuple[int, ...]:
        after = {self._written[rank][unit] for unit in self._units(begin, end)}
        for unit in self._units(begin, end):
            self._read[rank][unit].append(index)
        return tuple(sorted(after - {-1}))

    def _writes(
        self, index: int, rank: int, begin: int, end: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        arrived, sent = set[int](), set[int]()
        for unit in self._units(begin, end):
            arrived.add(self._written[rank][unit])
            sent.update(self._read[rank][unit])
            self._written[rank][unit] = index
            self._read[rank][unit] = []
        return tuple(sorted(arrived - {-1})), tuple(sorted(sent))


def _hops(step: Step) -> Sequence[Step]:
    """Return the messages of a ring hop by hop; else the step, all of whose are sent at once."""
    if step.stage not in RINGS:
        return (step,)
    messages = [each for at in range(len(step.group)) for each in ring_messages(step, at)]
    return [message for _, message in sorted(messages, key=lambda message: message[0])]


def _messages(step: Step) -> list[tuple[int, int, int, int]]:
    if step.op is Op.ALL_REDUCE:
        raise PlanError(
            f"step {step.index} is handed to torch.distributed as a whole; lower the plan with "
            "its ring expanded"
        )
    pairs = [(a, b) for a in step.group for b in step.group if a != b]
    shards = dict(zip(step.group, step.shards, strict=True))
    if step.op is Op.ALL_GATHER:
        return [(a, b, *shards[a]) for a, b in pairs]
    return [(a, b, *shards[b]) for a, b in pairs]
