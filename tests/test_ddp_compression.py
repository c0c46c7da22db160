"""Training with compression between nodes, in real jobs whose ranks count as several hosts."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks
from topo_ar.execution.transports.segment import HOST_ID_ENV

CODECS = ["fp16", "bf16", "int8", "int4", "sign", "topk:0.05", "randomk:0.1", "powersgd:2"]
TWO_BY_TWO = blocks(2, 2)


def _on_hosts(rank: int, hosts: list[int]) -> None:
    os.environ[HOST_ID_ENV] = str(hosts[rank])


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 64, bias=False), nn.Tanh(), nn.Linear(64, 8)
    ).to(dtype)


def _attached(model: DistributedDataParallel, compression, **options):
    settings = {"start_step": 2, "guard_steps": 0, "timeout_s": 20.0, **options}
    return topo_ar.attach(model, compression=compression, **settings)


def _batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 32, generator=generator).to(dtype)


def _step(model, optimizer, x) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _trains(rank, world_size, hosts, compression, options, steps=6):
    _on_hosts(rank, hosts)
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    ddp_options = {"bucket_cap_mb": 0.02, **options.pop("ddp", {})}
    model = DistributedDataParallel(_model(dtype), **ddp_options)
    plain = DistributedDataParallel(copy.deepcopy(model.module))
    with _attached(model, compression, **options) as handle:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(steps):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                _step(each, optimizer, _batch(rank, step, dtype))
        report = handle.compression
        assert handle.error is None
        assert all(p.grad.dtype == dtype for p in model.parameters())
    return _weights(model), _weights(plain), report


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("hosts", [TWO_BY_TWO, [0, 1, 2]], ids=str)
def test_replicas_are_bit_identical_and_near_plain_ddp(ranks, hosts, codec) -> None:
    results = ranks.run(_trains, len(hosts), hosts, codec, {})
    ours, plain, report = results[0]
    for weights, _, _ in results:
        assert torch.equal(weights, ours)
    start = _weights(_model())
    moved = float((plain - start).norm())
    limits = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, "int4": 0.1}
    assert 0 < float((ours - plain).norm()) < limits.get(codec, 0.9) * moved
    assert {name for b in report.buckets for name in b.parameters} <= {
        name for name, _ in _model().named_parameters()
    }
    assert 0 < report.sent_nbytes < report.dense_nbytes
    assert report.reason == ""
