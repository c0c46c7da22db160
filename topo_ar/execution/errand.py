"""What the communication thread waits for: whom it would name, and work beside the pipeline."""

from collections.abc import Callable
from dataclasses import dataclass

from topo_ar.planning.schedule import Stage


@dataclass(frozen=True, slots=True)
class Wait:
    """For which `ranks`, in which `stage`, a rank waits, and what they lack.

    `distance` says how indirect the evidence is: 0 a co-located rank that did not come, 1 a rank
    on another node that may itself be waiting, 2 a co-located rank that may wait for such a one.
    """

    stage: Stage
    ranks: tuple[int, ...]
    what: str
    distance: int


@dataclass(frozen=True, slots=True)
class Errand:
    """A step of an operation that the thread does while the pipeline is idle.

    Attributes
    ----------
    turn : callable
        Moves what can be moved; returns whether anything did.
    done : callable
        Whether there is nothing left to do.
    counters : int
        Which counters of co-located ranks it waits for: a mask of ``1 << counter``.
    wait : callable
        For whom it waits.
    """

    turn: Callable[[], bool]
    done: Callable[[], bool]
    counters: int
    wait: Callable[[], Wait]
