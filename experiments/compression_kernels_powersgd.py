"""A PowerSGD step on one thread, torch's hook against topo_ar.

Two simulated ranks, each a node, that take turns on one thread: a sample is what both need for a
step with error feedback, halved. Samples of the two sides alternate.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from experiments.torch_hooks import Bucket, Group, run_ranks, state, step
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.powersgd import PowerSGD
from topo_ar.compression.protocol import Layout, Piece

RANKS = (1, 2, 4, 8)
_WARMUP = 3

# 28.3 MB and 23.6 MB of fp32.
WORKLOADS: dict[str, list[tuple[int, ...]]] = {
    "bert-layer": [(768, 768)] * 4 + [(3072, 768), (3072,), (768, 3072), (768,)],
    "resnet18-tail": [(512, 256, 3, 3), (512,), (512, 512, 3, 3), (512,), (512, 512, 3, 3), (512,)],
}


def powersgd_step_seconds(
    shapes: list[tuple[int, ...]], rank: int, samples: int
) -> tuple[list[float], list[float]]:
    """Return seconds of a step and rank, torch's hook and ours, in interleaved pairs.

    Parameters
    ----------
    shapes : list of tuple of int
        The bucket.
    rank : int
        Of the factors.
    samples : int
        Pairs that are timed, after a few that are not.
    """
    pieces, offset = [], 0
    for number, shape in enumerate(shapes):
        pieces.append(Piece(f"p{number}", shape, 0, math.prod(shape), offset))
        offset += math.prod(shape)
    layout = Layout(0, tuple(pieces))

    def work(group: Group) -> tuple[list[float], list[float]]:
        random = torch.Generator().manual_seed(group.index)
        gradient = torch.randn(offset, generator=random)
        buffer = torch.empty_like(gradient)
        total = torch.empty_like(gradient)
        theirs, codec = state(rank, group.size), PowerSGD(rank)
        ours, alone = ErrorFeedback(codec), Group()
        hook_times, times = [], []
        for when in range(_WARMUP + samples):
            buffer.copy_(gradient)
            start = _meet(group)
            step(theirs, [Bucket(buffer, shapes, 0, True)])
            middle = _meet(group)
            # As in training: what all nodes sent is decoded where it belongs.
            reduced = ours.reduce(gradient, layout, group, alone, when)
            codec.gather(reduced, layout, alone, [total])
            end = _meet(group)
            hook_times.append((middle - start) / group.size)
            times.append((end - middle) / group.size)
        return hook_times[_WARMUP:], times[_WARMUP:]

    found: tuple[list[float], list[float]] = run_ranks(2, work)[0]
    return found


def _meet(group: Group) -> float:
    group.all_gather(torch.empty(0))
    return time.perf_counter()


def measure_powersgd(samples: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each workload and rank, as `compression_kernels.measure` does."""
    for workload, shapes in WORKLOADS.items():
        for rank in RANKS:
            theirs, ours = powersgd_step_seconds(shapes, rank, samples)
            yield {
                "experiment": "compression_kernels",
                "kernel": f"powersgd:{rank} step, {workload}",
                "nbytes": 4 * sum(map(math.prod, shapes)),
                "num_threads": torch.get_num_threads(),
                "torch_seconds": theirs,
                "ours_seconds": ours,
            }
