"""A training that survives restarts: what every launcher in this folder starts.

Command: torchrun --standalone --nproc-per-node 4 experiments/launch/train.py --checkpoint /tmp/c.pt

Each step's batch is a function of step and rank, and the checkpoint holds the model, the optimizer,
the step and what compression still has to send (`handle.state_dict`), so that a job that was
interrupted ends with the weights of one that was not: bit for bit with ``--exact`` and a plan that
is named, since summation then has one order.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar


def main() -> None:
    """Train from the checkpoint on, or from the beginning."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True, help="read and written by rank 0")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--plan", default="auto")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--exact", action="store_true", help="resume bit for bit, on equal ranks")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until ranks are lost")
    parser.add_argument("--fail", help="RANK:STEP dies there, unless resumed, for a test")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    # The same buckets in the first step as in all others, or the order of summation differs there.
    model = DistributedDataParallel(module, find_unused_parameters=options.exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = topo_ar.attach(
        model,
        plan=options.plan,
        compression=options.compression,
        start_step=0,
        timeout_s=options.timeout,
    )
    first = _resume(options.checkpoint, module, optimizer, handle, device)
    for step in range(first, options.steps):
        if options.fail == f"{rank}:{step}" and first == 0:
            os.abort()
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        inputs = torch.randn(8, 64, generator=generator).to(device)
        labels = torch.randint(10, (8,), generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            compression = handle.state_dict(exact=options.exact)  # collective
            if rank == 0:
                _save(options.checkpoint, step + 1, module, optimizer, compression)
    dist.barrier()
    handle.close()
    dist.destroy_process_group()


def _resume(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    handle: Any,
    device: torch.device,
) -> int:
    """Take over what rank 0 has saved, if anything, and return the step to begin with."""
    found = [torch.load(path, map_location="cpu") if _is_first() and path.exists() else None]
    dist.broadcast_object_list(found, device=device)  # others need not see the file
    state = found[0]
    if state is None:
        return 0
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state["compression"])
    return int(state["step"])


def _is_first() -> bool:
    return dist.get_rank() == 0


def _save(
    path: Path,
    step: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: dict[str, Any],
) -> None:
    """Write whole or not at all: a job that dies meanwhile resumes from the checkpoint before."""
    state = {
        "step": step,
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compression": compression,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
