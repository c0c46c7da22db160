"""One rank of an emulated host whose telemetry is on; see test_job_watch."""

import json
import sys

import torch
import torch.distributed as dist

import topo_ar
from tests.watched_training import one_step, paced
from topo_ar.telemetry.job_windows import read_windows

WINDOWS_BEFORE, WINDOWS_AFTER = 3, 5


def main(path: str, slow_rank: int, side: int) -> None:
    """Train for some windows, say so, and train for some more, in which the network may change."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp = paced(0.24 if rank == slow_rank else 0.2, side, side * side * 4 / 1.1 / 2**20)
    asked = topo_ar.Telemetry(path, window_s=1.0)
    told, step = False, 0
    with topo_ar.attach(ddp, plan="hierarchical", telemetry=asked, timeout_s=30.0):
        count = torch.zeros(1)
        while count < WINDOWS_BEFORE + WINDOWS_AFTER:
            one_step(ddp, rank, step)
            step += 1
            if rank == 0:
                count.fill_(len(read_windows(path)[1]))
            dist.broadcast(count, 0)
            if count >= WINDOWS_BEFORE and not told and rank == 0:
                told = True
                sys.stdout.write(json.dumps({"event": "before"}) + "\n")
                sys.stdout.flush()
            assert step < 600
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
