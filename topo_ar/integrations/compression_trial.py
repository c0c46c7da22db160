"""Takes turns among choices of codecs in the steps of a training, and finds the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from topo_ar.errors import ExecutionError
from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.turns import Turns
from topo_ar.planning.codecs import Codec
from topo_ar.units import format_seconds

_ROUNDS = 2
# The first step of a turn moves residuals; the last ones are timed.
_TURN_STEPS = 3
# What the planner chose must be slower by this much to be given up.
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec, and the parameters that it is for; all others are exact."""

    codec: Codec
    names: frozenset[str]

    def __str__(self) -> str:
        return f"{self.codec} for {len(self.names)} tensors" if self.names else "exact sums"


class Trial:
    """Counts the steps of a trial; the same on all ranks but for the seconds.

    Parameters
    ----------
    choices : sequence of Choice
        The planner's first.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = tuple(choices)
        self._turns = Turns([*range(len(choices))] * _ROUNDS, _TURN_STEPS)

    def next_choice(self, now: float) -> Choice | None:
        """Return the choice for a step that begins at `now`, in seconds; None after the last."""
        number = self._turns.next(now)
        return None if number is None else self.choices[number]

    def winner(self, communicator: Communicator) -> tuple[Choice, str]:
        """Return the fastest choice, and a sentence. Collective, while nothing is in flight.

        A choice is as fast as its fastest step on the slowest rank: other steps may have been
        interrupted by what is not training.

        Raises
        ------
        ExecutionError
            If a rank cannot be heard.
        """
        mine = msgspec.json.encode([min(seconds) for seconds in self._turns.seconds])
        try:
            heard = [
                msgspec.json.decode(each, type=list[float]) for each in communicator.gather(mine)
            ]
        except msgspec.DecodeError as error:
            raise ExecutionError(f"what a rank says of the trial is unreadable: {error}") from None
        slowest = [max(column) for column in zip(*heard, strict=True)]
        best = min(range(len(slowest)), key=slowest.__getitem__)
        if slowest[0] <= slowest[best] * (1 + _WORTH):
            best = 0
        times = ", ".join(
            f"{choice} {format_seconds(seconds)}"
            for choice, seconds in zip(self.choices, slowest, strict=True)
        )
        return self.choices[
            best
        ], f"In turns a step took: {times}. What stays: {self.choices[best]}."
