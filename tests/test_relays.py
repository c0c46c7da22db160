"""Sums that are passed on between nodes: three levels, on the fast path."""

import hashlib
import random
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.jobs import communicator, lag
from tests.schedule_cases import in_order, make, make_plan
from topo_ar.errors import PlanError
from topo_ar.execution.kernels import Kernel
from topo_ar.execution.program import compile_program
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.schedule import Stage

THREE = Family.HIERARCHICAL_THREE_LEVEL


def racks_of(count: int, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(i * size, (i + 1) * size)) for i in range(count))


def _integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(dtype)


def _by_plans(
    rank: int, world_size: int, hosts: list[int], plans: list[tuple[str, bytes]], repeats: int
) -> list[str]:
    """Digests of what the plans gave, each for its dtype; "wrong" for a wrong sum."""
    random.seed(rank)
    digests = []
    for name, text in plans:
        dtype, plan = getattr(torch, name), Plan.from_json(text)
        numel = plan.nbytes // dtype.itemsize
        integers = _integers(rank, numel, dtype)
        total = sum(_integers(r, numel, dtype).double() for r in range(world_size)).to(dtype)
        pending = []
        with communicator(rank, hosts, plan=plan) as made:
            if repeats > 1:
                lag(made)
            for _ in range(repeats):
                if repeats > 1 and random.random() < 0.2:
                    time.sleep(random.random() * 0.01)
                tensor = integers.clone()
                pending.append((tensor, made.all_reduce(tensor)))
            right = all(torch.equal(future.wait(), total) for _, future in pending)
            tensor = pending[0][0]
            # Rounded sums: the same bits everywhere, whichever rank adds them.
            if dtype.is_floating_point:
                spread = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
                made.all_reduce(spread, dist.ReduceOp.AVG).wait()
                tensor = torch.cat([tensor, spread])
            assert made.error is None
        digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        digests.append(digest if right else "wrong")
    return digests


def check(results: list[list[str]]) -> None:
    assert all(result == results[0] for result in results)
    assert "wrong" not in results[0]


def hosts_of(nodes) -> list[int]:
    home = {rank: i for i, node in enumerate(nodes) for rank in node}
    return [home[rank] for rank in range(len(home))]


SHAPES = [
    (in_order([2] * 4), {"racks": racks_of(2, 2)}),
    (in_order([1] * 8), {"racks": racks_of(2, 4)}),
    (in_order([1] * 8), {"racks": racks_of(4, 2)}),
    (in_order([1] * 6), {"racks": ((0, 3, 5), (1, 2, 4))}),
    (((6, 1), (0, 3), (2, 5), (4, 7)), {"racks": ((3, 0), (1, 2))}),
    (in_order([4, 4]), {"islands": in_order([2] * 4)}),
    (((0, 5, 2, 7), (4, 1, 6, 3)), {"islands": ((5, 7), (0, 2), (1, 3), (4, 6))}),
    (in_order([8]), {"islands": in_order([4, 4])}),
]


@pytest.mark.parametrize(("nodes", "third"), SHAPES, ids=str)
def test_three_levels_are_exact_with_the_same_bits_everywhere(ranks, nodes, third) -> None:
    plans = []
    for dtype, numel, chunks in (
        ("float32", 40_001, 7),
        ("float16", 513, 2),
        ("int64", 70_000, 3),
        ("float64", 3, 1),
        ("bfloat16", 1, 1),
    ):
        itemsize = getattr(torch, dtype).itemsize
        plans.append((dtype, make_plan(THREE, nodes, numel, chunks, itemsize, **third).to_json()))
    hosts = hosts_of(nodes)
    check(ranks.run(_by_plans, len(hosts), hosts, plans, 1))


@st.composite
def three_levels(draw):
    """Up to 8 ranks in racks of equal size, dealt anyhow, and plans for them."""
    racks, per_rack, width = draw(
        st.sampled_from([(2, 2, 1), (2, 2, 2), (3, 2, 1), (2, 3, 1), (4, 2, 1), (2, 4, 1)])
    )
    count = racks * per_rack
    ranks = draw(st.permutations(range(count * width)))
    nodes = tuple(tuple(ranks[a:b]) for a, b in pairwise(range(0, len(ranks) + 1, width)))
    order = draw(st.permutations(range(count)))
    third = tuple(tuple(order[i::racks]) for i in range(racks))
    plans = []
    for dtype in draw(st.lists(st.sampled_from(["float32", "int32"]), min_size=1, max_size=2)):
        numel = draw(st.sampled_from([1, 5, 513, 60_000]))
        parts = draw(st.integers(1, 9))
        plans.append((dtype, make_plan(THREE, nodes, numel, parts, racks=third).to_json()))
    return hosts_of(nodes), plans


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(three_levels())
def test_racks_of_any_order_under_delays(ranks, case) -> None:
    hosts, plans = case
    check(ranks.run(_by_plans, len(hosts), hosts, plans, 12))


def test_racks_under_delays(ranks) -> None:
    plans = [
        ("float32", make_plan(THREE, in_order([1] * 8), 30_001, 9, racks=racks_of(2, 4)).to_json())
    ]
    check(ranks.run(_by_plans, 8, list(range(8)), plans, 12))


@pytest.mark.slow
def test_sixteen_ranks_in_four_racks(ranks) -> None:
    nodes = in_order([2] * 8)
    plans = [("float32", make_plan(THREE, nodes, 100_003, 5, racks=racks_of(4, 2)).to_json())]
    outcomes = ranks.fresh(_by_plans, 16, hosts_of(nodes), plans, 3, deadline_s=60.0)
    assert [outcome.error for outcome in outcomes] == [None] * 16
    check([outcome.result for outcome in outcomes])


def test_a_rank_knows_its_rounds() -> None:
    schedule = make(THREE, in_order([1] * 4), 8, racks=racks_of(2, 2))
    [chunk] = compile_program(schedule, 0, 1 << 20)
    relay = chunk.relay
    # Half goes to the mate in the rack, the other half is added, goes to the other rack, is added
    # to what comes from there, and then goes to the mate.
    assert [(s.peer, s.begin, s.end) for s in relay.first] == [(1, 4, 8)]
    assert [(each.frames, each.final, each.stage) for each in relay.rounds] == [
        (1, False, Stage.RACK_REDUCE_SCATTER),
        (1, True, Stage.INTER_EXCHANGE),
        (1, False, Stage.RACK_ALL_GATHER),
    ]
    assert [(s.peer, s.begin, s.end) for s in relay.rounds[0].sends] == [(2, 0, 4)]
    assert [(s.peer, s.begin, s.end) for s in relay.rounds[1].sends] == [(1, 0, 4)]
    assert [each.members for each in relay.rounds[1].sums] == [(0, 2)]
    assert (chunk.awaited, chunk.gathering) == (2, 1)
    assert chunk.expected == ((1, 2), (2, 1))


def test_islands_are_one_reduction_in_shared_memory() -> None:
    schedule = make(THREE, in_order([4, 4]), 16, islands=in_order([2] * 4))
    [chunk] = compile_program(schedule, 1, 1 << 20)
    # Rank 1 has the second half of its island's shares, of which the first half is its own.
    assert (chunk.shard_begin, chunk.shard_end) == (8, 12)
    assert chunk.owners == (0, 1, 2, 3)
    assert chunk.relay is None
    assert [segment.rail for segment in chunk.segments] == [(1, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at", range(4))
def test_partials_are_added_in_place_in_one_order(dtype, at) -> None:
    kernel = Kernel(dtype)
    values = [_integers(rank, 33, torch.float32).to(dtype) / 3 for rank in range(4)]
    sources = [kernel.view(value.clone()) for value in values]
    total = np.empty_like(sources[0])
    kernel.reduce_between(total, sources, range(4))
    kernel.reduce_partials(sources[at], sources)
    assert (sources[at] == total).all()


def _reproducibly(rank: int, world_size: int, text: bytes) -> str:
    plan = Plan.from_json(text)
    with communicator(rank, list(range(4)), plan=plan, reproducible=True) as made:
        try:
            made.all_reduce(torch.ones(64))
        except PlanError as error:
            return str(error)
    return "no error"


def test_no_sum_in_a_fixed_order_is_passed_on(ranks) -> None:
    plan = make_plan(THREE, in_order([1] * 4), 64, racks=racks_of(2, 2))
    for text in ranks.run(_reproducibly, 4, plan.to_json()):
        assert "does not add in a fixed order" in text
