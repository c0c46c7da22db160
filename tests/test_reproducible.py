"""``reproducible=True``: the bits of a sum do not tell on which hosts the ranks are."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks, communicator
from tests.reductions import AVG, MAX, PRODUCT, SUM, in_fixed_order
from tests.schedule_cases import split
from topo_ar.errors import ConfigError, PlanError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.fixed_order import FixedOrder
from topo_ar.execution.plans import Plans
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.planning.plan import Family
from topo_ar.topology.presets import preset

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def _random(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = np.random.default_rng(rank)
    values = np.ldexp(drawn.standard_normal(numel), drawn.integers(-9, 9, numel))
    return torch.from_numpy(values).to(dtype)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@st.composite
def _jobs(draw):
    world = draw(st.integers(1, 16))
    nodes = tuple(tuple(sorted(node)) for node in split(draw, world))
    kind = st.tuples(st.sampled_from(FLOATS), st.sampled_from([SUM, AVG, PRODUCT]))
    return nodes, *draw(kind), draw(st.integers(1, 9))


@settings(max_examples=300)
@given(_jobs())
def test_kernels_of_any_hosts_add_up_the_tree(job) -> None:
    """What a rail does, without its messages: every host's rows, then the rest of the tree."""
    nodes, dtype, op, numel = job
    parts = [_random(rank, numel, dtype) for rank in range(sum(map(len, nodes)))]
    partials = []
    for node in nodes:
        kernel = FixedOrder(dtype, op, nodes, node[0])
        partial = np.empty(numel * kernel.partial_nbytes(node[0]), np.uint8).view(kernel.partial)
        kernel.reduce_in_node(partial, [kernel.view(parts[rank]) for rank in node])
        first = kernel.piece(partial, 0, numel // 2)
        second = kernel.piece(partial, numel // 2, numel)
        partials.append((first, second))
    result = torch.empty(numel, dtype=dtype)
    out = kernel.view(result)
    rail = [node[-1] for node in nodes]
    if numel > 1:
        kernel.reduce_between(out[: numel // 2], [first for first, _ in partials], rail)
    kernel.reduce_between(out[numel // 2 :], [second for _, second in partials], rail)
    assert _bits(result) == _bits(in_fixed_order(parts, op))


def test_hosts_of_whole_blocks_send_one_row() -> None:
    def rows(nodes: tuple[tuple[int, ...], ...], rank: int) -> int:
        return FixedOrder(torch.float32, SUM, nodes, rank).partial_nbytes(rank) // 4

    assert rows(((0, 1, 2, 3), (4, 5, 6, 7)), 5) == 1
    assert rows(((0, 1), (2, 3), (4, 5)), 4) == 1
    assert rows(((0, 1, 2, 3), (4, 5), (6, 7)), 6) == 1
    assert [rows(((0, 1, 2), (3, 4, 5)), rank) for rank in (0, 3)] == [2, 2]
    assert rows(((0, 2, 4, 6), (1, 3, 5, 7)), 1) == 4


def _digests(rank: int, world_size: int, hosts: list[int], plan: str) -> list[str]:
    found = []
    with communicator(rank, hosts, plan=plan, reproducible=True) as made:
        for dtype in FLOATS:
            for op in (SUM, AVG, PRODUCT):
                for numel in (1, 3, 5001, 70_001):
                    result = made.all_reduce(_random(rank, numel, dtype), op).wait()
                    found.append(hashlib.sha256(_bits(result)).hexdigest())
    return found


def _expected(world_size: int) -> list[str]:
    return [
        hashlib.sha256(
            _bits(in_fixed_order([_random(r, numel, dtype) for r in range(world_size)], op))
        ).hexdigest()
        for dtype in FLOATS
        for op in (SUM, AVG, PRODUCT)
        for numel in (1, 3, 5001, 70_001)
    ]


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (8, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_eight_ranks_on_any_number_of_hosts_give_the_same_bits(ranks, shape) -> None:
    assert ranks.run(_digests, 8, blocks(*shape), "auto") == [_expected(8)] * 8


@pytest.mark.parametrize(
    ("hosts", "plan"),
    [
        ([0, 1, 0, 1, 0, 1], "auto"),
        ([2, 0, 1, 1, 0, 0], "auto"),
        ([0, 0, 0, 0, 1, 1], "hierarchical"),
        ([0, 0, 0, 1, 1, 1], "hierarchical_sequential"),
        ([0, 0, 1, 1, 2, 2], "hierarchical_leader"),
        ([0, 1, 1, 2, 2, 2], "equal"),
    ],
    ids=str,
)
def test_shuffled_and_uneven_hosts_and_all_plans_give_the_same_bits(ranks, hosts, plan) -> None:
    assert ranks.run(_digests, 6, hosts, plan) == [_expected(6)] * 6


def _other_kinds(rank: int, world_size: int, hosts: list[int]) -> list[object]:
    """What is exact in any order, or reduced by gloo in the order of the ranks."""
    with communicator(rank, hosts, reproducible=True) as made:
        turned = torch.complex(
            _random(rank, 999, torch.float32), _random(rank + 9, 999, torch.float32)
        )
        made.all_reduce(turned).wait()
        sparse = _random(rank, 999, torch.float32).to_sparse()
        made.all_reduce(sparse).wait()
        whole = made.all_reduce(torch.full((3,), rank), PRODUCT).wait()
        most = made.all_reduce(torch.full((3,), -0.0 if rank % 2 else 0.0), MAX).wait()
        mixed = torch.full((3,), float("inf") if rank % 2 else -float("inf"))
        mixed = made.all_reduce(mixed).wait()
        return [
            _bits(torch.view_as_real(turned)),
            _bits(sparse.to_dense()),
            _bits(whole),
            _bits(most),
            _bits(mixed),
        ]


def test_complex_sparse_and_whole_numbers_and_nans_give_the_same_bits(ranks) -> None:
    found = [
        each
        for hosts in ([0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 2, 2])
        for each in ranks.run(_other_kinds, 4, hosts)
    ]
    assert all(each == found[0] for each in found)


def _refusals(rank: int, world_size: int) -> list[str]:
    texts = []
    for options in (
        {"plan": "flat", "reproducible": True},
        {"plan": "flat_ring", "reproducible": True},
        {"reproducible": rank == 1},
        {"plan": "equal" if rank else "auto"},
        {"measure": rank == 0},
    ):
        with pytest.raises(ConfigError) as caught:
            Communicator(**options)
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_fixed_or_differs_between_ranks_is_refused_on_all(ranks) -> None:
    for texts in ranks.run(_refusals, 2):
        assert "which a flat plan leaves to torch.distributed" in texts[0]
        assert texts[1] == texts[0]
        assert "reproducible is True on rank 1 but False on rank 0" in texts[2]
        assert "plan is equal on rank 1 but auto on rank 0" in texts[3]
        assert "measure is False on rank 1 but True on rank 0" in texts[4]


def test_where_only_the_plain_path_is_left_a_fixed_order_is_refused() -> None:
    hosts = preset("cpu-host", nodes=2, ranks_per_node=1)
    plans = Plans(hosts, ((0,), (1,)), 0, "auto", "no order of stores", 1 << 20, True)
    with pytest.raises(PlanError, match="does not add in a fixed order .no order of stores."):
        plans.prepared(torch.empty(7))
    usual = Plans(hosts, ((0,), (1,)), 0, "auto", None, 1 << 20).prepared(torch.empty(7))
    fixed = Plans(hosts, ((0,), (1,)), 0, "auto", None, 1 << 20, True).prepared(torch.empty(7))
    assert fixed.plan.family is not Family.FLAT_RING
    assert fixed.fingerprint != usual.fingerprint


def _trained(rank: int, world_size: int, hosts: list[int], way: str) -> bytes:
    import os

    os.environ[HOST_ID_ENV] = str(hosts[rank])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    if way == "ddp":
        model = topo_ar.ddp(module, reproducible=True, timeout_s=20.0)
    else:
        model = DistributedDataParallel(module, bucket_cap_mb=0.01)
        topo_ar.attach(model, reproducible=True, timeout_s=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=drawn)).square().mean().backward()
        optimizer.step()
    return b"".join(_bits(parameter.detach()) for parameter in module.parameters())


def test_training_on_other_hosts_and_in_other_buckets_ends_with_the_same_weights(ranks) -> None:
    found = [
        weights
        for hosts, way in (([0, 0, 0, 0], "ddp"), ([0, 1, 1, 0], "ddp"), ([0, 0, 1, 2], "attach"))
        for weights in ranks.run(_trained, 4, hosts, way)
    ]
    assert all(each == found[0] for each in found)
