"""The list of steps while a plan is lowered, and how an interval is cut."""

from collections.abc import Iterable, Sequence

from topo_ar.planning.schedule import Op, Stage, Step

Interval = tuple[int, int]


def cut(begin: int, end: int, weights: Sequence[int]) -> tuple[Interval, ...]:
    """Cut an interval into one part for each weight; parts tile it and may be empty."""
    total, length, seen = sum(weights), end - begin, 0
    parts = []
    for weight in weights:
        first = begin + length * seen // total
        seen += weight
        parts.append((first, begin + length * seen // total))
    return tuple(parts)


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
