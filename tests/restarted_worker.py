"""One rank of a job under torchrun whose rank 2 is killed in its first life."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from topo_ar.execution.communicator import Communicator
from topo_ar.execution.transports.segment import HOST_ID_ENV

STEPS = 20
SAVED = 5


def main(directory: Path) -> None:
    """All-reduce in steps from the checkpoint on; write how many were right."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.environ[HOST_ID_ENV] = str(rank % 2)
    checkpoint = directory / "checkpoint"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    right = first
    with Communicator(plan="hierarchical", timeout_s=20.0) as made:
        for step in range(first, STEPS):
            flying = [made.all_reduce(torch.full((300_000,), float(rank + step))) for _ in range(3)]
            if life == "0" and rank == 2 and step == SAVED + 2:
                os.kill(os.getpid(), signal.SIGKILL)
            expected = float(sum(range(world_size)) + world_size * step)
            right += all(bool((future.wait() == expected).all()) for future in flying)
            if rank == 0 and step == SAVED - 1:
                checkpoint.write_text(str(SAVED))
    text = f"life {life} from step {first}: {right} steps right"
    (directory / f"rank{rank}").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
