"""How fast the all-reduce is by size: the plan's, and torch's flat one."""

import statistics
from functools import partial

import torch
import torch.distributed as dist

from experiments.gpu.context import Context, Figures
from topo_ar.execution.communicator import Communicator
from topo_ar.units import format_size

_SIZES = (1 << 20, 25_000_000, 100_000_000)
_SAMPLES = 10


def bandwidth(context: Context) -> Figures:
    """Time both in turns; GB/s are bytes of the tensor by the slowest rank's seconds."""
    figures: Figures = {}
    with context.communicator() as made:
        for nbytes in _SIZES[:1] if context.quick else _SIZES:
            tensor = torch.ones(nbytes // 4, device=context.device)
            ways = {"flat": partial(_flat, tensor), "staged": partial(_staged, made, tensor)}
            for name, run in ways.items():
                dist.barrier()
                times = context.seconds(run, 3 if context.quick else _SAMPLES)
                slowest = _slowest(made, statistics.median(times))
                figures[f"{name} {format_size(nbytes)}"] = f"{nbytes / slowest / 1e9:.3g} GB/s"
    return figures


def _flat(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor.zero_())


def _staged(made: Communicator, tensor: torch.Tensor) -> None:
    made.all_reduce(tensor.zero_()).wait()


def _slowest(made: Communicator, seconds: float) -> float:
    return max(float(data) for data in made.gather(repr(seconds).encode()))
