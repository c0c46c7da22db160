"""One rank of an emulated host: all-reduces 25 MB and reads its NIC's counter (R06)."""

import json
import sys

import torch
import torch.distributed as dist

from tests.wire_worker import sent_nbytes
from topo_ar.execution.communicator import Communicator

CALLS = 5
NUMEL = 6_250_000


def main() -> None:
    """Print the nodes, what a call sent through the NIC, and how many results were wrong."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(NUMEL) % 100
    expected = (pattern * world_size + sum(range(world_size))).float()
    with Communicator(plan="hierarchical") as made:
        wrong, before = 0, sent_nbytes()
        for _ in range(CALLS):
            wrong += not torch.equal(made.all_reduce_sync((pattern + rank).float()), expected)
        dist.barrier()
        row = {
            "rank": rank,
            "nodes": made.nodes,
            "groups": made.plan_for(4 * NUMEL).nodes,
            "nic": (sent_nbytes() - before) / CALLS,
            "wrong": wrong,
        }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
