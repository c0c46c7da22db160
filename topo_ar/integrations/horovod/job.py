"""``init`` and ``shutdown``, who is where, and process sets."""

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from topo_ar.errors import ConfigError
from topo_ar.execution.torch_private import HashStore
from topo_ar.integrations.horovod.engine import Engine
from topo_ar.integrations.horovod.launch import Place, address_of, place_of
from topo_ar.torch_backend import NAME, register_backend

# Seconds after which ranks stop to wait for one that asks for nothing; torch's default if unset.
_TIMEOUT_ENV = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


class ProcessSet:
    """Ranks that communicate among themselves: ``process_set=`` of every operation.

    Parameters
    ----------
    ranks : sequence of int
        The members.

    Attributes
    ----------
    process_set_id : int or None
        Its number; None before `init` or `add_process_set` has made it known to all ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] = sorted(set(ranks))
        self.process_set_id: int | None = None
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """What works for it on this rank.

        Raises
        ------
        ValueError
            If it is not known yet, or this rank is not in it.
        """
        if self._engine is None:
            if self.process_set_id is None:
                known = (
                    "call hvd.init() first"
                    if self is global_process_set
                    else ("pass it to hvd.add_process_set or hvd.init")
                )
                raise ValueError(f"{self} is not initialized; {known}")
            raise ValueError(f"rank {rank()} is not in {self}")
        return self._engine

    def included(self) -> bool:
        """Tell whether this rank is a member."""
        return rank() in self.ranks

    def size(self) -> int:
        """Return the number of members."""
        _job()
        return len(self.ranks)

    def rank(self) -> int:
        """Return this rank's place among the members, from 0."""
        if not self.included():
            raise ValueError(f"rank {rank()} is not in {self}")
        return self.ranks.index(rank())

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


global_process_set = ProcessSet([])


class _Job:
    """What `init` sets up; the lists have an entry for each rank."""

    def __init__(self, place: Place, owns_group: bool, timeout: timedelta | None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.owns_group = owns_group
        self.timeout = timeout
        self.sets: dict[int, ProcessSet] = {}
        self._next_id = 0
        self.add(global_process_set)
        control = global_process_set.engine.control
        dist.all_reduce(torch.zeros(1, dtype=torch.int32), group=control)  # makes the communicator
        communicator = getattr(control, "communicator", None)
        nodes = communicator.nodes if communicator is not None else (tuple(range(self.size)),)
        (node,) = [node for node in nodes if self.rank in node]
        local_rank = node.index(self.rank) if place.local_rank is None else place.local_rank
        mine = local_rank, place.local_size or len(node)
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine, group=control)
        self.local_ranks = [local for local, _ in gathered]
        self.local_sizes = [size for _, size in gathered]

    def add(self, process_set: ProcessSet) -> ProcessSet:
        """Make a process set known; collective over all ranks."""
        if process_set is global_process_set:
            process_set.ranks = list(range(self.size))
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} has been added before")
        outside = [each for each in process_set.ranks if not 0 <= each < self.size]
        if outside or not process_set.ranks:
            raise ValueError(f"{process_set}: ranks are 0 to {self.size - 1}, at least one of them")
        if any(process_set.ranks == known.ranks for known in self.sets.values()):
            raise ValueError(f"there is a process set of the ranks {process_set.ranks} already")
        engine = Engine(process_set.ranks, self.timeout)
        process_set.process_set_id = self._next_id
        process_set._engine = engine if self.rank in process_set.ranks else None
        self.sets[self._next_id] = process_set
        self._next_id += 1
        return process_set

    def remove(self, process_set: ProcessSet) -> None:
        engine, process_set._engine = process_set._engine, None
        if process_set.process_set_id is not None:
            del self.sets[process_set.process_set_id]
        process_set.process_set_id = None
        if engine is not None:
            engine.close()
            for group in (engine.group, engine.control):
                dist.destroy_process_group(group)

    def close(self) -> None:
        if not dist.is_initialized():  # the script has taken all groups down
            for process_set in self.sets.values():
                process_set._engine = process_set.process_set_id = None
            return
        for process_set in reversed(list(self.sets.values())):
            self.remove(process_set)
        if self.owns_group:
            dist.destroy_process_group()


_made: _Job | None = None


def _job() -> _Job:
    if _made is None:
        raise ValueError("Horovod has not been initialized; call hvd.init() first")
    return _made


def init(
    comm: object = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    timeout_s: float | None = None,
) -> None:
    """Find the other ranks; collective. Called again it does nothing.

    A default process group that exists is used, else one with backend ``topo`` is made of what the
    launcher has put in the environment: torchrun, Open MPI, MPICH, Slurm's srun, or variables
    ``HOROVOD_RANK`` and so on. Where all ranks are on one host, ``MASTER_ADDR`` and
    ``MASTER_PORT`` are filled in. Without a launcher this process is alone.

    Parameters
    ----------
    comm : None
        Communicators of MPI and lists of ranks are not supported.
    process_sets : sequence of ProcessSet, optional
        Added as by `add_process_set`. They may be added at any time, so ``"dynamic"`` is nothing.
    timeout_s : float, optional
        How long ranks wait for each other before all of them fail; else
        ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` or torch's default.

    Raises
    ------
    ConfigError
        If the environment does not say where rank 0 is, or `comm` is given.
    """
    global _made
    if _made is not None:
        return
    if comm is not None:
        raise ConfigError("hvd.init(comm=...) is not supported; use process sets for some ranks")
    register_backend()
    timeout_s = timeout_s or float(os.environ.get(_TIMEOUT_ENV, 0)) or None
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    place = place_of(os.environ)
    owns_group = not dist.is_initialized()
    if owns_group:
        _make_group(place, timeout)
    _made = _Job(place, owns_group, timeout)
    atexit.register(shutdown)
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            _made.add(process_set)


def _make_group(place: Place, timeout: timedelta | None) -> None:
    options: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size}
    if place.world_size == 1:
        dist.init_process_group(NAME, store=HashStore(), timeout=timeout, **options)
        return
    address, port = address_of(os.environ, place)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, port
    dist.init_process_group(NAME, timeout=timeout, **options)


def shutdown() -> None:
    """Leave the job; what is not complete fails. A group that `init` has made is destroyed."""
    global _made
    if _made is not None:
        atexit.unregister(shutdown)
        job, _made = _made, None
        job.close()


def is_initialized() -> bool:
    """Tell whether `init` has been called, and `shutdown` not since."""
    return _made is not None


def rank() -> int:
    """Return this process's rank in the job."""
    return _job().rank


def size() -> int:
    """Return the number of ranks."""
    return _job().size


def local_rank() -> int:
    """Return the rank on this host: as the launcher says, else among those found to share it."""
    return int(_job().local_ranks[rank()])


def local_size() -> int:
    """Return the number of ranks on this host."""
    return int(_job().local_sizes[rank()])


def cross_rank() -> int:
    """Return this rank's place among those that have its local rank on their hosts."""
    return sum(local == local_rank() for local in _job().local_ranks[: rank()])


def cross_size() -> int:
    """Return how many ranks have this one's local rank on their hosts."""
    return sum(local == local_rank() for local in _job().local_ranks)


def is_homogeneous() -> bool:
    """Tell whether all hosts have equally many ranks."""
    return len(set(_job().local_sizes)) == 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set known to the job. Collective over all ranks, members or not.

    Raises
    ------
    ValueError
        If it is known already, or names ranks that do not exist.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    return _job().add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of the job, and tell whether it was in it. Collective.

    Raises
    ------
    ValueError
        If it is the global one.
    """
    if process_set is global_process_set:
        raise ValueError("the global process set cannot be removed")
    if process_set.process_set_id is None:
        return False
    _job().remove(process_set)
    return True


def process_set_ids() -> list[int]:
    """Return the numbers of all process sets."""
    return list(_job().sets)
