"""What the ranks tell each other at the end of a window, while the next step computes.

Three gatherings follow each other on the communication thread: the stamps of the window; a barrier
that all enter as soon as they have left the first one, so that it bounds the offsets of their
clocks closely; and the times at which they entered and left it.
"""

from collections.abc import Callable, Sequence

import torch

from topo_ar.execution.communicator import Communicator
from topo_ar.telemetry.arrivals import Offsets, clock_offsets


class WindowExchange:
    """One exchange under way. Collective; nothing of this rank waits for it before `rows`.

    Parameters
    ----------
    communicator : Communicator
        Of the gradients.
    row : sequence of float
        What this rank has to say, of the same length on all ranks.
    clock : callable
        Returns the time in seconds by which this rank stamps.
    """

    def __init__(
        self, communicator: Communicator, row: Sequence[float], clock: Callable[[], float]
    ) -> None:
        self._nodes = communicator.nodes
        self._clock = clock
        self._times = torch.zeros(2, dtype=torch.float64, device="cpu")
        mine = torch.tensor(row, dtype=torch.float64, device="cpu")
        self._rows = communicator.gather_rows(mine, self._enter)
        communicator.gather_rows(torch.zeros(1, device="cpu"), self._leave)
        self._gathered_times = communicator.gather_rows(self._times)

    def _enter(self) -> None:
        self._times[0] = self._clock()

    def _leave(self) -> None:
        self._times[1] = self._clock()

    def rows(self) -> torch.Tensor:
        """Wait for what all ranks said, and return it by rank."""
        return self._rows.wait()

    def offsets(self) -> Offsets:
        """Wait for the end of the exchange and return the offsets of the ranks' clocks."""
        enter, leave = self._gathered_times.wait().t().tolist()
        return clock_offsets(enter, leave, self._nodes)
