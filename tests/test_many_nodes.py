"""Jobs of many nodes: rings, halving and doubling on the fast path, as planned, with few flows."""

import hashlib
import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.jobs import blocks, communicator, lag
from tests.schedule_cases import in_order, make_plan
from topo_ar.errors import PlanError
from topo_ar.execution import plans, reach
from topo_ar.planning.plan import Family
from topo_ar.planning.runtime import CPU_RUNTIME

FAMILIES = (Family.HIERARCHICAL_RING, Family.HIERARCHICAL_HALVING, Family.HIERARCHICAL_DOUBLING)
DTYPES = [torch.float32, torch.int64, torch.float16, torch.bfloat16, torch.float64]


def _integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(dtype)


def _by_family(
    rank: int, world_size: int, hosts: list[int], family: str, numels: list[int], lags: bool
) -> list[str]:
    """Digests of what any floats gave; "wrong" in place of one for a wrong sum of integers."""
    own = random.Random(rank)
    digests = []
    with communicator(rank, hosts, plan=family) as made:
        if lags:
            lag(made)
        pending = []
        for at, numel in enumerate(numels):
            dtype = DTYPES[at % len(DTYPES)]
            if lags and own.random() < 0.3:
                time.sleep(own.random() * 0.005)
            tensor = _integers(rank, numel, dtype)
            total = sum(_integers(r, numel, dtype).double() for r in range(world_size)).to(dtype)
            pending.append((made.all_reduce(tensor), total))
            if dtype.is_floating_point:
                spread = torch.randn(numel, generator=torch.Generator().manual_seed(rank + at))
                pending.append((made.all_reduce(spread.to(dtype), dist.ReduceOp.AVG), None))
        for future, total in pending:
            found = future.wait()
            digest = hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()
            digests.append(digest if total is None or torch.equal(found, total) else "wrong")
        plans = {str(kept.plan.family) for kept in made._plans._kept.values()}
        assert plans == ({family} if any(numels) else set()), plans
        assert made.error is None
        assert made.fallbacks == 0
    return digests


def _check(results: list[list[str]]) -> None:
    assert "wrong" not in results[0]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(3, 1), (4, 2), (3, 2), (5, 1), (7, 1), (8, 1)], ids=str)
def test_sums_are_exact_with_the_same_bits_everywhere(ranks, shape, family) -> None:
    hosts = blocks(*shape)
    numels = [1, 3, 1000, 40_001, 300_001]
    _check(ranks.run(_by_family, len(hosts), hosts, str(family), numels, False))


@pytest.mark.parametrize("family", FAMILIES)
def test_many_at_once_under_delays(ranks, family) -> None:
    numels = [5000, 9001, 1, 30_000, 2] * 3
    _check(ranks.run(_by_family, 6, blocks(6, 1), str(family), numels, True))


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(FAMILIES),
    st.integers(3, 8),
    st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    st.booleans(),
)
def test_any_number_of_nodes_and_elements(ranks, family, nodes, numels, lags) -> None:
    _check(ranks.run(_by_family, nodes, blocks(nodes, 1), str(family), numels, lags))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(8, 2), (16, 1), (13, 1)], ids=str)
def test_up_to_sixteen_nodes(ranks, shape, family) -> None:
    hosts = blocks(*shape)
    outcomes = ranks.fresh(
        _by_family, len(hosts), hosts, str(family), [1, 1000, 300_001], False, deadline_s=60.0
    )
    assert [outcome.error for outcome in outcomes] == [None] * len(hosts)
    _check([outcome.result for outcome in outcomes])


def _with_few_flows(rank: int, world_size: int) -> tuple[list[str], int, str | None]:
    """As in a job of more nodes than reach each other directly: here three."""
    reach.ALL_CONNECTED_RANKS = 4
    reach.CPU_RUNTIME = plans.CPU_RUNTIME = replace(CPU_RUNTIME, most_direct_nodes=3)
    try:
        wrong = []
        with communicator(rank, blocks(world_size, 1), plan="hierarchical") as made:
            for numel in (1, 5, 4097, 1_100_003):
                tensor = _integers(rank, numel, torch.float32)
                total = sum(_integers(r, numel, torch.float32) for r in range(world_size))
                made.all_reduce(tensor).wait()
                kept = made._plans._kept[numel, torch.float32, "cpu"].plan.family
                if not torch.equal(tensor, total) or kept not in FAMILIES:
                    wrong.append(f"{numel} {kept}")
            return wrong, len(made._job.flows), made.groups_reason
    finally:
        reach.ALL_CONNECTED_RANKS = 64
        reach.CPU_RUNTIME = plans.CPU_RUNTIME = CPU_RUNTIME


@pytest.mark.parametrize(("nodes", "most"), [(5, 4), (8, 4)])
def test_ranks_of_very_many_nodes_hold_few_flows(ranks, nodes, most) -> None:
    for wrong, flows, reason in ranks.run(_with_few_flows, nodes):
        assert wrong == []
        assert flows <= most
        assert reason == "ranks of more than 3 nodes do not all reach each other"


@pytest.mark.parametrize("nodes", [65, 100, 128, 1000])
def test_flows_grow_with_the_logarithm_of_the_nodes(nodes) -> None:
    placed = in_order([2] * nodes)
    everyone = {rank: set(reach.peers_of(placed, rank)) for rank in range(2 * nodes)}
    assert all(rank in everyone[peer] for rank, peers in everyone.items() for peer in peers)
    assert max(map(len, everyone.values())) <= nodes.bit_length() + 2
    if nodes == 100:
        for family in FAMILIES:
            assert reach.Reach(placed).missing(make_plan(family, placed, 4000), 4) == ""
        direct = make_plan(Family.HIERARCHICAL_PIPELINED, placed, 4000)
        missing = reach.Reach(placed).missing(direct, 4)
        assert "of more than 64 nodes each reaches few" in missing


def _reproducibly(rank: int, world_size: int) -> tuple[str, str]:
    hosts = blocks(3, 2)
    with communicator(rank, hosts, reproducible=True) as made:
        made.all_reduce(torch.ones(64)).wait()
        chosen = made.plan_for(256).family
    with communicator(rank, hosts, plan="hierarchical_doubling", reproducible=True) as made:
        try:
            made.all_reduce(torch.ones(64))
        except PlanError as error:
            return str(chosen), str(error)
    return str(chosen), "no error"


def test_no_fixed_order_is_left_to_rounds(ranks) -> None:
    for chosen, text in ranks.run(_reproducibly, 6):
        assert chosen not in FAMILIES
        assert "hierarchical_doubling does not add in a fixed order (sums of some nodes" in text
