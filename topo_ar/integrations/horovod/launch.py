"""Which rank this process is: what torchrun, Open MPI, MPICH, Slurm or horovodrun say of it."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from topo_ar.errors import ConfigError

# Rank, world size, rank and number of ranks on the host; the last two may be missing.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Not SLURM_NTASKS, which a shell in an allocation has too.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
# What is the same on all ranks of a job and different in another job.
_JOB_KEYS = (
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMI_ID_JOB",),
)
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000  # below those that the system gives out


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many, in the job and, if the launcher says so, on its host."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None


def place_of(environment: Mapping[str, str]) -> Place:
    """Return which rank the variables of a launcher make this process; alone without any.

    Raises
    ------
    ConfigError
        If a variable is not a number, or the rank is not below the world size.
    """
    for names in _LAUNCHERS:
        if names[0] in environment and names[1] in environment:
            rank, size = (_number(environment, name) for name in names[:2])
            if not 0 <= rank < size:
                raise ConfigError(f"{names[0]}={rank} is not a rank of {names[1]}={size}")
            local_rank = _number(environment, names[2]) if names[2] in environment else None
            local_size = environment.get(names[3], "")  # Slurm may have a list there
            return Place(rank, size, local_rank, int(local_size) if local_size.isdigit() else None)
    return Place(0, 1, 0, 1)


def address_of(environment: Mapping[str, str], place: Place) -> tuple[str, str]:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT``, guessed only where there is one answer.

    Raises
    ------
    ConfigError
        If ranks are on several hosts or may be, or nothing tells this job from another one.
    """
    address = environment.get("MASTER_ADDR")
    if address is None:
        if place.local_size != place.world_size:
            raise ConfigError(
                "MASTER_ADDR is not set and the ranks may be on several hosts; set it on all ranks "
                "to an address of rank 0's host, such as `mpirun -x MASTER_ADDR=node1 ...`"
            )
        address = "127.0.0.1"
    port = environment.get("MASTER_PORT")
    if port is None:
        for names in _JOB_KEYS:
            if all(name in environment for name in names):
                key = "/".join(environment[name] for name in names)
                port = str(_FIRST_PORT + zlib.crc32(key.encode()) % _NUM_PORTS)
                break
        else:
            raise ConfigError(
                "MASTER_PORT is not set and nothing in the environment tells this job from others; "
                "set it on all ranks to a free port of rank 0's host"
            )
    return address, port


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(f"{name}={environment[name]!r} is not a number") from None
