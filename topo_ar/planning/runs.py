"""One rank's buffer as runs of elements that share a history."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class History(NamedTuple):
    """What a run of elements holds: contributions as a bit mask over the ranks.

    `writer` is the step that wrote it, -1 for none; `readers` are the steps that copied it since.
    """

    held: int
    writer: int = -1
    readers: tuple[int, ...] = ()

    def read_by(self, step: int) -> "History":
        """Return the history after one more copy."""
        return self._replace(readers=(*self.readers, step))


Run = tuple[int, int, History]


class Runs:
    """The elements begin..end in runs, in order, without gaps."""

    def __init__(self, begin: int, end: int, held: int) -> None:
        self._begins = [begin]
        self._end = end
        self._histories = [History(held)]

    @staticmethod
    def of(runs: Sequence[Run]) -> "Runs":
        """Return runs that follow each other without a gap."""
        made = Runs(runs[0][0], runs[-1][1], 0)
        made.replace(runs[0][0], runs[-1][1], runs)
        return made

    def between(self, begin: int, end: int) -> list[Run]:
        """Return the runs of begin..end, cut at both."""
        if begin == end:
            return []
        first = bisect_right(self._begins, begin) - 1
        last = bisect_left(self._begins, end)
        begins = [begin, *self._begins[first + 1 : last]]
        ends = [*begins[1:], end]
        return list(zip(begins, ends, self._histories[first:last], strict=True))

    def replace(self, begin: int, end: int, runs: Sequence[Run]) -> None:
        """Put `runs`, which tile begin..end, in the place of what is there; join equal ones."""
        first = bisect_right(self._begins, begin) - 1
        last = bisect_left(self._begins, end)
        begins: list[int] = []
        histories: list[History] = []
        if self._begins[first] < begin:
            begins.append(self._begins[first])
            histories.append(self._histories[first])
        after = self._begins[last] if last < len(self._begins) else self._end
        tail = [(end, after, self._histories[last - 1])] if end < after else []
        for start, _, history in (*runs, *tail):
            if not histories or histories[-1] != history:
                begins.append(start)
                histories.append(history)
        self._begins[first:last] = begins
        self._histories[first:last] = histories
