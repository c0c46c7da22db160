"""ResNet-18 under DistributedDataParallel, as anybody would write it: it knows nothing of topo_ar.

Command: torchrun --nproc-per-node 4 -m experiments.workloads.plain_ddp --steps 60 --out steps.json
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from experiments.workloads.resnet import gratings, resnet18


def main() -> None:
    """Train, and let rank 0 write the seconds of each optimizer step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1, help="images per rank")
    parser.add_argument("--side", type=int, default=16, help="of an image")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per step")
    parser.add_argument("--bucket-cap-mb", type=float)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        resnet18(width=options.width),
        gradient_as_bucket_view=True,
        bucket_cap_mb=options.bucket_cap_mb,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = gratings(options.batch, dist.get_rank(), options.side)
    seconds = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        for number in range(options.accumulate):
            last = number + 1 == options.accumulate
            with contextlib.nullcontext() if last else model.no_sync():
                functional.cross_entropy(model(data.images), data.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    if options.out is not None and dist.get_rank() == 0:
        options.out.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
