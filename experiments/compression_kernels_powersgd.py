"""How long does a PowerSGD step take on one thread, torch's hook against topo_ar?

Command: python -m experiments.compression_kernels_powersgd --out results/
Minutes: 2.

Two simulated ranks, each a node, that take turns on one thread: a sample is what both need for a
step with error feedback, halved. Samples of the two sides alternate, and a ratio is taken of each
pair. Writes compression_kernels_powersgd.jsonl.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

import torch

from experiments.torch_hooks import Bucket, Group, run_ranks, state, step
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.powersgd import PowerSGD
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.errors import TopoError
from topo_ar.telemetry.records import RecordWriter, manifest

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
        theirs, ours = state(rank, group.size), ErrorFeedback(PowerSGD(rank))
        hook_times, times = [], []
        for when in range(_WARMUP + samples):
            buffer.copy_(gradient)
            start = _meet(group)
            step(theirs, [Bucket(buffer, shapes, 0, True)])
            middle = _meet(group)
            ours.reduce(gradient, layout, group, Group(), when)
            end = _meet(group)
            hook_times.append((middle - start) / group.size)
            times.append((end - middle) / group.size)
        return hook_times[_WARMUP:], times[_WARMUP:]

    found: tuple[list[float], list[float]] = run_ranks(2, work)[0]
    return found


def _meet(group: Group) -> float:
    group.all_gather(torch.empty(0))
    return time.perf_counter()


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        with RecordWriter(options.out / "compression_kernels_powersgd.jsonl") as writer:
            for workload, shapes in WORKLOADS.items():
                for rank in options.ranks:
                    hook, ours = powersgd_step_seconds(shapes, rank, options.samples)
                    ratios = sorted(a / b for a, b in zip(hook, ours, strict=True))
                    writer.write(
                        {
                            "experiment": "compression_kernels_powersgd",
                            "workload": workload,
                            "nbytes": 4 * sum(map(math.prod, shapes)),
                            "rank": rank,
                            "torch_seconds": hook,
                            "ours_seconds": ours,
                            "manifest": manifest("threads"),
                        }
                    )
                    print(
                        f"{workload} rank {rank}: torch {1e3 * statistics.median(hook):.1f} ms, "
                        f"topo_ar {1e3 * statistics.median(ours):.1f} ms, "
                        f"ratio {statistics.median(ratios):.2f} "
                        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
                    )
    except TopoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
