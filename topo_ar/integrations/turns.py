"""Steps of a training in which several ways to do them take turns, and the seconds of each."""

from collections.abc import Sequence


class Turns:
    """Says who is next, and keeps what their steps took; but for the seconds equal on all ranks.

    The first step of a turn is not counted: it pays for the change.

    Parameters
    ----------
    order : sequence of int
        Who has each turn, counted from 0.
    turn_steps : int
        Steps of a turn, 2 or more.

    Attributes
    ----------
    seconds : list of list of float
        What the counted steps took, for each that takes turns.
    """

    def __init__(self, order: Sequence[int], turn_steps: int) -> None:
        self.seconds: list[list[float]] = [[] for _ in set(order)]
        self._order = tuple(order)
        self._turn_steps = turn_steps
        self._step = -1
        self._began = 0.0

    def next(self, now: float) -> int | None:
        """Return whose step begins at `now`, in seconds, when the one before ends; None at last."""
        if self._step >= 0 and self._step % self._turn_steps:
            self.seconds[self._order[self.num_turns]].append(now - self._began)
        self._began = now
        self._step += 1
        return self._order[self.num_turns] if self.num_turns < len(self._order) else None

    @property
    def turn_begins(self) -> bool:
        """Whether the step that has begun is the first one of a turn."""
        return self._step % self._turn_steps == 0

    @property
    def num_turns(self) -> int:
        """How many turns are whole."""
        return self._step // self._turn_steps
