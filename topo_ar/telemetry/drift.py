"""When the steps of a training are no longer what they were: longer or shorter, and to stay so."""

from statistics import median

# Steps that take this many times as long as before, or as short, in so many windows in a row.
FACTOR = 1.3
NUM_WINDOWS = 2
_WINDOW_SECONDS = 5.0
_LEAST_STEPS, _MOST_STEPS = 10, 1000


class StepWatch:
    """Watches the seconds of steps, window by window; all ranks see windows end at the same steps.

    A window has 10 to 1000 steps, about five seconds as steps were in the window before: where they
    have become ten times longer, the second window still does not last.

    Parameters
    ----------
    level_seconds : float or None
        What a step took when all was well, equal on all ranks; None where the first window, of 10
        steps, is to say it.

    Attributes
    ----------
    level_seconds : float or None
        What steps are compared with.
    window_steps : int
        How many steps the window at hand has.
    """

    def __init__(self, level_seconds: float | None) -> None:
        self.level_seconds = level_seconds
        self.window_steps = _window_steps(level_seconds)
        self._seconds: list[float] = []
        self._signs: list[int] = []

    def add(self, seconds: float) -> float | None:
        """Take in what a step took on this rank; return the window's median where it ends."""
        self._seconds.append(seconds)
        if len(self._seconds) < self.window_steps:
            return None
        found, self._seconds = median(self._seconds), []
        return found

    def drifts(self, seconds: float) -> bool:
        """Tell whether steps have changed for good, by the window that has ended.

        Parameters
        ----------
        seconds : float
            What a step took in that window on the average of all ranks.
        """
        self.window_steps = _window_steps(seconds)
        if self.level_seconds is None:
            self.level_seconds = seconds
            return False
        ratio = seconds / self.level_seconds
        sign = 1 if ratio >= FACTOR else -1 if ratio <= 1 / FACTOR else 0
        self._signs = [*self._signs, sign][-NUM_WINDOWS:]
        return self._signs == [sign] * NUM_WINDOWS and sign != 0


def _window_steps(level_seconds: float | None) -> int:
    return steps_within(_WINDOW_SECONDS, level_seconds, _LEAST_STEPS)


def steps_within(window_seconds: float, step_seconds: float | None, least: int) -> int:
    """Return how many steps a window has, `least` to 1000; `least` where it is not known yet."""
    if step_seconds is None:
        return least
    return max(least, round(min(window_seconds / step_seconds, _MOST_STEPS)))
