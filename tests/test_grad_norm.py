"""The norm of a step's gradients from `handle.grad_norm()` against torch's own."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

import topo_ar
from tests.jobs import blocks
from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.integrations.gradient_norm import partial_sums

HOSTS = blocks(2, 2)


def _attached(rank: int, module: nn.Module, hosts: list[int] = HOSTS, **options: object):
    os.environ[HOST_ID_ENV] = str(hosts[rank])
    settings = {"plan": "hierarchical", "timeout_s": 20.0, "grad_norm": True}
    model = DistributedDataParallel(
        module, bucket_cap_mb=0.01, find_unused_parameters=options.pop("unused", False)
    )
    return model, topo_ar.attach(model, **(settings | options))


def _torch_norm(model: nn.Module) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return float(get_total_norm([g.double() for g in dense]))


def _dense(rank: int, dtype: torch.dtype, options: dict[str, object]):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 300)).to(dtype)
    model, handle = _attached(rank, module, **options)
    found = []
    with handle:
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model.zero_grad()
            if step == 2:
                with model.no_sync():
                    x = torch.randn(4, 32, generator=generator).to(dtype)
                    model(x).square().mean().backward()
            x = torch.randn(4, 32, generator=generator).to(dtype)
            model(x).square().mean().backward()
            norm = handle.grad_norm()
            assert norm.step == step
            assert norm.non_finite == 0
            found.append((norm.norm, _torch_norm(model)))
    return found


def _dense_case(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, object]):
    return _dense(rank, dtype, options)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"plan": "flat"}),
        (torch.float16, {}),
        (torch.bfloat16, {"plan": "flat"}),
        (torch.float32, {"zero_copy": True}),
        (torch.float32, {"compression": "int8", "policy": "lossy:0.1", "start_step": 1}),
    ],
    ids=str,
)
def test_the_norm_is_torchs_and_the_same_on_all_ranks(ranks, dtype, options) -> None:
    first, *others = ranks.run(_dense_case, 4, dtype, options)
    for norm, expected in first:
        assert norm == pytest.approx(expected, rel=1e-9)
        assert norm > 0
    for other in others:
        assert [norm for norm, _ in other] == [norm for norm, _ in first]


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=True)
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(self.words(x))


def _sparse_and_unused(rank: int, world_size: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model, handle = _attached(rank, _Words(), unused=True)
    found = []
    with handle:
        for step in range(3):
            model.zero_grad()
            model(torch.tensor([rank, rank + step, 3])).square().sum().backward()
            found.append((handle.grad_norm().norm, _torch_norm(model)))
    return found


def test_sparse_buckets_and_unused_parameters(ranks) -> None:
    first, *others = ranks.run(_sparse_and_unused, 4)
    for norm, expected in first:
        assert norm == pytest.approx(expected, rel=1e-6)
    assert others == [first] * 3


def _infinite(rank: int, world_size: int) -> list[tuple[str, int]]:
    model, handle = _attached(rank, nn.Linear(40, 30, bias=False))
    found = []
    with handle:
        for bad in (0.0, float("inf"), 1.0):
            model.zero_grad()
            x = torch.ones(1, 40)
            if rank == 2:
                x[0, 5] = bad
            model(x).sum().backward()
            norm = handle.grad_norm()
            found.append((str(norm.norm), norm.non_finite))
    return found


def test_elements_that_are_not_finite_are_counted(ranks) -> None:
    first, *others = ranks.run(_infinite, 4)
    assert others == [first] * 3
    assert [count for _, count in first] == [0, 30, 0]
    assert first[1][0] == "inf"


def _asked_wrongly(rank: int, world_size: int) -> list[str]:
    texts = []
    model, handle = _attached(rank, nn.Linear(4, 3), grad_norm=False)
    with handle:
        try:
            handle.grad_norm()
        except ConfigError as error:
            texts.append(str(error))
    model, handle = _attached(rank, nn.Linear(4, 3))
    with handle:
        try:
            handle.grad_norm()
        except ConfigError as error:
            texts.append(str(error))
        model(torch.ones(1, 4)).sum().backward()
        if rank == 0:
            handle._norm._step += 1
        try:
            handle.grad_norm()
        except ExecutionError as error:
            texts.append(str(error))
    return texts


def test_a_norm_that_is_not_there_is_refused_by_name(ranks) -> None:
    for texts in ranks.run(_asked_wrongly, 2):
        assert "grad_norm=True" in texts[0]
        assert "train a step" in texts[1]
        assert "different steps, [1, 0]" in texts[2]


def _one_rank(rank: int, world_size: int) -> tuple[float, float]:
    model, handle = _attached(rank, nn.Linear(4, 3), [0], plan="auto")
    with handle:
        model(torch.ones(1, 4)).sum().backward()
        return handle.grad_norm().norm, _torch_norm(model)


def test_one_rank_has_a_norm_too(ranks) -> None:
    ((norm, expected),) = ranks.run(_one_rank, 1)
    assert norm == pytest.approx(expected)


@given(st.lists(st.floats(allow_nan=True, width=32), max_size=40), st.integers(1, 9))
def test_parts_add_up_to_the_whole(values, num_parts) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    parts = torch.stack([partial_sums(tensor, part, num_parts) for part in range(num_parts)])
    squares, non_finite = parts.sum(0).tolist()
    assert int(non_finite) == int((~tensor.isfinite()).sum())
    whole = float(tensor.double().square().sum())
    assert squares == pytest.approx(whole, rel=1e-12, nan_ok=True)
