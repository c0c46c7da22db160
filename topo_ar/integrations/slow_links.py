"""Whether transfers take longer because of the network: measured once they have grown."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from topo_ar.telemetry.job_windows import Cause
from topo_ar.telemetry.window_figures import (
    GREW,
    ONE_FLOW_BYTES_PER_S,
    SLOW_SHARE,
    Figures,
    slow_nics,
)
from topo_ar.units import format_rate

# Beyond the prediction by this much, the network is looked at without waiting for a growth.
_OVER_PREDICTION = 1.5
# Measuring again may cost so much of the time in between.
_BUDGET = 0.01


@dataclass(slots=True)
class SlowLinks:
    """Decides on rank 0 when NICs are to be measured, and says what was found; see `ring_rates`.

    Parameters
    ----------
    said : sequence of float
        What the NICs of each node are said to carry, in bytes/s.
    nodes : sequence of sequence of int
        The ranks of each node.
    clock : callable
        Returns the time in seconds.
    """

    said: Sequence[float]
    nodes: Sequence[Sequence[int]]
    clock: Callable[[], float] = time.monotonic
    _least: dict[object, float] = field(default_factory=dict)
    _causes: list[Cause] = field(default_factory=list)
    _not_before: float = 0.0
    _grown: bool = False

    def see(self, key: object, found: Figures, predicted_seconds: float | None) -> bool:
        """Take in a window; return whether the NICs are to be measured.

        Parameters
        ----------
        key
            What transfers are compared under: buckets and how they are reduced.
        found : Figures
            Of the window.
        predicted_seconds : float or None
            What the transfers of a step should take together.
        """
        if len(self.nodes) < 2:
            return False
        first = key not in self._least
        seconds = found.transfer_seconds
        least = self._least[key] = min(seconds, self._least.get(key, seconds))
        self._grown = seconds >= GREW * least
        over = predicted_seconds is not None and seconds >= _OVER_PREDICTION * predicted_seconds
        if not (self._grown or over):
            self._causes = []
        wanted = self._grown or (first and over)
        return wanted and self.clock() >= self._not_before

    def measured(self, rates: Sequence[float], cost_seconds: float) -> None:
        """Take in what the NICs carry and what it took to find out."""
        self._not_before = self.clock() + cost_seconds / _BUDGET
        self._causes = slow_nics(rates, self.said, self.nodes)
        best = max(range(len(rates)), key=lambda node: rates[node])
        if self._causes or not self._grown:
            return
        if rates[best] < min(SLOW_SHARE * self.said[best], ONE_FLOW_BYTES_PER_S):
            self._causes = [
                Cause(
                    "slow network",
                    f"transfers take longer than they did, and between nodes at most "
                    f"{format_rate(rates[best])} of {format_rate(self.said[best])} gets through; "
                    "it cannot be told whose NIC it is: look at the switch, and at both ends",
                )
            ]

    @property
    def causes(self) -> list[Cause]:
        """What is wrong with the network, as far as it is known."""
        return list(self._causes)
