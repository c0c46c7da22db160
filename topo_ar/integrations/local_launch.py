"""The ranks of one workstation, started by torchrun's own agent."""

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# More ranks than that on processors alone would only cut up the work of their threads.
_MOST_CPU_RANKS = 8
_SHUTDOWN_S = 10
_LOCAL = {
    # Nothing leaves the machine, whatever its name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
    # In the store of the agent, which torch 2.13 shares between the lives of a job, gloo meets the
    # addresses of the dead.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def num_cores() -> int:
    """Return how many cores this process may use; the two threads of one core are one."""
    mine = os.sched_getaffinity(0)
    siblings = Path("/sys/devices/system/cpu")
    try:
        files = (siblings / f"cpu{cpu}/topology/thread_siblings_list" for cpu in mine)
        return len({file.read_text() for file in files})
    except OSError:
        return len(mine)


def default_num_ranks() -> int:
    """Return how many ranks suit this machine: one a GPU, else one a core, at most eight."""
    return torch.cuda.device_count() or min(_MOST_CPU_RANKS, num_cores())


def launch_here(argv: Sequence[str], num_ranks: int, *, max_restarts: int = 0) -> int:
    """Run `argv` as `num_ranks` ranks on this machine and return its exit code.

    That of the rank that failed first, 128 + n for death by signal n. When this process is told to
    end the ranks end before it; when it is killed the kernel kills them.

    Parameters
    ----------
    argv : sequence of str
        The command of every rank.
    num_ranks : int
        How many.
    max_restarts : int
        How often all ranks are started anew after one failed.
    """
    outer = dict(_LOCAL)
    if not torch.cuda.is_available():
        outer["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_ranks))
    for name, value in outer.items():
        os.environ.setdefault(name, value)
    if shutil.which("setpriv"):
        argv = ["setpriv", "--pdeathsig", "KILL", *argv]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        local_addr="127.0.0.1",
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        elastic_launch(config, argv[0])(*argv[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code: int = failure.exitcode
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
