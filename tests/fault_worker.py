"""One rank of an emulated host under a fault of its network: all-reduces until told to stop."""

import json
import sys
import time

import torch
import torch.distributed as dist

from topo_ar.errors import ExecutionError
from topo_ar.execution.communicator import Communicator

SIZES = (1_000_000, 1000, 250_000)


def _say(**row: object) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main(timeout_s: float, seconds: float, plan: str) -> None:
    """All-reduce for so many seconds; print when it runs, and how it ended."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong = calls = 0
    longest = 0.0
    failed: ExecutionError | None = None
    with Communicator(plan=plan, timeout_s=timeout_s) as made:
        end = torch.zeros(1)
        begin = time.monotonic()
        try:
            while not end:
                size = SIZES[calls % len(SIZES)]
                tensor = torch.full((size,), float(rank + calls))
                before = time.monotonic()
                made.all_reduce(tensor).wait()
                longest = max(longest, time.monotonic() - before)
                expected = float(sum(range(world_size)) + world_size * calls)
                wrong += not bool((tensor == expected).all())
                calls += 1
                if calls == 2 * len(SIZES):
                    _say(rank=rank, event="running")
                end = torch.tensor([float(time.monotonic() - begin > seconds)])
                made.all_reduce(end, dist.ReduceOp.MAX).wait()
        except ExecutionError as error:
            failed = error
        at = time.monotonic()
        row = {"wrong": wrong, "calls": calls, "longest": longest, "fallbacks": made.fallbacks}
        if failed is not None:
            row |= {
                "text": str(failed),
                "ranks": failed.ranks,
                "nodes": failed.nodes,
                "stage": failed.stage,
                "collective": failed.collective,
                "last": failed.last_completed,
            }
        _say(rank=rank, event="ended", at=at, **row)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
