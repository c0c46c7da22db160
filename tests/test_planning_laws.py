"""What must hold of every cost: it is the time of its schedule, and no less than the bound."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning_cases import EQUAL, any_levels, cluster, equal, rate
from tests.schedule_cases import make
from topo_ar.planning.candidates import Setting, candidates, families_on, seconds_as_it_is
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.level_bounds import all_reduce_lower_bound
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import Runtime
from topo_ar.planning.timing import time_schedule
from topo_ar.planning.verify import verify
from topo_ar.topology.levels import Levels, Rack

# Ports alone: what a Schedule knows of.
PORTS = Runtime(max_chunk_nbytes=1 << 62, flat_hop_seconds=0.0, flat_bytes_per_s=float("inf"))
LATE = {"intra_latency": Fraction(1), "nic_latency": Fraction(10)}
CLUSTERS = {
    "2x4": cluster([4] * 2, 300, [25] * 4, **LATE),
    "4x4": cluster([4] * 4, 300, [25] * 4, **LATE),
    "4x4 one nic": cluster([4] * 4, 300, [25], **LATE),
    "4x4 slow ports": cluster([4] * 4, 30, [25] * 4, **LATE),
    "3x2": cluster([2] * 3, 300, [25] * 2, **LATE),
    "8x1": cluster([1] * 8, 300, [25], **LATE),
    "1x8": cluster([8], 300, [], **LATE),
    "4+2": cluster([4, 2], 300, [[100], [50]], **LATE),
    "4+2+2": cluster([4, 2, 2], 300, [[100], [50], [50]], **LATE),
    "4x2, one nic at half rate": cluster([2] * 4, 300, [[50], [50], [50], [25]], **LATE),
}
CHUNKED = {
    Family.HIERARCHICAL_PIPELINED,
    Family.HIERARCHICAL_WEIGHTED,
    Family.HIERARCHICAL_LEADER,
}


def setting_of(levels, runtime=PORTS):
    return Setting(CostParameters.from_levels(levels, runtime=runtime), runtime=runtime)


def cost_and_schedule(levels, family, chunks):
    setting = setting_of(levels)
    numel = 960 * levels.world_size * len(levels.nodes)
    found = next(c for c in candidates(setting, 4 * numel) if c.family == family)
    parts = (4 * numel // chunks,) * chunks
    shards = setting.weighted.shards if family == Family.HIERARCHICAL_WEIGHTED else None
    seconds = seconds_as_it_is(setting, replace(found, chunk_nbytes=parts), shards)
    nodes = tuple(node.ranks for node in levels.nodes)
    return seconds, make(family, nodes, numel, chunks, shards=shards)


CASES = [
    (name, family, chunks)
    for name, levels in CLUSTERS.items()
    for family in families_on(setting_of(levels).parameters)
    for chunks in ((1, 8) if family in CHUNKED else (1,))
    if family != Family.DOUBLE_BINARY_TREE
]


@pytest.mark.parametrize(("name", "family", "chunks"), CASES)
def test_the_cost_is_the_time_of_the_schedule(name, family, chunks):
    levels = CLUSTERS[name]
    seconds, schedule = cost_and_schedule(levels, family, chunks)
    timed = time_schedule(schedule, levels).seconds
    if family == Family.HIERARCHICAL_WEIGHTED and len(set(roots(levels))) > 1:
        # The latencies of both directions overlap in the schedule, in the cost they do not.
        assert float(timed) <= float(seconds) <= 1.1 * float(timed)
        levels = without_latency(levels)
        seconds, schedule = cost_and_schedule(levels, family, chunks)
        timed = time_schedule(schedule, levels).seconds
    assert float(seconds) == pytest.approx(float(timed), rel=1e-12)


def roots(levels):
    return setting_of(levels).weighted.shards.nodes


def without_latency(levels):
    return Levels(
        tuple(
            replace(
                node,
                intra=replace(node.intra, latency=0),
                nics=tuple(replace(nic, latency=0) for nic in node.nics),
            )
            for node in levels.nodes
        )
    )


def in_floats(levels):
    """The planner's sentences need floats; fractions are for exact comparisons."""

    def plain(port):
        return replace(
            port,
            nominal=float(port.nominal),
            payload=float(port.payload),
            latency=float(port.latency),
        )

    return Levels(
        tuple(
            replace(
                node,
                intra=plain(node.intra),
                nics=tuple(map(plain, node.nics)),
                island=plain(node.island) if node.island else None,
            )
            for node in levels.nodes
        ),
        tuple(replace(rack, uplink=plain(rack.uplink)) for rack in levels.racks),
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_cost_of_trees_is_near_the_time_of_their_schedule(name):
    levels = CLUSTERS[name]
    # Where heads do not share NICs, the messages of one chunk follow each other without a gap.
    exact = name in ("2x4", "4x4", "8x1", "1x8")
    for chunks in (1, 8):
        seconds, schedule = cost_and_schedule(levels, Family.DOUBLE_BINARY_TREE, chunks)
        timed = float(time_schedule(schedule, levels).seconds)
        if exact and chunks == 1:
            assert float(seconds) == pytest.approx(timed)
        assert 0.8 <= float(seconds) / timed <= 1.4


def with_islands(levels, size, port):
    def cut(ranks):
        return tuple(ranks[i : i + size] for i in range(0, len(ranks), size))

    return Levels(
        tuple(replace(n, islands=cut(n.ranks), island=rate(port, 1)) for n in levels.nodes)
    )


def with_racks(levels, size, uplink):
    count = len(levels.nodes)
    groups = [tuple(range(i, i + size)) for i in range(0, count, size)]
    return Levels(
        levels.nodes, tuple(Rack(f"leaf{k}", g, rate(uplink, 20)) for k, g in enumerate(groups))
    )


THREE = {
    "islands": with_islands(cluster([8] * 2, 12, [25] * 2, **LATE), 4, 300),
    "islands of one node": with_islands(cluster([8], 12, [], **LATE), 4, 300),
    "racks": with_racks(cluster([2] * 8, 300, [25] * 2, **LATE), 4, 50),
}


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("chunks", [1, 8])
def test_three_levels_are_chosen_verified_and_never_promise_too_much(name, chunks):
    levels = in_floats(THREE[name])
    made = plan(levels, 960 * 64 * 4, family=Family.HIERARCHICAL_THREE_LEVEL, runtime=PORTS)
    assert bool(made.islands) == ("islands" in name)
    assert bool(made.racks) == ("racks" in name)
    schedule = make(
        made.family, made.nodes, 960 * 64, chunks, islands=made.islands, racks=made.racks
    )
    verify(schedule)
    setting = setting_of(levels)
    parts = (made.nbytes // chunks,) * chunks
    seconds = setting.pipeline(made.family).seconds(parts)
    timed = float(time_schedule(schedule, levels).seconds)
    assert timed <= float(seconds) * (1 + 1e-9)
    assert float(seconds) <= 1.5 * timed
    chosen = plan(levels, 10**10, runtime=PORTS)
    assert chosen.family == Family.HIERARCHICAL_THREE_LEVEL


@settings(max_examples=60)
@given(any_levels(number=float), st.integers(1, 10**8))
def test_no_family_beats_the_bound_and_every_schedule_is_right(levels, nbytes):
    bound = all_reduce_lower_bound(levels, nbytes).seconds
    for found in candidates(setting_of(levels), nbytes):
        assert found.seconds >= bound * (1 - 1e-9), found
    made = plan(levels, 4 * 840, runtime=PORTS)
    if levels.world_size > 1:
        verify(lower(made, 840, 4))


def scaled(levels, factor):
    def times(port):
        return replace(port, nominal=port.nominal * factor, payload=port.payload * factor)

    return Levels(
        tuple(
            replace(node, intra=times(node.intra), nics=tuple(map(times, node.nics)))
            for node in levels.nodes
        )
    )


@settings(max_examples=40)
@given(any_levels(), st.sampled_from([2, 3, 10]))
def test_faster_ports_are_faster_in_proportion(levels, factor):
    for slow, fast in zip(
        candidates(setting_of(levels), 10**6),
        candidates(setting_of(scaled(levels, factor)), 10**6),
        strict=True,
    ):
        assert float(slow.seconds) == pytest.approx(float(fast.seconds) * factor)


@settings(max_examples=40)
@given(any_levels(number=float), st.randoms())
def test_other_numbers_of_the_ranks_change_nothing_but_torchs_own_ring(levels, random):
    names = list(range(levels.world_size))
    random.shuffle(names)
    other = Levels(
        tuple(replace(n, ranks=tuple(names[rank] for rank in n.ranks)) for n in levels.nodes)
    )
    for here, there in zip(
        candidates(setting_of(levels), 10**6), candidates(setting_of(other), 10**6), strict=True
    ):
        if here.family != Family.FLAT_RING:
            assert here.seconds == there.seconds


@settings(max_examples=40)
@given(any_levels(even=True, number=float), st.integers(1, 10**8))
def test_one_chunk_is_sequential(levels, nbytes):
    setting = setting_of(levels)
    p = setting.parameters
    if p.world_size == 1:
        return
    stages = setting.pipeline(Family.HIERARCHICAL_PIPELINED)
    g, n = p.ranks_per_node, p.num_nodes
    latency = 2 * (g - 1) * p.intra_alpha + min(n - 1, 2) * p.inter_alpha
    slope = p.intra_slope + p.inter_slope
    assert stages.seconds([nbytes]) == pytest.approx(latency + nbytes * slope)
    times = [stages.seconds([nbytes / 2**k] * 2**k) for k in range(6)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(times))
    assert times[-1] >= stages.limit_slope() * nbytes * (1 - 1e-9)


# algbw in GB/s of the exact all-reduce optimum; how far the best executable plan stays below it.
OPTIMA = {
    "2x4 rails": (100, 0.002),
    "2x4 one nic": (25, 0.002),
    "4x4 rails": (66.667, 0.002),
    "4x4 one nic": (16.667, 0.002),
    "2x8 A100": (173.333, 0.013),
    "4x8 A100": (133.333, 0.002),
    "2x8 H100": (266.667, 0.039),
    "2x4 10GbE": (1.25, 0.002),
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_chosen_plan_comes_near_the_exact_optimum(name):
    optimum, allowed = OPTIMA[name]
    made = plan(in_floats(equal(name)), 4 << 30, runtime=PORTS)
    behind = 1 - made.nbytes / float(made.predicted_seconds) / optimum
    assert -1e-5 <= behind <= allowed


@pytest.mark.parametrize(
    ("sizes", "nics", "shares", "gain"),
    [
        ([4, 2, 2], [[125e6], [62.5e6], [62.5e6]], (1, 0, 0), 4 / 3),
        ([2] * 4, [[125e6]] * 3 + [[62.5e6]], (1, 1, 1, 0), 1.5),
    ],
)
def test_weighting_wins_where_theory_says_so(sizes, nics, shares, gain):
    levels = cluster(sizes, 4e9, nics)
    made = plan(levels, 1 << 30, runtime=PORTS)
    assert made.family == Family.HIERARCHICAL_WEIGHTED
    assert made.shards.nodes == shares
    assert made.gap < 0.005
    setting = setting_of(levels)
    even = replace_nodes(made.shards, len(sizes))
    chosen = next(c for c in candidates(setting, made.nbytes) if c.family == made.family)
    assert seconds_as_it_is(setting, chosen, even) / made.predicted_seconds == pytest.approx(
        gain, rel=0.005
    )
    assert f"with equal shares the stage between nodes would take {gain:.2f} times" in made.reason
    verify(lower(made, made.nbytes // 4, 4))


def replace_nodes(shards, count):
    return type(shards)((1,) * count, shards.ranks)


@pytest.mark.parametrize(
    ("sizes", "optimum"),
    [((4, 2), 50), ((4, 2, 2), 50), ((4, 4, 2), 50), ((8, 8, 8, 4), 100)],
)
def test_unequal_nodes_reach_the_closed_form(sizes, optimum):
    levels = in_floats(cluster(sizes, 300, [[25] * size for size in sizes]))
    made = plan(levels, 4 << 30, runtime=PORTS)
    assert made.family == Family.HIERARCHICAL_WEIGHTED
    assert made.nbytes / float(made.predicted_seconds) == pytest.approx(optimum, rel=0.003)


def test_ranks_near_faster_nics_own_more():
    (first, second) = cluster([2, 2], 300, [[100, 50], [100, 50]]).nodes
    near = tuple(replace(node, rank_nics=((0,), (1,))) for node in (first, second))
    made = plan(in_floats(Levels(near)), 4 << 30, runtime=PORTS)
    assert made.family == Family.HIERARCHICAL_WEIGHTED
    assert made.shards.ranks == ((2, 1), (2, 1))
    assert made.nbytes / float(made.predicted_seconds) == pytest.approx(150, rel=0.003)
    equal_shards = next(a for a in made.alternatives if a.family == Family.HIERARCHICAL_PIPELINED)
    assert made.nbytes / float(equal_shards.seconds) == pytest.approx(100, rel=0.003)
    assert "in proportion to the NICs near them" in made.reason


def test_racks_share_their_uplinks():
    free = cluster([4] * 8, 300, [25] * 4)
    racks = with_racks(free, 4, 100)
    here, there = (
        {c.family: float(c.seconds) for c in candidates(setting_of(each), 1 << 30)}
        for each in (free, racks)
    )
    # Of 8 nodes in two racks, 4 send half of what they have over an uplink as fast as one of them.
    assert there[Family.DIRECT] == pytest.approx(here[Family.DIRECT] * 16 / 7)
    assert there[Family.FLAT_RING] == pytest.approx(here[Family.FLAT_RING])
    assert there[Family.HIERARCHICAL_PIPELINED] > 2 * here[Family.HIERARCHICAL_PIPELINED]
    third = there[Family.HIERARCHICAL_THREE_LEVEL]
    assert third == pytest.approx(here[Family.HIERARCHICAL_PIPELINED], rel=0.02)


def test_adding_costs_what_the_runtime_says():
    levels = cluster([4, 4], 300, [25] * 4)
    slow = replace(PORTS, reduce_seconds_per_byte=Fraction(1, 10))
    without, with_adding = (
        {c.family: c.seconds for c in candidates(setting_of(levels, runtime), 960)}
        for runtime in (PORTS, slow)
    )
    # (N-1) / N of the buffer is added on every rank, in one stage after the other.
    for family in (Family.FLAT_RING, Family.DIRECT, Family.HALVING_DOUBLING):
        assert with_adding[family] - without[family] == pytest.approx(960 * 0.1 * 7 / 8)
    sequential = Family.HIERARCHICAL_SEQUENTIAL
    assert with_adding[sequential] - without[sequential] == pytest.approx(96 * (3 / 4 + 1 / 8))
    assert all(with_adding[family] >= without[family] for family in without)
