"""Exact event times against the oracles of the planning notes and the closed forms."""

import math
import re
from dataclasses import replace
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning_cases import EQUAL, any_levels, cluster, equal, rate
from tests.schedule_cases import ANY_NODES, TWO_LEVEL, in_order, make, make_ring
from topo_ar.errors import PlanError
from topo_ar.planning import cost
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.level_bounds import all_reduce_lower_bound
from topo_ar.planning.pipelines import end_of_chunks
from topo_ar.planning.plan import Family, Shards
from topo_ar.planning.timing import bandwidth_limit, time_schedule
from topo_ar.planning.verify import verify
from topo_ar.topology.levels import Levels, NodeLevel, Rack

# Exact seconds per unit of a pipeline of c equal chunks, reduce-scatters first.
CHUNKS = [
    ("2x8 A100", {1: (13, 1200), 2: (19, 2400), 4: (31, 4800), 8: (7, 1200), 32: (7, 1200)}),
    ("4x8 A100", {1: (1, 75), 2: (1, 96), 4: (43, 4800), 8: (79, 9600), 32: (59, 7680)}),
    ("2x4 rails", {1: (3, 200), 2: (1, 80), 4: (9, 800), 8: (17, 1600), 32: (13, 1280)}),
]


def per_byte(levels, family, chunks=1, first="reduce_scatter", **options):
    """Seconds per byte of a buffer whose every shard is whole."""
    nodes = tuple(node.ranks for node in levels.nodes)
    numel = 4 * chunks * math.prod({len(nodes), *map(len, nodes)})
    schedule = make(family, nodes, numel, chunks, 1, **options)
    return time_schedule(schedule, levels, first=first).seconds / numel


# --- oracles ---


@pytest.mark.parametrize(
    ("name", "count", "exact"),
    [(name, count, Fraction(*exact)) for name, row in CHUNKS for count, exact in row.items()],
)
def test_chunks_overlap_exactly(name, count, exact):
    assert per_byte(equal(name), Family.HIERARCHICAL_PIPELINED, count) == exact


@pytest.mark.parametrize(("count", "algbw"), [(8, 164.103), (32, 169.536)])
def test_all_gathers_first_lose_where_the_ports_inside_are_the_bottleneck(count, algbw):
    levels = equal("2x8 A100")
    seconds = per_byte(levels, Family.HIERARCHICAL_PIPELINED, count, "all_gather")
    assert float(1 / seconds) == pytest.approx(algbw, abs=5e-4)
    assert seconds > per_byte(levels, Family.HIERARCHICAL_PIPELINED, count)


@pytest.mark.parametrize("name", EQUAL)
def test_one_chunk_is_the_sequential_family(name):
    levels = equal(name)
    p = CostParameters.from_levels(levels)
    for family in (Family.HIERARCHICAL_SEQUENTIAL, Family.HIERARCHICAL_PIPELINED):
        assert per_byte(levels, family) == p.intra_slope + p.inter_slope


WEIGHTED = [
    # NICs of 1, 1/2, 1/2; 4 + 2 + 2 ranks.
    ((4, 2, 2), [[1], [Fraction(1, 2)], [Fraction(1, 2)]], (1, 0, 0), Fraction(4, 3)),
    # One NIC of four at half rate.
    ((2,) * 4, [[1], [1], [1], [Fraction(1, 2)]], (1, 1, 1, 0), Fraction(3, 2)),
    ((8, 8, 8, 4), [[25] * 8] * 3 + [[25] * 4], (1, 1, 1, 0), Fraction(3, 2)),
]


@pytest.mark.parametrize(("sizes", "nics", "roots", "gain"), WEIGHTED)
def test_weighted_roots_win_what_theory_says(sizes, nics, roots, gain):
    levels = cluster(sizes, 10**9, nics)
    nodes, numel, chunks = in_order(sizes), 64 * 288, 64
    own = tuple((1,) * size for size in sizes)
    weighted, even = (
        make(Family.HIERARCHICAL_WEIGHTED, nodes, numel, chunks, 1, shards=Shards(weights, own))
        for weights in (roots, (1,) * len(sizes))
    )
    limits = [bandwidth_limit(schedule, levels) for schedule in (weighted, even)]
    assert limits[1][0] / limits[0][0] == gain
    slowest = min(sum(rates) for rates in nics)
    assert limits[0][0] / numel == Fraction(1, slowest)
    for schedule, (limit, _) in zip((weighted, even), limits, strict=True):
        assert limit < time_schedule(schedule, levels).seconds < limit * (1 + Fraction(3, chunks))


def test_every_nic_is_always_at_work_with_the_right_weights():
    levels = cluster([1] * 4, 1, [[2], [1], [1], [1]])
    schedule = make(
        Family.HIERARCHICAL_WEIGHTED,
        in_order([1] * 4),
        6400,
        64,
        1,
        shards=Shards((7, 1, 1, 1), ((1,),) * 4),
    )
    assert bandwidth_limit(schedule, levels)[0] == 6400 * Fraction(6, 5)  # 2 (n-1) / sum of C
    assert time_schedule(schedule, levels).seconds < 6400 * Fraction(6, 5) * Fraction(102, 100)


# --- closed forms ---

_TIMES = st.fractions(0, 5, max_denominator=4)


@settings(max_examples=50)
@given(
    st.integers(2, 4),
    st.integers(1, 4),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(_TIMES, _TIMES),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_pipelines_end_as_the_closed_form_says(n, g, rates, alphas, sizes):
    chunks = [144 * size for size in sizes]
    levels = cluster([g] * n, rates[0], [rates[1]], intra_latency=alphas[0], nic_latency=alphas[1])
    direct, ring = (
        make(family, in_order([g] * n), sum(chunks), chunks, 1)
        for family in (Family.HIERARCHICAL_PIPELINED, Family.HIERARCHICAL_RING)
    )
    intra = [(g - 1) * (alphas[0] + Fraction(size, g * rates[0])) for size in chunks]
    # Two nodes exchange, and wait for one message; more scatter and gather, at once or in a ring.
    for schedule, messages in ((direct, min(n - 1, 2)), (ring, 1 if n == 2 else 2 * (n - 1))):
        inter = [
            messages * alphas[1] + Fraction(2 * (n - 1) * size, n * rates[1]) for size in chunks
        ]
        seconds = time_schedule(schedule, levels).seconds
        assert seconds == end_of_chunks([intra], inter, [intra], [0] * len(inter))
    if n > 2:
        # The runtime of the default is NCCL's, whose rails are rings.
        expected = cost.rails(CostParameters.from_levels(levels)).seconds(chunks)
        assert float(seconds) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("chunks", [1, 3])
def test_leaders_end_as_the_closed_form_says(name, chunks):
    levels = equal(name)
    p = CostParameters.from_levels(levels)
    parts = [Fraction(1, chunks)] * chunks
    assert per_byte(levels, Family.HIERARCHICAL_LEADER, chunks) == cost.leaders(p).seconds(parts)


@pytest.mark.parametrize(
    "levels",
    [
        *map(equal, EQUAL),
        cluster([4, 4], 10, [1], intra_latency=1, nic_latency=100),
        cluster([1, 3, 2], 10, [[1], [2, 3], [2]], intra_latency=1, nic_latency=100),
        cluster([5], 10, [], intra_latency=1),
    ],
)
def test_the_flat_ring_ends_as_the_closed_form_says(levels):
    nodes = tuple(node.ranks for node in levels.nodes)
    numel = 4 * levels.world_size
    timing = time_schedule(make(Family.FLAT_RING, nodes, numel, 1, 1), levels)
    expected = cost.flat_ring(CostParameters.from_levels(levels), numel)
    assert float(timing.seconds) == pytest.approx(expected, rel=1e-12)


def test_a_ring_in_rank_order_over_ranks_dealt_round_robin():
    levels = Levels(
        (
            NodeLevel("a", (0, 2), rate(10), (rate(1),)),
            NodeLevel("b", (1, 3), rate(10), (rate(1),)),
        )
    )
    schedule = make(Family.FLAT_RING, ((0, 2), (1, 3)), 16, 1, 1)
    assert time_schedule(schedule, levels).seconds == 2 * (2 * 3 * 4)  # both hops share a NIC


@pytest.mark.parametrize("world", [2, 3, 8, 16])
def test_flat_families_inside_one_node(world):
    alpha, beta, numel = Fraction(3), Fraction(1, 7), 16 * world
    levels = cluster([world], 7, [], intra_latency=alpha)
    nodes = in_order([world])
    bytes_part = Fraction(2 * (world - 1), world) * numel * beta
    ring = time_schedule(make_ring(nodes, numel, 1, 1), levels)
    assert ring.seconds == 2 * (world - 1) * alpha + bytes_part
    direct = time_schedule(make(Family.DIRECT, nodes, numel, 1, 1), levels)
    assert direct.seconds == 2 * alpha + bytes_part
    if world & (world - 1) == 0:
        halving = time_schedule(make(Family.HALVING_DOUBLING, nodes, numel, 1, 1), levels)
        assert halving.seconds == 2 * int(math.log2(world)) * alpha + bytes_part


@pytest.mark.parametrize("n", [3, 4, 6, 8, 16, 64])
def test_rounds_between_nodes_take_what_theory_says(n):
    alpha, beta, numel = Fraction(3), Fraction(1, 7), 2 * 16 * n
    levels = cluster([2] * n, 10**9, [7], nic_latency=alpha)
    power = 1 << (n.bit_length() - 1)
    folds = int(power < n)
    inside = 2 * Fraction(numel, 2 * 10**9)
    to_leader = 2 * Fraction(numel, 10**9)
    ring, halving, doubling, direct = (
        time_schedule(make(family, in_order([2] * n), numel, 1, 1), levels).seconds
        for family in (
            Family.HIERARCHICAL_RING,
            Family.HIERARCHICAL_HALVING,
            Family.HIERARCHICAL_DOUBLING,
            Family.HIERARCHICAL_PIPELINED,
        )
    )
    least = Fraction(2 * (n - 1), n) * numel * beta
    assert ring == inside + 2 * (n - 1) * alpha + least
    assert direct == inside + 2 * alpha + least
    # Halves are whole elements: numel is a multiple of the largest power of two.
    rounds = int(math.log2(power))
    if numel // 2 % power == 0:
        bytes_part = (Fraction(2 * (power - 1), power) + 2 * folds) * numel * beta
        assert halving == inside + 2 * (rounds + folds) * alpha + bytes_part
    assert doubling == to_leader + (rounds + 2 * folds) * (alpha + numel * beta)


def test_a_thousand_nodes_are_timed_and_verified():
    n, alpha, numel = 1024, 1, 1024 * 4
    levels = cluster([1] * n, 1, [10], nic_latency=alpha)
    for family, seconds in (
        (Family.HIERARCHICAL_RING, 2 * 1023 + Fraction(2 * 1023, 1024 * 10) * numel),
        (Family.HIERARCHICAL_HALVING, 20 + Fraction(2 * 1023, 1024 * 10) * numel),
        (Family.HIERARCHICAL_DOUBLING, 10 + 10 * Fraction(numel, 10)),
    ):
        schedule = make(family, in_order([1] * n), numel, 1, 1)
        assert time_schedule(schedule, levels).seconds == seconds
        verify(schedule)


@pytest.mark.parametrize(("n", "share"), [(2, 1), (4, 2), (8, 2), (16, 2)])
def test_trees_of_many_chunks_are_bound_by_their_busiest_nic(n, share):
    levels = cluster([1] * n, 1, [1])
    chunks, numel = 200, 200 * 16
    schedule = make(Family.DOUBLE_BINARY_TREE, in_order([1] * n), numel, chunks, 1)
    assert bandwidth_limit(schedule, levels)[0] == share * numel
    assert time_schedule(schedule, levels).seconds < share * numel * Fraction(110, 100)


def test_trees_of_one_chunk_wait_for_their_height():
    levels = cluster([1] * 8, 1, [10**9], nic_latency=Fraction(1))
    schedule = make(Family.DOUBLE_BINARY_TREE, in_order([1] * 8), 16, 1, 1)
    # Up and down three levels; a parent of two takes one after the other.
    assert 6 < time_schedule(schedule, levels).seconds < 13


# --- laws ---


@settings(max_examples=60)
@given(st.data())
def test_no_schedule_beats_the_bound(data):
    levels = data.draw(any_levels(max_nodes=4, max_ranks=4))
    nodes = tuple(node.ranks for node in levels.nodes)
    families = list(ANY_NODES) + (list(TWO_LEVEL) if len(set(map(len, nodes))) == 1 else [])
    weight = st.integers(0, 3)
    shards = None
    family = data.draw(st.sampled_from(families))
    if family is Family.HIERARCHICAL_WEIGHTED:
        shards = Shards(
            data.draw(st.tuples(*[weight for _ in nodes]).filter(any)),
            tuple(data.draw(st.tuples(*[weight for _ in node]).filter(any)) for node in nodes),
        )
    numel, chunks = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 4))
    schedule = make(family, nodes, numel, chunks, 1, shards=shards)
    seconds = time_schedule(schedule, levels).seconds
    limit, name = bandwidth_limit(schedule, levels)
    assert seconds >= limit
    assert bool(name) == bool(schedule.steps)
    # The bound is for whole shards: cuts to whole elements may favour the slow by one each.
    bound = all_reduce_lower_bound(levels, max(0, numel - chunks * levels.world_size)).seconds
    assert seconds >= bound


@given(st.sampled_from([f for f in Family if f is not Family.HIERARCHICAL_THREE_LEVEL]))
def test_rates_scale_times(family):
    slow, fast = (cluster([4] * 3, 30 * f, [5 * f, 5 * f]) for f in (1, 7))
    assert per_byte(slow, family, 3) == 7 * per_byte(fast, family, 3)


@pytest.mark.parametrize("family", [*ANY_NODES, *TWO_LEVEL])
def test_steps_keep_their_order_and_the_critical_path_has_no_gap(family):
    levels = cluster([4, 4, 4], 30, [5, 7], intra_latency=1, nic_latency=2)
    schedule = make(family, in_order([4] * 3), 480, 4, 1)
    timing = time_schedule(schedule, levels)
    for step, time in zip(schedule.steps, timing.steps, strict=True):
        assert 0 <= time.start < time.end <= timing.seconds
        assert all(timing.steps[i].end <= time.start for i in step.after)
        assert time.last in time.ports
        assert {port.rank for port in time.ports} <= set(step.group)
    assert timing.steps[timing.critical[0]].start == 0
    assert timing.steps[timing.critical[-1]].end == timing.seconds
    for before, after in zip(timing.critical, timing.critical[1:], strict=False):
        assert timing.steps[before].start < timing.steps[after].end
    assert re.fullmatch(r"node\d's NICs|the ports of the ranks in node\d", timing.bottleneck)


def test_floats_are_as_good_as_fractions():
    exact, floats = (cluster([4, 4, 4], 3 * f, [7 * f] * 2, nic_latency=f) for f in (1, 1.0))
    schedule = make(Family.HIERARCHICAL_PIPELINED, in_order([4] * 3), 144 * 7, 7, 1)
    assert time_schedule(schedule, floats).seconds == pytest.approx(
        float(time_schedule(schedule, exact).seconds), rel=1e-12
    )


# --- what the ports are ---


def test_ranks_with_a_nic_of_their_own():
    """One NIC of four at half rate: rails in proportion to the NICs use all of them."""
    near = ((0,), (1,), (2,), (3,))
    nodes = [
        NodeLevel(f"node{i}", tuple(range(4 * i, 4 * i + 4)), rate(10**9),
                  tuple(rate(r) for r in rates), near)
        for i, rates in enumerate(([2, 2, 2, 1], [2, 2, 2, 1]))
    ]  # fmt: skip
    levels = Levels(tuple(nodes))
    even, fit = (
        make(
            Family.HIERARCHICAL_WEIGHTED,
            in_order([4, 4]),
            56,
            1,
            1,
            shards=Shards((1, 1), (weights,) * 2),
        )
        for weights in ((1, 1, 1, 1), (2, 2, 2, 1))
    )
    assert bandwidth_limit(even, levels)[0] == 14
    assert bandwidth_limit(fit, levels)[0] == 8
    assert bandwidth_limit(fit, levels)[1] == "node0's NICs"


def test_islands_have_ports_of_their_own():
    levels = Levels(
        (NodeLevel("box", (0, 1, 2, 3), rate(1), (), (), ((0, 1), (2, 3)), rate(10, latency=0)),)
    )
    flat, nested = (
        make(family, in_order([4]), 160, 1, 1, islands=islands)
        for family, islands in (
            (Family.HIERARCHICAL_PIPELINED, ()),
            (Family.HIERARCHICAL_THREE_LEVEL, ((0, 1), (2, 3))),
        )
    )
    assert time_schedule(flat, levels).seconds == 2 * 120
    timing = time_schedule(nested, levels)
    assert timing.seconds == 2 * (8 + 40)
    assert timing.bottleneck == "the ports of the ranks in box"
    fast = replace(levels.nodes[0], intra=rate(1000))
    assert "islands" in time_schedule(nested, Levels((fast,))).bottleneck


def test_racks_share_their_uplinks():
    nodes = cluster([2] * 4, 10**6, [[1, 1]] * 4).nodes
    uplink = rate(Fraction(1, 2), latency=0)
    levels = Levels(nodes, (Rack("left", (0, 1), uplink), Rack("right", (2, 3), uplink)))
    racks = ((0, 1), (2, 3))
    rails, nested = (
        make(family, in_order([2] * 4), 640, 16, 1, racks=chosen)
        for family, chosen in (
            (Family.HIERARCHICAL_PIPELINED, ()),
            (Family.HIERARCHICAL_THREE_LEVEL, racks),
        )
    )
    # Rails of whole nodes cross the uplink twice: each node sends half of what it does not own.
    assert bandwidth_limit(rails, levels) == (2 * 2 * 640, "left's uplink")
    assert bandwidth_limit(nested, levels) == (2 * 640, "left's uplink")
    assert time_schedule(nested, levels).bottleneck in ("left's uplink", "right's uplink")


def test_a_lone_rank_fills_one_nic():
    levels = cluster([4, 4], 10**6, [[1] * 4] * 2)
    leaders = make(Family.HIERARCHICAL_LEADER, in_order([4, 4]), 40, 1, 1)
    rails = make(Family.HIERARCHICAL_PIPELINED, in_order([4, 4]), 40, 1, 1)
    assert bandwidth_limit(leaders, levels)[0] == 40
    assert bandwidth_limit(rails, levels)[0] == 10


def test_nominal_rates_on_request():
    levels = cluster([1, 1], 1, [])
    nodes = tuple(replace(node, nics=(rate(4, 0, 2),)) for node in levels.nodes)
    schedule = make(Family.DIRECT, in_order([1, 1]), 8, 1, 1)
    assert time_schedule(schedule, Levels(nodes)).seconds == 2 * 2
    assert time_schedule(schedule, Levels(nodes), rate="nominal").seconds == 2


def test_nothing_to_do_takes_no_time():
    levels = cluster([2, 2], 1, [1])
    empty = make(Family.DIRECT, in_order([2, 2]), 0, 1, 1)
    assert time_schedule(empty, levels).seconds == 0
    assert bandwidth_limit(empty, levels) == (0, "")


def test_schedules_that_do_not_fit_are_refused():
    schedule = make(Family.DIRECT, in_order([2, 2]), 8, 1, 1)
    with pytest.raises(PlanError, match="for 4 ranks, the topology has 3"):
        time_schedule(schedule, cluster([2, 1], 1, [1]))
    with pytest.raises(PlanError, match="rates must be positive"):
        time_schedule(schedule, cluster([2, 2], 1.0, [0.0]))
    idle = msgspec.structs.replace(schedule.steps[0], shards=((0, 0),) * 4)
    spoiled = msgspec.structs.replace(schedule, steps=(idle, *schedule.steps[1:]))
    with pytest.raises(PlanError, match="step 0 of the schedule moves nothing"):
        time_schedule(spoiled, cluster([2, 2], 1, [1]))
