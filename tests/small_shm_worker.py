"""One rank of an emulated host whose /dev/shm has hardly any room."""

import json
import os
import sys

import torch
import torch.distributed as dist

from topo_ar.execution.communicator import Communicator


def main() -> None:
    """Share a buffer that has no room, and reduce it and others all the same."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    free = os.statvfs("/dev/shm")
    with Communicator(plan="hierarchical", timeout_s=20.0) as made:
        shared, wrong = torch.zeros(2_000_000), 0
        made.share(shared).wait()
        for step in range(3):
            shared.fill_(float(rank + step))
            made.all_reduce(shared).wait()
            expected = sum(range(world_size)) + world_size * step
            wrong += not bool((shared == expected).all())
        row = {
            "rank": rank,
            "room": free.f_bavail * free.f_frsize,
            "wrong": wrong,
            "in_shm": shared.is_shared(),
            "plain": made.plain_reason,
        }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
