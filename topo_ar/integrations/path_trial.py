"""Whether planned or plain all-reduces make the steps of a training shorter: what turns tell.

Both take turns of a few steps in the order A B B A, so that a machine that slows down or warms up
favours neither. Who is faster beyond doubt wins early; after the last turn, what seems faster wins:
no choice between two that forty steps cannot tell apart costs more than they can show.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from statistics import fmean, median

from topo_ar.telemetry.metrics import RatioInterval, speedup_interval


class Path(IntEnum):
    """How the buckets of a step are reduced."""

    PLANNED = 0
    PLAIN = 1

    def __str__(self) -> str:
        return self.name.lower()


TURN_STEPS = 4
ORDER = (*(Path.PLANNED, Path.PLAIN, Path.PLAIN, Path.PLANNED) * 2, Path.PLANNED, Path.PLAIN)
# After so many turns there may be a winner; both have had equally many then.
LOOKS = (4, 6, 8, len(ORDER))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a look at the steps says.

    Attributes
    ----------
    path : Path or None
        The winner, if there is one.
    speedup : RatioInterval
        How many times faster planned steps are, in the median, with the 95 % interval.
    seconds : float
        The median step of the winner, or of the planned path.
    """

    path: Path | None
    speedup: RatioInterval
    seconds: float

    def to_row(self) -> list[float]:
        """Return it as numbers, for ranks to exchange."""
        path = -1 if self.path is None else int(self.path)
        return [float(path), self.seconds, *map(float, astuple(self.speedup))]

    @staticmethod
    def from_row(row: Sequence[float]) -> "Verdict":
        """Return what `to_row` was called on."""
        path, seconds, ratio, low, high, num_samples = row
        speedup = RatioInterval(ratio, low, high, int(num_samples))
        return Verdict(None if path < 0 else Path(int(path)), speedup, seconds)


def judge(
    planned: Sequence[Sequence[float]], plain: Sequence[Sequence[float]], *, last: bool
) -> Verdict:
    """Return what the seconds of steps in turns say.

    A step takes what it takes on the average of the ranks: they wait for each other in every step,
    and who happens to begin one late ends it no later than the others.

    Parameters
    ----------
    planned, plain : sequence of sequence of float
        For each rank the seconds of its steps, as many of both; the i-th of both were near in time.
    last : bool
        Whether there has to be a winner.
    """
    ours, theirs = ([fmean(step) for step in zip(*rows, strict=True)] for rows in (planned, plain))
    speedup = speedup_interval(theirs, ours)
    path = None
    if speedup.low > 1 or (last and speedup.ratio >= 1):
        path = Path.PLANNED
    elif speedup.high < 1 or last:
        path = Path.PLAIN
    return Verdict(path, speedup, median(theirs if path is Path.PLAIN else ours))
