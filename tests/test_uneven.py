"""Nodes of unequal numbers of ranks, and shares of any weights, on the fast path."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.jobs import blocks, communicator, wrong_under_delays
from tests.schedule_cases import in_order, make, make_plan
from topo_ar.errors import ConfigError, PlanError
from topo_ar.execution.plans import Plans
from topo_ar.execution.program import compile_program, node_program
from topo_ar.execution.reach import Reach, peers_of
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family, Plan, Shards
from topo_ar.planning.schedule import Op, Schedule, Stage, Step
from topo_ar.topology.model import Topology
from topo_ar.topology.presets import preset

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16]
WEIGHTED = Family.HIERARCHICAL_WEIGHTED


def _integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(dtype)


def _sum(world_size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return sum(_integers(r, numel, dtype).double() for r in range(world_size))


def _exact(rank: int, world_size: int, hosts: list[int]) -> tuple[list[str], set[str]]:
    """What was wrong, and the families that ran."""
    wrong = []
    with communicator(rank, hosts, plan="hierarchical") as made:
        pending = []
        for dtype in DTYPES:
            for numel in (0, 1, 7, 65_537, 200_001):
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[: 1 + dtype.is_floating_point]:
                    # Averages of multiples of the world size are whole.
                    scale = world_size if op == dist.ReduceOp.AVG else 1
                    tensor = _integers(rank, numel, dtype) * scale
                    expected = _sum(world_size, numel, dtype).to(dtype)
                    pending.append((tensor, expected, made.all_reduce(tensor, op)))
        for tensor, expected, future in pending:
            if not torch.equal(future.wait(), expected):
                wrong.append(f"{tensor.dtype} {tensor.numel()}")
        kept = made._plans._kept.values()
        assert all(prepared.program is not None for prepared in kept)
    return wrong, {str(prepared.plan.family) for prepared in kept}


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (1, 2, 3), (4, 2, 2), (5, 1, 1, 1), (3, 4)])
def test_uneven_nodes_run_weighted_and_exactly(ranks, sizes) -> None:
    hosts = [node for node, size in enumerate(sizes) for _ in range(size)]
    for wrong, families in ranks.run(_exact, len(hosts), hosts):
        assert wrong == []
        assert families == {"hierarchical_weighted"}


def _by_plans(
    rank: int, world_size: int, hosts: list[int], plans: list[tuple[str, bytes]]
) -> list[str]:
    """Digests of what the plans gave, each for its dtype; "wrong" for a wrong sum."""
    digests = []
    for name, text in plans:
        dtype, plan = getattr(torch, name), Plan.from_json(text)
        numel = plan.nbytes // dtype.itemsize
        with communicator(rank, hosts, plan=plan) as made:
            tensor = _integers(rank, numel, dtype)
            made.all_reduce(tensor).wait()
            right = torch.equal(tensor, _sum(world_size, numel, dtype).to(dtype))
            # Rounded sums: the same bits everywhere, whichever rank adds them.
            spread = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
            if dtype.is_floating_point:
                made.all_reduce(spread, dist.ReduceOp.AVG).wait()
                tensor = torch.cat([tensor, spread])
            digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            digests.append(digest if right else "wrong")
    return digests


@st.composite
def odd_plans(draw):
    """Hosts of up to 8 ranks, dealt anyhow on up to 4 nodes, and weighted plans for them."""
    world = draw(st.integers(2, 8))
    names = st.integers(0, draw(st.integers(1, 3)))
    hosts = draw(st.lists(names, min_size=world, max_size=world))
    nodes = [tuple(r for r in range(world) if hosts[r] == host) for host in sorted(set(hosts))]
    weights = st.integers(0, 5)

    def shares(count):
        drawn = draw(st.lists(weights, min_size=count, max_size=count))
        return tuple(drawn) if sum(drawn) else (1,) * count

    plans = []
    for dtype in draw(st.lists(st.sampled_from(["float32", "float16", "int64"]), max_size=2)):
        order = [tuple(draw(st.permutations(node))) for node in draw(st.permutations(nodes))]
        own = tuple(shares(len(node)) for node in order)
        numel = draw(st.sampled_from([1, 7, 513, 40_000]))
        itemsize = getattr(torch, dtype).itemsize
        parts = draw(st.integers(1, 6))
        cut = Shards(shares(len(nodes)), own)
        plan = make_plan(WEIGHTED, order, numel, parts, itemsize, shards=cut)
        plans.append((dtype, plan.to_json()))
    return hosts, plans


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(odd_plans())
def test_plans_of_odd_weights_give_exact_sums_and_the_same_bits(ranks, case) -> None:
    _check_case(ranks, *case)


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(odd_plans())
def test_a_few_plans_of_odd_weights(ranks, case) -> None:
    _check_case(ranks, *case)


def _check_case(ranks, hosts, plans) -> None:
    results = ranks.run(_by_plans, len(hosts), hosts, plans)
    assert all(result == results[0] for result in results)
    assert "wrong" not in results[0]


def test_a_rank_knows_its_part_of_every_segment() -> None:
    shares = Shards((1, 0, 1), ((1,), (1, 1), (1, 1, 1)))
    schedule = make(WEIGHTED, in_order((1, 2, 3)), 12, shards=shares)
    alone, half, third = (compile_program(schedule, rank, 1 << 20)[0] for rank in (0, 1, 4))
    assert (alone.begin, alone.end, alone.shard_begin, alone.shard_end) == (0, 12, 0, 12)
    assert [(each.number, each.begin, each.end) for each in alone.segments] == [
        (0, 0, 4),
        (1, 4, 6),
        (2, 6, 8),
        (3, 8, 12),
    ]
    assert [each.rail for each in alone.segments] == [(0, 1, 3), (0, 1, 4), (0, 2, 4), (0, 2, 5)]
    assert [each.arrive_begin for each in alone.segments] == [0, 2, 3, 4]
    # Rank 1 and its node sum up nothing: they send everything out and get two results a segment.
    assert (half.awaited, half.gathering) == (0, 4)
    assert [(each.number, each.part[0] == each.part[1]) for each in half.segments] == [
        (0, True),
        (1, True),
    ]
    assert dict(third.expected) == {0: 4, 1: 1, 2: 1}
    assert (alone.owners, half.owners, third.owners) == ((0,), (0, 1), (0, 1, 2))


def test_equal_nodes_have_one_segment_a_rank() -> None:
    schedule = make(Family.HIERARCHICAL_PIPELINED, in_order((2, 2)), 4096, chunks=4)
    for chunk in compile_program(schedule, 3, 1 << 20):
        [segment] = chunk.segments
        assert (segment.number, segment.rail, segment.parts) == (1, (1, 3), ())
        assert segment.part == (chunk.shard_begin, chunk.shard_end)
        assert chunk.expected == ((1, 1),)


def test_steps_that_cannot_run_are_refused_by_name_on_every_rank() -> None:
    tree = make(Family.DOUBLE_BINARY_TREE, in_order((2, 1)), 64)
    for rank in range(3):
        with pytest.raises(PlanError, match="tree_reduce, which this runtime cannot run"):
            compile_program(tree, rank, 1 << 20)
    mixed = Schedule(
        "",
        2,
        4,
        4,
        (
            Step(0, Stage.FLAT, Op.ALL_REDUCE, (0, 1), ((0, 4), (0, 4)), 0),
            Step(1, Stage.INTER_EXCHANGE, Op.EXCHANGE, (0, 1), ((0, 4), (0, 4)), 1),
        ),
    )
    with pytest.raises(PlanError, match="mixed"):
        compile_program(mixed, 0, 1 << 20)


def test_chunks_inside_nodes_are_counted_alike_on_nodes_of_any_size() -> None:
    for numel in (1, 1000, 70_001, 3_000_001):
        counts = {len(node_program(numel, size, 0, 4, 2 << 20)) for size in range(1, 9)}
        assert len(counts) == 1


SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=4)


@settings(max_examples=60)
@given(SIZES, st.sampled_from([5, 96, 1001]), st.integers(1, 3))
def test_equal_shares_find_their_flows_in_jobs_of_any_size(sizes, numel, chunks) -> None:
    nodes = in_order(sizes)
    plan = make_plan(WEIGHTED, nodes, numel, chunks)
    assert Reach(nodes).missing(plan, 4) == ""
    for rank in (0, sizes[0], sum(sizes) - 1):
        assert all(rank in peers_of(nodes, peer) for peer in peers_of(nodes, rank))


def test_all_ranks_of_a_small_job_reach_all_of_other_nodes() -> None:
    assert peers_of(in_order((4, 2)), 0) == (4, 5)
    assert peers_of(in_order((2, 2, 2)), 3) == (0, 1, 4, 5)
    # Of a large one those in the same place, or with the same share.
    assert peers_of(in_order((33, 33)), 34) == (1,)
    assert peers_of(in_order((48, 24)), 49) == (2, 3)


def test_flows_that_are_not_there_are_named() -> None:
    large = in_order((48, 24))
    odd = make_plan(WEIGHTED, large, 960, shards=Shards((1, 1), ((1,) * 48, (23,) + (1,) * 23)))
    missing = Reach(large).missing(odd, 4)
    assert "flow between ranks 2 and 48" in missing
    assert "more than 64 ranks" in missing
    nodes = in_order((33, 33))
    crossed = make_plan(Family.HIERARCHICAL_PIPELINED, (nodes[0], nodes[1][::-1]), 660)
    assert "flow between ranks 0 and 65" in Reach(nodes).missing(crossed, 4)


def test_what_runs_instead_of_a_plan_without_its_flows_is_a_plan(monkeypatch) -> None:
    nodes = in_order((33, 33))
    hosts = preset("cpu-host", nodes=2, ranks_per_node=33)
    crossed = make_plan(Family.HIERARCHICAL_PIPELINED, (nodes[0], nodes[1][::-1]), 660)
    with pytest.raises(PlanError, match="the plan cannot run: it needs a flow between ranks 0 and"):
        _on(hosts, nodes, crossed).plan_for(2640, 4, "cpu")
    chosen = _on(hosts, nodes, "hierarchical_pipelined")
    monkeypatch.setattr(chosen._reach, "missing", lambda plan, itemsize: "a flow is not there")
    plan = chosen.plan_for(2640, 4, "cpu")
    assert plan.family is Family.FLAT_RING
    assert plan.reason == "flat_ring instead of hierarchical_pipelined: a flow is not there."


def _crossed(rank: int, world_size: int) -> list[str]:
    plan = make_plan(Family.HIERARCHICAL_PIPELINED, ((0, 1), (3, 2)), 640)
    with communicator(rank, blocks(2, 2), plan=plan) as made:
        made.record_spans()
        total = made.all_reduce(torch.arange(640.0) * (rank + 1)).wait()
        assert torch.equal(total, torch.arange(640.0) * 10)
        return sorted({str(span.stage) for span in made.record_spans()})


def test_equal_nodes_may_pair_any_ranks(ranks) -> None:
    for stages in ranks.run(_crossed, 4):
        assert "inter_exchange" in stages


def _on(topology: Topology, nodes, mode) -> Plans:
    return Plans(topology, nodes, 0, mode, None, 2 << 20)


def test_equal_shares_and_families_can_be_asked_for_by_name() -> None:
    hosts = preset("cpu-host", nodes=3, ranks_per_node=2)
    nodes = in_order((2, 2, 2))
    equal = _on(hosts, nodes, "equal").plan_for(4_000_000, 4, "cpu")
    assert equal.family is WEIGHTED
    assert equal.shards == Shards((1, 1, 1), ((1, 1),) * 3)
    rails = _on(hosts, nodes, "hierarchical_pipelined").plan_for(4_000_000, 4, "cpu")
    assert rails.family is Family.HIERARCHICAL_PIPELINED
    # One chunk more or less is all that tells them apart.
    assert equal.predicted_seconds == pytest.approx(rails.predicted_seconds, rel=0.05)
    assert lower(equal, 1_000_000, 4).steps[0] == lower(rails, 1_000_000, 4).steps[0]
    for mode in (WEIGHTED.value, equal):
        flat = _on(hosts, nodes, mode).plan_for(4_000_000, 4, "cuda")
        assert flat.family is Family.FLAT_RING
        assert "hierarchical_weighted: NCCL's stages give all ranks equal shares" in flat.reason


def _bad_mode(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigError) as caught, communicator(rank, [0], plan="halving_doubling"):
        pass
    return str(caught.value)


def test_a_family_that_cannot_run_is_no_mode(ranks) -> None:
    [text] = ranks.run(_bad_mode, 1)
    assert "'halving_doubling' is not one of auto, flat, hierarchical, equal, flat_ring" in text


def _many_under_delays(rank: int, world_size: int, hosts: list[int]) -> int:
    return wrong_under_delays(rank, hosts, 60, (4000, 9001, 1, 70_000))


@pytest.mark.parametrize("hosts", [[0, 1, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2]], ids=str)
def test_many_steps_under_delays_are_right(ranks, hosts) -> None:
    assert ranks.run(_many_under_delays, 6, hosts) == [0] * 6


def _measured(rank: int, world_size: int, hosts: list[int]) -> float:
    with communicator(rank, hosts, plan="hierarchical", measure=True) as made:
        return float(made.all_reduce(torch.full((70_001,), float(rank))).wait().unique())


def test_collectives_inside_nodes_leave_the_count_of_chunks_alike(ranks) -> None:
    assert ranks.run(_measured, 6, [0, 0, 0, 0, 1, 2]) == [15.0] * 6
