"""When a job has missed its targets for long enough, step by step; a pure function of its steps."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from topo_ar.telemetry.targets import Targets

_LOSSES = 20
# So many steps within the targets end an episode.
WELL_STEPS = 50


@dataclass(frozen=True, slots=True)
class Breach:
    """Targets that were missed for `patience_steps` in a row.

    Attributes
    ----------
    values : dict of str to float
        What was missed, and by the last step.
    first_step, last_step : int
        From the first step that missed it to the one that made it a breach.
    """

    values: dict[str, float]
    first_step: int
    last_step: int


class BreachWatch:
    """Takes in steps, and says when they are a breach.

    Parameters
    ----------
    targets : Targets
        What they may take.

    Attributes
    ----------
    well_steps : int
        How many steps in a row have met all targets.
    """

    def __init__(self, targets: Targets) -> None:
        self.well_steps = 0
        self._targets = targets
        self._missed_since: dict[str, int] = {}
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._least_loss = float("inf")

    def add(self, step: int, figures: Mapping[str, float], loss: float | None) -> Breach | None:
        """Take in a step.

        Parameters
        ----------
        step : int
            Its number.
        figures : mapping of str to float
            By name of the target.
        loss : float or None
            Of the step, on the average of the ranks; None where it was not reported.
        """
        drift = self._drift(loss)
        found = dict(figures) if drift is None else {**figures, "loss_drift": drift}
        missed = self._targets.missed(found)
        self.well_steps = 0 if missed else self.well_steps + 1
        self._missed_since = {name: self._missed_since.get(name, step) for name in missed}
        patience = self._targets.patience_steps
        breached = [n for n, since in self._missed_since.items() if step - since + 1 >= patience]
        if not breached:
            return None
        first = min(self._missed_since[name] for name in breached)
        return Breach({name: missed[name] for name in breached}, first, step)

    def restart(self) -> None:
        """Forget what was missed: something was done about it."""
        self._missed_since.clear()

    def _drift(self, loss: float | None) -> float | None:
        """Return how far the level of the loss lies above its lowest: medians of 20 steps."""
        if loss is None:
            return None
        if loss != loss or abs(loss) == float("inf"):
            return float("inf")
        self._losses.append(loss)
        if len(self._losses) < _LOSSES:
            return None
        level = median(self._losses)
        self._least_loss = min(self._least_loss, level)
        scale = abs(self._least_loss)
        return (level - self._least_loss) / scale if scale else 0.0
