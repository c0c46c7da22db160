"""The same training by hook, backend and HSDP, held against plain DDP by the three oracles."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from experiments.workloads.resnet import ResNet, gratings
from tests.compressed_training import Given, on_hosts

HOSTS = [0, 1, 0, 1]
WAYS = ["hook", "backend", "HSDP"]
STEPS, BATCH = 3, 2


def _plain(module, stack):
    return DistributedDataParallel(module, bucket_cap_mb=0.02)


def _hook(module, stack):
    model = DistributedDataParallel(module, bucket_cap_mb=0.02)
    stack.enter_context(topo_ar.attach(model, plan="hierarchical", timeout_s=20.0))
    return model


def _backend(module, stack):
    options = topo_ar.BackendOptions(plan="hierarchical")
    group = dist.new_group(backend="topo", pg_options=options)
    stack.callback(dist.destroy_process_group, group)
    return DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.02)


def _hsdp(module, stack):
    mesh = topo_ar.init_mesh("cpu")
    for stage in getattr(module, "stages", ()):
        fully_shard(stage, mesh=mesh)
    model = fully_shard(module, mesh=mesh)
    stack.enter_context(topo_ar.attach(model, plan="hierarchical", timeout_s=20.0))
    return model


MAKERS = dict(zip(WAYS, (_hook, _backend, _hsdp), strict=True))


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _trained(make, rank, dtype):
    """Return the weights after some steps, and whether all ranks have the same ones."""
    torch.manual_seed(0)
    images = gratings(STEPS * BATCH * dist.get_world_size(), 0)
    with ExitStack() as stack:
        model = make(ResNet(8, depths=(1, 1)).to(dtype), stack)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            begin = (step * dist.get_world_size() + rank) * BATCH
            mine = slice(begin, begin + BATCH)
            optimizer.zero_grad()
            logits = model(images.images[mine].to(dtype))
            functional.cross_entropy(logits, images.labels[mine]).backward()
            optimizer.step()
        weights = torch.cat([_full(p.detach()).flatten() for p in model.parameters()])
    everyones = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, weights)
    return weights, all(torch.equal(weights, theirs) for theirs in everyones)


def _whole(make, rank):
    """Return averages of whole numbers, multiples of the number of ranks: exact in any order."""
    shapes = {"matrix": (13, 40), "vector": (7,), "large": (300, 100)}
    generator = torch.Generator().manual_seed(rank)
    factors = {
        name: 4.0 * torch.randint(-1000, 1001, shape, generator=generator)
        for name, shape in shapes.items()
    }
    with ExitStack() as stack:
        model = make(Given(shapes), stack)
        model(factors).backward()
        return torch.cat([_full(p.grad).flatten() for p in model.parameters()])


def _oracles(rank, world_size, way):
    on_hosts(rank, HOSTS)
    make = MAKERS[way]
    found = {}
    for dtype in (torch.float64, torch.float32):
        plain, _ = _trained(_plain, rank, dtype)
        ours, same = _trained(make, rank, dtype)
        found[dtype] = float((ours - plain).norm() / plain.norm()), same
    return found, torch.equal(_whole(make, rank), _whole(_plain, rank))


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_plain_ddp(ranks, way) -> None:
    for found, exact in ranks.run(_oracles, 4, way, deadline_s=60.0):
        for dtype, limit in ((torch.float64, 1e-14), (torch.float32, 1e-5)):
            distance, same = found[dtype]
            assert distance <= limit
            assert same
        assert exact
