"""NCCL's stages, on as many ranks as the devices allow."""

import torch
import torch.distributed as dist

from experiments.gpu.context import Context, Figures, on, require
from experiments.gpu.sums import sums
from topo_ar.execution.transports.stages import InlineStages, StageGroups


def alone(context: Context) -> Figures:
    """Run the stages of one rank: the same calls on the same streams, wherever there is a device.

    The calls of a lone rank copy at most, so the value must come through; what is tried is that
    the streams wait for each other.
    """
    backend = "nccl" if context.on_cuda else "gloo"
    groups = StageGroups([(0,)], 0, "alone", backend, context.timeout_s)
    stages = InlineStages(groups, context.device)
    producer = context.stream()
    steps = 20 if context.quick else 200
    wrong = 0
    for step in range(steps):
        with on(producer):
            context.spin(2e-4)
            buffer = torch.full((100_000,), float(step), device=context.device)
            future = stages.all_reduce(buffer, dist.ReduceOp.SUM, (200_000, 200_000))
            del buffer
            junk = torch.full((100_000,), float("nan"), device=context.device)
        wrong += int(not bool((future.wait() == step).all()))
        del future, junk
    groups.close()
    require(not wrong, f"{wrong} of {steps} are wrong")
    return {"iterations": float(steps)}


def together(context: Context) -> Figures:
    """Reduce by the stages of all ranks: reduce-scatter, all-reduce, all-gather."""
    with context.communicator() as made:
        require(made.uses_nccl or not context.on_cuda, "the process group has no NCCL")
    figures = sums(context)
    if context.on_cuda:
        figures["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return figures
