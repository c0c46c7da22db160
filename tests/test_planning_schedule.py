"""Chunks, lowering and the symbolic check; a small interpreter checks the check."""

from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_cases import any_levels, cluster
from topo_ar.errors import PlanError
from topo_ar.planning.chunks import KIB, edge_nbytes, equal_chunks, tapered_chunks
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family, Shards
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import Runtime
from topo_ar.planning.schedule import Op, Stage, Step
from topo_ar.planning.step_list import cut
from topo_ar.planning.verify import verify

MIB = 1 << 20
HIERARCHICAL = [Family.HIERARCHICAL_PIPELINED, Family.HIERARCHICAL_LEADER]
# Slots so small that a few hundred elements need several chunks.
SMALL = Runtime(max_chunk_nbytes=256, flat_hop_seconds=0.0, flat_bytes_per_s=float("inf"))


def small_plan(levels, numel, itemsize=4, family=None):
    return plan(levels, numel * itemsize, itemsize=itemsize, family=family, runtime=SMALL)


# --- chunks ---


@given(st.integers(0, 200 * MIB), st.sampled_from([1, 4, 512, 1024, 8192]))
def test_taper_tiles_the_buffer(nbytes, align):
    chunks = tapered_chunks(nbytes, align)
    assert sum(chunks) == nbytes
    assert all(0 < size <= 2 * MIB for size in chunks)
    assert all(size % align == 0 for size in chunks[:-1])
    largest = max(nbytes // 4, 64 * KIB)
    assert all(size <= largest for size in chunks[:-1])
    assert sum(chunks[-1:]) < largest + align
    assert all(b <= 2 * a for a, b in pairwise(chunks[:-1]))
    if nbytes >= MIB:
        assert chunks[0] == edge_nbytes(nbytes)
        assert edge_nbytes(nbytes) <= chunks[-1] < edge_nbytes(nbytes) + align


def test_taper_of_25_mb():
    chunks = tapered_chunks(25_000_000, 512)
    assert chunks[:3] == (256 * KIB, 512 * KIB, 1024 * KIB)
    assert chunks[-3:-1] == (1024 * KIB, 512 * KIB)
    # 25,000,000 = 48,828 * 512 + 64: the last chunk takes the rest.
    assert chunks[-1] == 256 * KIB + 64
    assert all(MIB < size <= 2 * MIB for size in chunks[3:-3])
    assert len(chunks) == 17


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, ()),
        (1, (1,)),
        (64 * KIB, (64 * KIB,)),
        (MIB, (128 * KIB, 256 * KIB, 256 * KIB, 256 * KIB, 128 * KIB)),
        (512 * KIB, (64 * KIB, 128 * KIB, 128 * KIB, 128 * KIB, 64 * KIB)),
    ],
)
def test_taper_of_small_buffers(nbytes, expected):
    assert tapered_chunks(nbytes, 512) == expected


def test_edges_shrink_with_the_buffer():
    sizes = (25_000_000, 4 * MIB, MIB, MIB - 1)
    assert [edge_nbytes(n) // KIB for n in sizes] == [256, 256, 128, 64]


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 64), st.integers(64, 4096))
def test_chunks_keep_to_small_slots(nbytes, count, align, limit):
    for chunks in (
        tapered_chunks(nbytes, align, limit),
        equal_chunks(nbytes, count, align, limit),
    ):
        assert sum(chunks) == nbytes
        assert all(0 < size <= limit for size in chunks)
        assert all(size % align == 0 for size in chunks[:-1])


def test_equal_chunks_are_as_many_as_asked():
    assert equal_chunks(1000, 3, 10) == (330, 330, 340)
    assert equal_chunks(1005, 3, 10) == (330, 330, 345)
    assert equal_chunks(10 * MIB, 2) == (2 * MIB,) * 5


@pytest.mark.parametrize("arguments", [(-1,), (10, 0), (10, 9, 8)])
def test_chunks_refuse_nonsense(arguments):
    with pytest.raises(PlanError):
        tapered_chunks(*arguments)


# --- lowering ---


def test_two_nodes_exchange_each_rail():
    made = plan(cluster([2, 2], 1e9, [1e9]), 400, family=Family.HIERARCHICAL_PIPELINED, itemsize=4)
    halves = ((0, 50), (50, 100))
    schedule = lower(made, 100, 4)
    assert schedule.plan_hash == made.hash
    assert schedule.steps == (
        Step(0, Stage.INTRA_REDUCE_SCATTER, Op.REDUCE_SCATTER, (0, 1), halves, 0),
        Step(1, Stage.INTRA_REDUCE_SCATTER, Op.REDUCE_SCATTER, (2, 3), halves, 0),
        Step(2, Stage.INTER_EXCHANGE, Op.EXCHANGE, (0, 2), ((0, 50),) * 2, 0, (0, 1)),
        Step(3, Stage.INTER_EXCHANGE, Op.EXCHANGE, (1, 3), ((50, 100),) * 2, 0, (0, 1)),
        Step(4, Stage.INTRA_ALL_GATHER, Op.ALL_GATHER, (0, 1), halves, 0, (2, 3)),
        Step(5, Stage.INTRA_ALL_GATHER, Op.ALL_GATHER, (2, 3), halves, 0, (2, 3)),
    )


def test_three_nodes_of_one_rank_scatter_and_gather():
    made = plan(cluster([1] * 3, 1.0, [1e9]), 40, family=Family.HIERARCHICAL_SEQUENTIAL)
    thirds = ((0, 3), (3, 6), (6, 10))
    assert lower(made, 10, 4).steps == (
        Step(0, Stage.INTER_REDUCE_SCATTER, Op.REDUCE_SCATTER, (0, 1, 2), thirds, 0),
        Step(1, Stage.INTER_ALL_GATHER, Op.ALL_GATHER, (0, 1, 2), thirds, 0, (0,)),
    )


def test_leaders_exchange_whole_sums():
    made = plan(cluster([2] * 3, 1e9, [1e9]), 40, family=Family.HIERARCHICAL_LEADER)
    assert made.shards.ranks == ((1, 0),) * 3
    steps = lower(made, 10, 4).steps
    assert [step.stage for step in steps] == (
        [Stage.INTRA_REDUCE_SCATTER] * 3 + [Stage.INTER_EXCHANGE] + [Stage.INTRA_ALL_GATHER] * 3
    )
    assert steps[3].group == (0, 2, 4)
    assert set(steps[3].shards) == {(0, 10)}
    assert all(step.shards == ((0, 10), (10, 10)) for step in steps if len(step.group) == 2)


def test_one_node_has_no_stage_between_nodes():
    made = plan(cluster([3], 1e9, []), 40, family=Family.HIERARCHICAL_PIPELINED)
    stages = [step.stage for step in lower(made, 10, 4).steps]
    assert stages == [Stage.INTRA_REDUCE_SCATTER, Stage.INTRA_ALL_GATHER]


def test_flat_is_one_step_and_nothing_to_do_is_none():
    levels = cluster([2, 3], 1e9, [1e9])
    (step,) = lower(plan(levels, 40, family=Family.FLAT_RING), 10, 4).steps
    assert (step.op, step.group, set(step.shards)) == (Op.ALL_REDUCE, (0, 1, 2, 3, 4), {(0, 10)})
    assert lower(plan(levels, 0), 0, 4).steps == ()
    assert lower(plan(cluster([1], 1.0, []), 40), 10, 4).steps == ()


def test_ranks_dealt_round_robin_stay_with_their_node():
    levels = cluster([2, 2], 4e9, [125e6])
    first, second = levels.nodes
    dealt = type(levels)(
        (with_ranks(first, (0, 2)), with_ranks(second, (1, 3))),
    )
    schedule = lower(plan(dealt, 25_000_000), 6_250_000, 4)
    verify(schedule)
    groups = {step.group for step in schedule.steps if step.stage.startswith("intra")}
    assert groups == {(0, 2), (1, 3)}
    # Each host sends the buffer once: 25.0 MB, not 37.5 (flat) or 50 (wrong groups).
    sent = [0] * 4
    for step in schedule.steps:
        if step.op == Op.EXCHANGE:
            for rank, (begin, end) in zip(step.group, step.shards, strict=True):
                sent[rank] += 4 * (end - begin)
    assert sent[0] + sent[2] == sent[1] + sent[3] == 25_000_000


def with_ranks(node, ranks):
    return type(node)(node.name, ranks, node.intra, node.nics)


def test_lower_refuses_what_does_not_fit():
    made = plan(cluster([2, 2], 1e9, [1e9]), 40)
    with pytest.raises(PlanError, match="plan is for 40 bytes, the buffer has 9 elements"):
        lower(made, 9, 4)
    with pytest.raises(PlanError, match="no multiple of the element size 16"):
        lower(msgspec.structs.replace(made, chunk_nbytes=(20, 28), nbytes=48), 3, 16)
    with pytest.raises(PlanError, match="chunks hold 20 of 40 bytes"):
        lower(msgspec.structs.replace(made, chunk_nbytes=(20,)), 10, 4)
    with pytest.raises(PlanError, match="one share for each node and rank"):
        lower(msgspec.structs.replace(made, shards=Shards((1, 1), ((1, 1, 1),) * 2)), 10, 4)


@given(st.integers(0, 50), st.integers(0, 200), st.lists(st.integers(0, 5), min_size=1))
def test_cut_tiles_an_interval_in_proportion(begin, length, weights):
    weights = [*weights, 1]
    parts = cut(begin, begin + length, weights)
    assert parts[0][0] == begin
    assert parts[-1][1] == begin + length
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    for (first, last), weight in zip(parts, weights, strict=True):
        assert abs((last - first) - length * weight / sum(weights)) < 1


# --- verification of what the planner makes ---


@st.composite
def any_planned(draw):
    levels = draw(any_levels(number=float))
    families = [None, Family.FLAT_RING]
    sizes = {len(node.ranks) for node in levels.nodes}
    if len(sizes) == 1 and levels.world_size > 1:
        families += HIERARCHICAL if len(levels.nodes) > 1 else HIERARCHICAL[:1]
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    numel = draw(st.one_of(st.sampled_from([0, 1, 2, 3, 97]), st.integers(0, 700)))
    made = small_plan(levels, numel, itemsize, draw(st.sampled_from(families)))
    return lower(made, numel, itemsize)


@given(any_planned())
def test_every_planned_schedule_is_a_correct_all_reduce(schedule):
    verify(schedule)


def test_chunks_of_a_real_plan_do_not_wait_for_each_other():
    made = plan(cluster([4, 4], 4e9, [125e6]), 25_000_000)
    schedule = lower(made, 6_250_000, 4)
    verify(schedule)
    assert made.family == Family.HIERARCHICAL_PIPELINED
    chunk_of = {step.index: step.chunk for step in schedule.steps}
    assert all(chunk_of[i] == step.chunk for step in schedule.steps for i in step.after)
    ends = list(accumulate(size // 4 for size in made.chunk_nbytes))
    for step in schedule.steps:
        begin = ends[step.chunk] - made.chunk_nbytes[step.chunk] // 4
        assert all(begin <= a <= b <= ends[step.chunk] for a, b in step.shards)
    # Shards start on whole cache lines of 16 elements, in all chunks but the last.
    shards = [s for step in schedule.steps if step.chunk < len(ends) - 1 for s in step.shards]
    assert all(begin % 16 == 0 for begin, _ in shards)
