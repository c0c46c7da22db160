"""Recursive halving and doubling among any number of ranks: as few rounds as there can be.

In each round every rank talks to one other, neighbours first, then those two apart, four, and so
on. With N no power of two the ranks beyond the next lower one first fold what they have into their
neighbours, and get the result at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from topo_ar.planning.schedule import Op, Stage
from topo_ar.planning.step_list import Interval, StepList, cut

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stages:
    """What the steps of a recursion are called; where whole buffers are doubled, none halve."""

    fold: Stage
    halve: Stage
    double: Stage
    unfold: Stage


def folded(count: int) -> tuple[list[Pair], list[int]]:
    """Return who of `count` folds into whom, as (surplus, keeper), and the power of two that stay.

    References
    ----------
    Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
    2005.
    """
    extra = count - (1 << (count.bit_length() - 1))
    pairs = [(2 * i + 1, 2 * i) for i in range(extra)]
    return pairs, [*range(0, 2 * extra, 2), *range(2 * extra, count)]


def rounds(count: int, *, halving: bool) -> list[tuple[list[Pair], Fraction]]:
    """Return who of `count` sends to whom in each round, and which part of the buffer.

    With `halving` those of the way in; the way back is the same in the opposite order. Without it
    all rounds: whole buffers are doubled, and the last round unfolds.
    """
    surplus, active = folded(count)
    found = [(surplus, Fraction(1))] if surplus else []
    distance = 1
    while distance < len(active):
        pairs = [(active[k], active[k ^ distance]) for k in range(len(active))]
        found.append((pairs, Fraction(1, 2 * distance) if halving else Fraction(1)))
        distance *= 2
    if surplus and not halving:
        found.append(([(keeper, other) for other, keeper in surplus], Fraction(1)))
    return found


class Recursion:
    """Adds the steps of one chunk among `ranks`; `last` is the step that each rank's data is from.

    Parameters
    ----------
    steps : StepList
        To which they are added.
    ranks : sequence of int
        The members, neighbours near each other.
    chunk : int
        The chunk.
    stages : Stages
        The stages of the steps.
    last : dict
        Steps that are waited for; brought up to date.
    """

    def __init__(
        self,
        steps: StepList,
        ranks: Sequence[int],
        chunk: int,
        stages: Stages,
        last: dict[int, int],
    ) -> None:
        self._steps = steps
        self._chunk = chunk
        self._stages = stages
        self._last = last
        pairs, active = folded(len(ranks))
        self._folded = [(ranks[other], ranks[keeper]) for other, keeper in pairs]
        self._active = [ranks[i] for i in active]

    def halve_and_double(self, interval: Interval) -> None:
        """Add Rabenseifner's all-reduce: halves are exchanged, quarters, and so on, and back."""
        self._fold(interval)
        size = len(self._active)
        held = [interval] * size
        exchanged: list[tuple[Pair, tuple[Interval, ...]]] = []
        for low, high in self._pairs():
            begin, end = held[low]
            if begin < end:
                halves = held[low], held[high] = cut(begin, end, (1, 1))
                exchanged.append(((self._active[low], self._active[high]), halves))
        for pair, halves in exchanged:
            self._add(self._stages.halve, Op.REDUCE_SCATTER, pair, halves)
        for pair, halves in reversed(exchanged):
            self._add(self._stages.double, Op.ALL_GATHER, pair, halves)
        self._unfold(interval)

    def double(self, interval: Interval) -> None:
        """Add recursive doubling: every rank sends all that it has, and adds in the same order."""
        self._fold(interval)
        for low, high in self._pairs():
            pair = self._active[low], self._active[high]
            self._add(self._stages.double, Op.EXCHANGE, pair, (interval, interval))
        self._unfold(interval)

    def _pairs(self) -> list[Pair]:
        size = len(self._active)
        return [
            (low, low | 1 << bit)
            for bit in range(size.bit_length() - 1)
            for low in range(size)
            if not low & 1 << bit
        ]

    def _fold(self, interval: Interval) -> None:
        for other, keeper in self._folded:
            self._add(self._stages.fold, Op.REDUCE_SCATTER, (other, keeper), _to_second(interval))

    def _unfold(self, interval: Interval) -> None:
        for other, keeper in self._folded:
            # What the surplus rank did last, the keeper has waited for.
            del self._last[other]
            pair, shards = (keeper, other), _to_second(interval)[::-1]
            self._add(self._stages.unfold, Op.ALL_GATHER, pair, shards)

    def _add(self, stage: Stage, op: Op, group: Pair, shards: tuple[Interval, ...]) -> None:
        after = {self._last[rank] for rank in group if rank in self._last}
        index = self._steps.add(stage, op, group, shards, self._chunk, after)
        self._last.update(dict.fromkeys(group, index))


def _to_second(interval: Interval) -> tuple[Interval, Interval]:
    return (interval[0], interval[0]), interval
