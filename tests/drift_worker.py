"""One rank of an emulated host: trains while its network changes; see test_path_drift."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from topo_ar.telemetry import drift

SIDE = 512


def say(**row: object) -> None:
    """Print a row."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train until the network was measured anew and a choice made again; every step is checked."""
    drift._WINDOW_SECONDS = 0.5
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(SIDE, SIDE, bias=False))
    mean = sum(range(1, world_size + 1)) / world_size
    wrong, step, told = 0, 0, False
    with topo_ar.attach(model, timeout_s=20.0) as handle:
        nbytes = SIDE * SIDE * 4
        before = handle.communicator.plan_for(nbytes)
        while not (handle.choice.replans and handle.choice.path != "undecided"):
            model.zero_grad()
            # Every gradient is rank + 1 times the number of the step, exact in single precision.
            x = torch.full((1, SIDE), float((rank + 1) * (step % 100)))
            model(x).sum().backward()
            expected = torch.full((SIDE, SIDE), mean * (step % 100))
            wrong += not torch.equal(model.module.weight.grad, expected)
            if handle.choice.path != "undecided" and not told:
                told = True
                say(event="decided", step=step, path=handle.choice.path)
            step += 1
            assert step < 5000, handle.choice
        after = handle.communicator.plan_for(nbytes)
        choice = handle.choice
        say(
            event="end",
            rank=rank,
            steps=step,
            wrong=wrong,
            fallbacks=handle.fallbacks,
            hashes=[before.hash, after.hash],
            predicted=[before.predicted_seconds, after.predicted_seconds],
            choice=[choice.path, choice.reason, choice.trials, choice.replans, choice.since_step],
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
