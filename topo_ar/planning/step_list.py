"""The list of steps while a plan is lowered, and how an interval is cut."""

from collections.abc import Iterable, Iterator, Sequence

from topo_ar.planning.schedule import Op, Stage, Step

Interval = tuple[int, int]

RINGS = (Stage.INTER_RING_REDUCE_SCATTER, Stage.INTER_RING_ALL_GATHER)


def cut(begin: int, end: int, weights: Sequence[int]) -> tuple[Interval, ...]:
    """Cut an interval into one part for each weight; parts tile it and may be empty."""
    total, length, seen = sum(weights), end - begin, 0
    parts = []
    for weight in weights:
        first = begin + length * seen // total
        seen += weight
        parts.append((first, begin + length * seen // total))
    return tuple(parts)


def ring_messages(step: Step, place: int) -> Iterator[tuple[int, Step]]:
    """Yield what comes round a ring to the member at `place` of a step, each with its hop.

    A block is added to from its owner's successor on, all the way round to the owner; the sum goes
    on from there. Messages are steps of the sender and the receiver; empty blocks are not sent.
    """
    size, gathers = len(step.group), step.op is Op.ALL_GATHER
    pair = step.group[place - 1], step.group[place]
    for hop in range(size - 1):
        block = step.shards[(place - (1 if gathers else 2) - hop) % size]
        if block[0] < block[1]:
            nothing = (block[0], block[0])
            shards = (block, nothing) if gathers else (nothing, block)
            yield hop, Step(step.index, step.stage, step.op, pair, shards, step.chunk)


class StepList:
    """The steps so far."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(
        self,
        stage: Stage,
        op: Op,
        group: tuple[int, ...],
        shards: tuple[Interval, ...],
        chunk: int,
        after: Iterable[int] = (),
    ) -> int:
        """Append a step and return its index."""
        index = len(self.steps)
        self.steps.append(Step(index, stage, op, group, shards, chunk, tuple(sorted(set(after)))))
        return index

    def send(
        self,
        stage: Stage,
        op: Op,
        source: int,
        target: int,
        interval: Interval,
        chunk: int,
        after: Iterable[int],
    ) -> int:
        """Append a message: `source` reduces to `target`, or `target` gets a copy.

        In its group the source comes first.
        """
        nothing = (interval[0], interval[0])
        shards = (nothing, interval) if op is Op.REDUCE_SCATTER else (interval, nothing)
        return self.add(stage, op, (source, target), shards, chunk, after)
