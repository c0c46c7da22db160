"""All-reduces between kernels on several streams, whose buffers are given up at once."""

import random

import torch

from experiments.gpu.context import Context, Figures, on, require
from topo_ar.execution.communicator import Communicator

_NUMELS = (1, 1000, 4099, 65_536, 400_001)
_LONGEST_PAUSE_S = 1e-3


def stress(context: Context, iterations: int = 200) -> Figures:
    """All-reduce what a side stream computes, and let another stream use the result."""
    with context.communicator() as made:
        return _stress(context, made, 20 if context.quick else iterations)


def stress_short(context: Context) -> Figures:
    """Do the same less often: ranks that share a device with NCCL wait for their turn on it."""
    return stress(context, 60)


def _stress(context: Context, made: Communicator, iterations: int) -> Figures:
    sizes, delays = random.Random(0), random.Random(1 + context.rank)
    producer, consumer = context.stream(), context.stream()
    verdicts = []
    dropped = 0
    for step in range(iterations):
        numel, use = sizes.choice(_NUMELS), sizes.choice(("here", "there", "then", "drop"))
        with on(producer):
            context.spin(delays.random() * _LONGEST_PAUSE_S)
            buffer = torch.full((numel,), float(context.rank + step), device=context.device)
            buffer.mul_(2)
            future = made.all_reduce(buffer)
            del buffer
            # Whoever gets that memory too early spoils the sum.
            junk = torch.full((numel,), float("nan"), device=context.device)
        if use == "drop" and (context.rank + step) % 2:
            del future, junk
            dropped += 1
            continue
        expected = 2.0 * sum(rank + step for rank in range(context.world_size))
        if use == "then":
            future, expected = future.then(_one_more), expected + 1
        with on(producer if use == "here" else consumer):
            total = future.wait()
            context.spin(delays.random() * _LONGEST_PAUSE_S)
            verdicts.append((total == expected).all())
        del future, total, junk
    context.finish()
    wrong = [step for step, right in enumerate(verdicts) if not bool(right)]
    require(not wrong, f"{len(wrong)} of {len(verdicts)} sums are wrong on rank {context.rank}")
    return {"iterations": float(iterations), "given up unread": float(dropped)}


def _one_more(future: "torch.futures.Future[torch.Tensor]") -> torch.Tensor:
    return future.value() + 1


def capture(context: Context) -> Figures:
    """Capture of an all-reduce is refused, and neither the graph nor later ones suffer."""
    with context.communicator() as made:
        values = torch.ones(1000, device=context.device)
        made.all_reduce(values).wait()
        context.finish()
        text = ""
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            values.add_(1)
            try:
                made.all_reduce(values)
            except ValueError as error:
                text = str(error)
        require("cannot be captured" in text, "capture was not refused")
        graph = torch.cuda.CUDAGraph()
        values.fill_(1)
        with torch.cuda.graph(graph):
            values.mul_(2)
        expected = 1.0
        for _ in range(3):
            graph.replay()
            made.all_reduce(values).wait()
            expected *= 2 * context.world_size
        require(bool((values == expected).all()), "all-reduces between replays are wrong")
    return {"refused with": text.partition(":")[0]}
