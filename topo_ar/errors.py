"""Every exception of the package.

::

    TopoError
    ├── ConfigError        a flag, a size, a rate or a cluster spec that cannot be used
    ├── TopologyError      a topology or a foreign description of one that cannot be used
    ├── PlanError          no plan can be made, or a plan does not fit where it is used
    ├── EmulationError     hosts cannot be built on this machine, or one of them failed
    └── ExecutionError     a collective failed; carries the ranks and the stage

Messages are one sentence that names the thing, the value, the rule and the remedy.
The command line prints them as they are and ends with ``exit_code``.
"""

from collections.abc import Iterable


class TopoError(Exception):
    """Base of every error the package raises on purpose."""

    exit_code = 1


class ConfigError(TopoError, ValueError):
    """Bad input from a person: a flag, a size, a rate, a cluster spec."""

    exit_code = 2


class TopologyError(TopoError, ValueError):
    """A topology, or a file that should describe one, is malformed or contradicts itself."""

    exit_code = 2


class PlanError(TopoError, ValueError):
    """No plan exists for the request, or a plan does not fit the job that should run it."""

    exit_code = 2


class EmulationError(TopoError, RuntimeError):
    """Hosts cannot be emulated on the machine, or an emulated host failed."""

    exit_code = 2


class ExecutionError(TopoError, RuntimeError):
    """A collective failed on this rank.

    Attributes
    ----------
    ranks : tuple of int
        The ranks known to be at fault; empty when unknown.
    stage : str
        The stage of the schedule in which it happened, such as ``intra_reduce_scatter``.
    nodes : tuple of int
        The nodes of those ranks, as numbered in ``Communicator.nodes``.
    collective : int
        The number of the collective that failed, counted from 0; -1 when unknown.
    last_completed : int
        The number of the last collective that this rank completed; -1 when there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Iterable[int] = (),
        stage: str = "",
        nodes: Iterable[int] = (),
        collective: int = -1,
        last_completed: int = -1,
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.stage = stage
        self.nodes = tuple(nodes)
        self.collective = collective
        self.last_completed = last_completed
