"""Which rank this process is, where torchrun, srun or `topo-ar emulate` has started it."""

import re
from collections.abc import Mapping

from topo_ar.errors import ConfigError
from topo_ar.topology.readers.hostlist import expand

_FIRST_PORT, _NUM_PORTS = 15000, 10000
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def variables_of_rank(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return what ``env://`` needs and `environment` lacks; None where no launcher was at work.

    Under srun, whose tasks are the ranks, torch's variables are made of Slurm's; those that are set
    already stay. The port is a function of the job's number.

    Raises
    ------
    ConfigError
        If the launcher's variables contradict each other, or are mpirun's, which lack an address.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {}
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
        if tasks != "1":
            found = _of_slurm(environment, tasks)
            return {name: value for name, value in found.items() if name not in environment}
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "mpirun has started several processes, but RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT are not set; set them, or start the ranks with torchrun or srun"
        )
    return None


def _of_slurm(environment: Mapping[str, str], tasks: str) -> dict[str, str]:
    def wanted(*names: str) -> str:
        for name in names:
            if environment.get(name):
                return environment[name]
        raise ConfigError(
            f"this is task {environment['SLURM_PROCID']} of {tasks} of srun, but {names[0]} is not "
            "set; start the ranks with srun itself, or set RANK, WORLD_SIZE and MASTER_ADDR"
        )

    nodes = expand(wanted("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_STEP_NODELIST")
    node, job = int(wanted("SLURM_NODEID")), int(wanted("SLURM_JOB_ID"))
    per_node = _tasks_per_node(wanted("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if sum(per_node) != int(tasks) or not node < len(per_node) == len(nodes):
        raise ConfigError(
            f"Slurm's variables name {len(nodes)} nodes with {per_node} tasks and {tasks} tasks in "
            "all, which do not fit each other; start the ranks with srun itself"
        )
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": wanted("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": str(_FIRST_PORT + job % _NUM_PORTS),
    }


def _tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node of Slurm's ``4(x2),3``: 4, 4 and 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text} is not a list such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
