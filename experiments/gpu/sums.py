"""All-reduces and DDP steps whose right results are known."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from experiments.gpu.context import Context, Figures, require
from topo_ar.execution.communicator import Communicator
from topo_ar.planning.plan import Family

_NUMELS = (0, 1, 7, 1000, 4099, 262_147, 3_000_001)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
_STEPS = 6


def sums(context: Context) -> Figures:
    """Reduce all sizes, dtypes and operations; the sums are of small whole numbers, so exact."""
    with context.communicator() as made:
        figures = reduce_all(context, made)
        plan = made.plan_for(4 * _NUMELS[-1], 4, context.device.type)
        staged = len(made.nodes) > 1 and len({len(node) for node in made.nodes}) == 1
        require(
            not staged or plan.family is not Family.FLAT_RING,
            f"the plan was to be a hierarchical one, and is {plan.family}",
        )
        figures["plan"] = f"{plan.family} of {len(made.nodes)} nodes"
    return figures


def reduce_all(context: Context, made: Communicator) -> Figures:
    """Do the work of `sums` with a communicator."""
    numels = _NUMELS[:5] if context.quick else _NUMELS
    done = 0
    for numel in numels:
        for dtype in _DTYPES:
            for op in _OPS:
                if not _defined(dtype, op):
                    continue
                tensor = _values(context, numel, dtype, context.rank)
                expected = _expected(context, numel, dtype, op)
                made.all_reduce(tensor, op).wait()
                name = f"{op} of {numel} {dtype}"
                require(_agree(tensor, expected, op), f"{name} is wrong on rank {context.rank}")
                done += 1
    noise = torch.randn(numels[-1], device=context.device) * 10.0 ** (context.rank % 4)
    made.all_reduce(noise).wait()
    require(context.same_everywhere(made, noise), "the ranks have different bits")
    return {"all-reduces": float(done), "elements": f"0 to {numels[-1]}"}


def fixed_order(context: Context) -> Figures:
    """Sum noise in the order that the ranks fix: on the device as on CPU, bit by bit."""
    with context.communicator(exact=True) as made:
        noise = torch.randn(4099, device=context.device) * 10.0 ** (context.rank % 4)
        host = noise.cpu()
        for tensor in (noise, host):
            made.all_reduce(tensor).wait()
        require(torch.equal(noise.cpu(), host), "the device's sum is not that of the CPU")
        require(context.same_everywhere(made, noise), "the ranks have different bits")
    return {"elements": float(noise.numel())}


def ddp(context: Context) -> Figures:
    """Train a small network by plain DDP and by the hook; the weights must agree."""
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.Linear(64, 10),
    ).to(context.device)
    ids = [context.device.index] if context.on_cuda else None
    plain, hooked = (
        DistributedDataParallel(copy.deepcopy(module), device_ids=ids, bucket_cap_mb=0.1)
        for _ in range(2)
    )
    random = torch.Generator().manual_seed(context.rank)
    with topo_ar.attach(hooked, plan="hierarchical", timeout_s=context.timeout_s) as handle:
        for _ in range(_STEPS):
            images = torch.randn(8, 3, 8, 8, generator=random).to(context.device)
            labels = torch.randint(10, (8,), generator=random).to(context.device)
            for model in (plain, hooked):
                model.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=0.05)
        theirs, ours = (
            torch.cat([p.detach().view(-1) for p in model.parameters()])
            for model in (plain, hooked)
        )
        distance = float((theirs - ours).norm() / theirs.norm())
        require(distance < 1e-5, f"the weights differ from plain DDP's by {distance:.2g}")
        require(context.same_everywhere(handle.communicator, ours), "the replicas differ")
        buckets = len(handle.trace().steps[-1].buckets)
    return {"steps": float(_STEPS), "buckets": float(buckets), "distance": distance}


def _defined(dtype: torch.dtype, op: "dist.ReduceOp.RedOpType") -> bool:
    if op == dist.ReduceOp.AVG:
        return dtype.is_floating_point or dtype.is_complex
    return op == dist.ReduceOp.SUM or not (dtype.is_complex or dtype is torch.bool)


def _values(context: Context, numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    numbers = (torch.arange(numel, device=context.device) * (rank + 1)) % 3
    return (numbers > 1) if dtype is torch.bool else numbers.to(dtype)


def _agree(tensor: torch.Tensor, expected: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> bool:
    """Compare exactly; a mean over 3 ranks, say, is rounded in its own way in each place."""
    size = dist.get_world_size()
    if op == dist.ReduceOp.AVG and size & (size - 1):
        return torch.allclose(tensor, expected, rtol=2e-2)
    return torch.equal(tensor, expected)


def _expected(
    context: Context, numel: int, dtype: torch.dtype, op: "dist.ReduceOp.RedOpType"
) -> torch.Tensor:
    parts = torch.stack([_values(context, numel, dtype, r) for r in range(context.world_size)])
    if dtype is torch.bool:
        return parts.any(0)
    if op == dist.ReduceOp.MAX:
        return parts.amax(0)
    if op == dist.ReduceOp.MIN:
        return parts.amin(0)
    total = parts.to(torch.complex128 if dtype.is_complex else torch.float64).sum(0)
    if op == dist.ReduceOp.AVG:
        total /= context.world_size
    return total.to(dtype)
