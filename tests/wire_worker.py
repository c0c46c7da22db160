"""One rank of an emulated host: trains something small and reads its NIC's counter."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.compressed_training import Given
from topo_ar.integrations.ddp import Handle

STEPS = 10
# Of the table of sparse embeddings.
NUM_ROWS, WIDTH = 2000, 32


def sent_nbytes() -> int:
    """Return what the NIC that gloo uses has sent."""
    interface = os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def counted(module: nn.Module, step: Callable[[nn.Module], None], **options: Any) -> dict[str, Any]:
    """Return what a step sends, by the NIC and by the package's own count, and what it found."""
    model = DistributedDataParallel(module)
    with topo_ar.attach(model, start_step=0, guard_steps=0, **options) as handle:
        step(model)
        found = residual(handle)
        step(model)  # DDP has rebuilt its buckets
        before = sent_nbytes()
        for _ in range(STEPS):
            step(model)
        dist.barrier()
        nic = (sent_nbytes() - before) / STEPS
        return {"nic": nic, "own": handle.compression.sent_nbytes, "residual": found}


def residual(handle: Handle) -> float:
    """Return the sum of what this rank has not sent, in units of the gradient."""
    compression = handle.hook.compression
    if compression is None:
        return 0.0
    compression.settle()
    runs = [run for s in compression.streams.values() for run in s.feedback.store.runs()]
    return sum(float(run.values.double().sum()) for run in runs) / compression.scale


def linear(codec: str) -> dict[str, Any]:
    """R03: 4.0 MB of gradient."""
    module = nn.Linear(1000, 1000, bias=False)
    x = torch.randn(2, 1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    row = counted(module, lambda model: model(x).square().mean().backward(), compression=codec)
    return {**row, "dtype": str(module.weight.grad.dtype)}


def ramp(codec: str, other: str) -> dict[str, Any]:
    """R04: the gradient is 1 .. 10000, beside five elements with a codec of their own."""
    module = Given({"p": (100, 100), "q": (5,)})
    factors = {"p": torch.arange(1.0, 10001).view(100, 100), "q": torch.ones(5)}
    kept: list[dict[str, torch.Tensor]] = []

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(factors).backward()
        kept.append(module.gradients())

    row = counted(module, step, compression={"*p": codec, "*q": other})
    first = kept[0]["p"].flatten()
    return {
        **row,
        "places": first.nonzero().flatten().tolist(),
        "values": first[first != 0].tolist(),
        "five": kept[0]["q"].tolist(),
    }


def embeddings(width: int = WIDTH) -> nn.EmbeddingBag:
    """Return a sparse layer whose gradients are whole numbers."""
    return nn.EmbeddingBag(NUM_ROWS, width, mode="sum", sparse=True)


def bags(rank: int, step: int, num_different: int) -> torch.Tensor:
    """Return what a rank is fed with: 400 bags of 16 of the first `num_different` rows."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, num_different, (400, 16), generator=generator)


def rows(which: str) -> dict[str, Any]:
    """Train a sparse layer with plain DDP or by rows."""
    module = embeddings()
    model = DistributedDataParallel(module)
    attached: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if which == "rows":
        attached = topo_ar.attach(model, compression="rows", plan="hierarchical")

    def step(number: int) -> None:
        model.zero_grad()
        model(bags(dist.get_rank(), number, 300)).sum().backward()

    with attached:
        for number in range(2):
            step(number)
        dist.barrier()
        before = sent_nbytes()
        for number in range(STEPS):
            step(number)
        dist.barrier()
        nic = (sent_nbytes() - before) / STEPS
    total = module.weight.grad.to_dense().double()
    return {"nic": nic, "sum": float((total * torch.arange(1.0, NUM_ROWS + 1)[:, None]).sum())}


def main(what: str, *arguments: str) -> None:
    """Print a row of this rank."""
    dist.init_process_group("gloo")
    row = {"linear": linear, "ramp": ramp, "rows": rows}[what](*arguments)
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
