"""One rank of a rehearsal: trains by the shipped hook with targets, while its network breaks."""

import hashlib
import json
import sys
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from topo_ar.telemetry.targets import Targets

_SIDE, _LAYERS = 512, 3
_BASELINE_STEPS = 8
# The target above what steps took, and how many steps follow the last thing that was done.
_ROOM, _STEPS_AFTER = 2.0, 6
_MOST_STEPS = 200


def say(**row: object) -> None:
    """Print a row for the one who rehearses."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main(directory: str) -> None:
    """Train; say when targets are set; end when a breach was answered and some steps went by."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers = [nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(_LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=_SIDE**2 * 4 / 1e6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = Targets(step_seconds=1e6, warm_up_steps=0)
    wrong, seconds, armed = 0, [], -1
    with topo_ar.attach(model, telemetry=directory, targets=before, timeout_s=60.0) as handle:
        assert handle.telemetry is not None
        for step in range(_MOST_STEPS):
            wrong += _step(model, optimizer, rank, world_size, step)
            if handle.choice.path != "undecided" and armed < 0:
                seconds.append(handle.telemetry.step_seconds)
            if len(seconds) == _BASELINE_STEPS and armed < 0:
                usual = torch.tensor([median(seconds)], dtype=torch.float64)
                dist.broadcast(usual, 0)  # the same target on all ranks
                handle.set_targets(Targets(step_seconds=_ROOM * usual.item(), warm_up_steps=0))
                armed = step
                dist.barrier()
                if rank == 0:
                    say(event="armed", step=step, step_seconds=usual.item())
            incidents = handle.incidents
            if incidents and step >= incidents[0].acted_step + _STEPS_AFTER:
                break
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        say(
            event="end",
            rank=rank,
            steps=step + 1,
            armed=armed,
            wrong=wrong,
            fallbacks=handle.fallbacks,
            weights=hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            incidents=[
                [i.first_missed_step, i.acted_step, i.action, i.path_before, i.path_after]
                for i in handle.incidents
            ],
        )
    dist.destroy_process_group()


def _step(model: nn.Module, optimizer: Any, rank: int, world_size: int, step: int) -> int:
    """Do a step, and return whether a gradient is not the mean over the ranks, to rounding."""
    optimizer.zero_grad()
    layers = list(model.module.children())  # type: ignore[union-attr]
    mine = [torch.full((1, _SIDE), float(r + 1 + step % 5)) for r in range(world_size)]
    model(mine[rank]).mean().backward()
    found = layers[0].weight.grad.clone()
    with torch.no_grad():
        ones = torch.full((1, _SIDE), 1.0 / _SIDE)
        upstream = ones @ layers[2].weight @ layers[1].weight
        expected = upstream.t() @ (sum(mine) / world_size)
    optimizer.step()
    return int(not torch.allclose(found, expected, rtol=1e-3, atol=1e-5))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
