"""Bounds against the exact all-reduce optima (linear programs) of the planning notes."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_cases import any_levels, cluster, equal, rate
from topo_ar.errors import PlanError
from topo_ar.planning import cost
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.level_bounds import (
    all_reduce_lower_bound,
    latency_bound,
    node_bandwidth,
    node_shares,
    reduction_bound,
    share_limits,
)
from topo_ar.topology.levels import Levels, NodeLevel, Rack

S = 10**6
F = Fraction

# Exact all-reduce optimum, algbw in GB/s.
EXACT = {
    "2x4 rails": Fraction(100),
    "2x4 one nic": Fraction(25),
    "4x4 rails": Fraction(200, 3),
    "4x4 one nic": Fraction(50, 3),
    "2x8 A100": Fraction(520, 3),
    "4x8 A100": Fraction(400, 3),
    "2x8 H100": Fraction(800, 3),
    "2x4 10GbE": Fraction(5, 4),
}
# Ranks per node, 25 GB/s for each rank's NIC or one NIC a node; algbw in GB/s.
UNEQUAL = [
    ((4, 2), None, 50),
    ((4, 2, 2), None, 50),
    ((4, 4, 2), None, 50),
    ((8, 8, 8, 4), None, 100),
    ((8, 4, 4), [25], Fraction(75, 4)),
]


def algbw(levels):
    return S / all_reduce_lower_bound(levels, S).seconds


@pytest.mark.parametrize("name", EXACT)
def test_bound_is_the_exact_optimum_of_equal_nodes(name):
    assert algbw(equal(name)) == EXACT[name]


@pytest.mark.parametrize(("sizes", "nics", "optimum"), UNEQUAL)
def test_bound_is_the_exact_optimum_of_unequal_nodes(sizes, nics, optimum):
    per_node = [nics or [25] * size for size in sizes]
    assert algbw(cluster(sizes, 300, per_node)) == optimum


def test_bound_of_one_node_is_that_of_its_ports():
    assert algbw(cluster([8], 300, [])) == Fraction(1200, 7)


def test_a_node_with_half_a_nic_is_named():
    levels = cluster([2, 2, 2, 2], 300, [[50], [10], [50], [50]])
    bound = all_reduce_lower_bound(levels, S)
    assert bound.seconds == Fraction(S, 10)
    assert bound.bottleneck == "node1's NICs (1 x 10 B/s)"


def test_bottlenecks_are_named_in_words():
    def named(levels):
        return all_reduce_lower_bound(levels, S).bottleneck

    assert named(cluster([4, 4], 10**10, [125 * 10**6])) == "each node's NICs (1 x 125 MB/s)"
    assert named(cluster([4] * 4, 10**10, [125 * 10**6])) == (
        "the NICs of all nodes together (4 x 125 MB/s)"
    )
    assert named(equal("2x8 A100")) == (
        "the ports of the ranks in all nodes (inside 16 x 300 B/s, NICs 16 x 25 B/s)"
    )
    assert named(cluster([1], 1, [])) == "nothing: one rank has nobody to talk to"


def test_payload_rates_give_the_wire_limit():
    port = rate(Fraction(125), payload=Fraction(125) * Fraction(957, 1000))
    nodes = (NodeLevel("a", (0,), rate(1000), (port,)), NodeLevel("b", (1,), rate(1000), (port,)))
    ratio = (
        all_reduce_lower_bound(Levels(nodes), S, "payload").seconds
        / all_reduce_lower_bound(Levels(nodes), S).seconds
    )
    assert ratio == Fraction(1000, 957)


@given(any_levels(), st.fractions(Fraction(1, 9), 9))
def test_scaling_all_rates_scales_the_bound(levels, factor):
    def scaled(r):
        return rate(r.nominal * factor)

    faster = Levels(
        tuple(
            NodeLevel(n.name, n.ranks, scaled(n.intra), tuple(map(scaled, n.nics)))
            for n in levels.nodes
        )
    )
    bound = all_reduce_lower_bound(levels, S).seconds
    assert all_reduce_lower_bound(faster, S).seconds * factor == bound
    assert all_reduce_lower_bound(levels, 3 * S).seconds == 3 * bound


@given(any_levels(), st.randoms())
def test_relabelling_changes_nothing(levels, random):
    nodes = list(levels.nodes)
    names = list(range(levels.world_size))
    random.shuffle(nodes)
    random.shuffle(names)
    other = Levels(
        tuple(
            NodeLevel(n.name, tuple(names[r] for r in n.ranks), n.intra, n.nics[::-1])
            for n in nodes
        )
    )
    assert all_reduce_lower_bound(other, S).seconds == all_reduce_lower_bound(levels, S).seconds


@given(any_levels())
def test_no_family_beats_the_bound(levels):
    p = CostParameters.from_levels(levels)
    # A stage that does not exist costs 0.0, which makes a sum of fractions a float.
    bound = all_reduce_lower_bound(levels, S).seconds * (1 - Fraction(1, 10**12))
    assert cost.flat_ring(p, S) >= bound
    if p.ranks_per_node:
        for count in (1, 2, 7, 100):
            assert cost.rails(p).seconds([Fraction(S, count)] * count) >= bound
            if p.num_nodes > 1:
                assert cost.leaders(p).seconds([Fraction(S, count)] * count) >= bound
                assert cost.leaders(p, direct=False).seconds([Fraction(S, count)] * count) >= bound


@given(any_levels())
def test_bound_is_the_largest_over_all_ways_to_divide_nodes(levels):
    nodes = levels.nodes
    if len(nodes) == 1:
        return
    network = sum(node_bandwidth(node, "nominal") for node in nodes)
    weights = [1 / node_bandwidth(node, "nominal") for node in nodes]
    for count in range(len(nodes) + 1):
        for divided in combinations(nodes, count):
            parts = len(nodes) + sum(len(node.ranks) - 1 for node in divided)
            ports = sum(len(n.ranks) * n.intra.nominal for n in divided if len(n.ranks) > 1)
            weights.append(2 * (parts - 1) / (network + ports))
    weights += [
        1 / (node.intra.nominal + node_bandwidth(node, "nominal"))
        for node in nodes
        if len(node.ranks) > 1
    ]
    assert all_reduce_lower_bound(levels, S).seconds == S * max(weights)


@pytest.mark.parametrize(
    ("levels", "complaint"),
    [
        (Levels(()), "no ranks"),
        (Levels((NodeLevel("node0", (0, 2), rate(1), ()),)), r"\[0, 2\]"),
        (cluster([2, 2], 1, []), "node0 has no NIC"),
        (cluster([2, 2], 0.0, [1.0]), "node0's rank port"),
        (cluster([2, 2], 1.0, [[1.0], [1.0, -1.0]]), "node1's NIC 1"),
        (cluster([2, 2], 1.0, [1.0], nic_latency=-1), "node0's NIC 0"),
    ],
)
def test_nonsense_levels_are_refused_by_name(levels, complaint):
    with pytest.raises(PlanError, match=complaint):
        all_reduce_lower_bound(levels, S)


@pytest.mark.parametrize(
    ("bandwidths", "algbw", "shares"),
    [
        ([100, 50], 50, (F(1, 2), F(1, 2))),
        ([100, 50, 50], 50, (1, 0, 0)),
        ([100, 100, 50], 50, (F(1, 2), F(1, 2), 0)),
        ([200, 200, 200, 100], 100, (F(1, 3), F(1, 3), F(1, 3), 0)),
        ([25, 25, 25], F(75, 4), (F(1, 3), F(1, 3), F(1, 3))),
        ([125, F(125, 2), F(125, 2)], F(125, 2), (1, 0, 0)),
        ([50, 25, 50, 50], 25, (F(1, 3), 0, F(1, 3), F(1, 3))),
        ([50, 40, 50, 50], F(95, 3), (F(11, 38), F(5, 38), F(11, 38), F(11, 38))),
        ([7], None, (1,)),
    ],
)
def test_shares_of_unequal_nodes(bandwidths, algbw, shares):
    seconds, limits = share_limits(bandwidths)
    assert seconds == (1 / F(algbw) if algbw else 0)
    assert node_shares(bandwidths) == shares
    assert len(limits) == len(bandwidths)


@given(st.lists(st.one_of(st.integers(1, 400), st.floats(1, 1e12)), min_size=1, max_size=6))
def test_shares_tile_the_buffer_and_respect_every_node(bandwidths):
    seconds, _ = share_limits(bandwidths)
    shares = node_shares(bandwidths)
    count = len(bandwidths)
    assert sum(shares) == 1
    for share, bandwidth in zip(shares, bandwidths, strict=True):
        assert share >= 0
        if count > 1:
            assert 1 + share * (count - 2) <= F(bandwidth) * seconds
    if all(1 + F(count - 2, count) <= F(bandwidth) * seconds for bandwidth in bandwidths):
        assert set(shares) == {F(1, count)}


@pytest.mark.parametrize("bandwidths", [[], [1, 0], [1, -2.0], [float("inf"), 1], [float("nan")]])
def test_shares_of_nonsense_are_refused(bandwidths):
    with pytest.raises(PlanError, match=r"node|no nodes"):
        node_shares(bandwidths)


@st.composite
def racked_levels(draw):
    levels = draw(any_levels(max_nodes=5, max_ranks=3))
    count = len(levels.nodes)
    place = [draw(st.integers(0, 2)) for _ in range(count)]
    groups = [tuple(i for i in range(count) if place[i] == k) for k in range(3)]
    racks = [
        Rack(f"leaf{k}", group, rate(draw(st.integers(1, 400))))
        for k, group in enumerate(groups)
        if group
    ]
    return Levels(levels.nodes, tuple(racks) if len(racks) > 1 else ())


@given(racked_levels())
def test_bound_with_racks_is_the_largest_over_all_ways_to_divide(levels):
    nodes, racks = levels.nodes, levels.racks
    if len(nodes) == 1:
        return
    weights = [1 / rack.uplink.nominal for rack in racks]
    weights += [1 / node_bandwidth(node, "nominal") for node in nodes]
    weights += [
        1 / (node.intra.nominal + node_bandwidth(node, "nominal"))
        for node in nodes
        if len(node.ranks) > 1
    ]
    for whole in product([False, True], repeat=len(racks)):
        closed = {i for rack, one in zip(racks, whole, strict=True) if one for i in rack.nodes}
        uplinks = sum(rack.uplink.nominal for rack, one in zip(racks, whole, strict=True) if one)
        opened = [node for i, node in enumerate(nodes) if i not in closed]
        for divided in product([False, True], repeat=len(opened)):
            split = [node for node, one in zip(opened, divided, strict=True) if one]
            out = uplinks + sum(node_bandwidth(node, "nominal") for node in opened)
            out += sum(len(n.ranks) * n.intra.nominal for n in split if len(n.ranks) > 1)
            parts = sum(whole) + len(opened) + sum(len(node.ranks) - 1 for node in split)
            weights.append(2 * F(parts - 1) / out)
    assert all_reduce_lower_bound(levels, S).seconds == S * max(weights)


def test_the_uplinks_of_racks_are_named():
    nodes = cluster([4] * 4, 10**10, [[10**9]] * 4).nodes

    def named(*uplinks):
        racks = [
            Rack(f"leaf{k}", (2 * k, 2 * k + 1), rate(uplink)) for k, uplink in enumerate(uplinks)
        ]
        return all_reduce_lower_bound(Levels(nodes, tuple(racks)), S).bottleneck

    assert named(2 * 10**9, 10**8) == "the uplinks of leaf1 (100 MB/s together)"
    assert named(10**10, 10**10) == "the NICs of all nodes together (4 x 1 GB/s)"


@pytest.mark.parametrize(
    ("racks", "complaint"),
    [
        ([Rack("leaf0", (0,), rate(1)), Rack("leaf1", (1,), rate(0.0))], "leaf1's uplinks"),
        ([Rack("leaf0", (0,), rate(1))], "each node once"),
    ],
)
def test_nonsense_racks_are_refused(racks, complaint):
    nodes = cluster([1, 1], 1, [1]).nodes
    with pytest.raises(PlanError, match=complaint):
        all_reduce_lower_bound(Levels(nodes, tuple(racks)), S)


def test_a_rank_may_use_its_island_and_its_way_out_at_once():
    [node] = cluster([4], 100, []).nodes
    islands = replace(node, islands=((0, 1), (2, 3)), island=rate(100))
    assert all_reduce_lower_bound(Levels((islands,)), S).seconds == F(2 * 3 * S, 4 * 200)


def test_latency_and_additions_bound_too():
    assert [latency_bound(n, F(3)) for n in (1, 2, 3, 8, 9)] == [0, 3, 6, 9, 12]
    assert reduction_bound(4, 100, F(1, 5)) == 15
    assert reduction_bound(1, 100, F(1, 5)) == 0
    for nonsense in (lambda: latency_bound(0, 1), lambda: latency_bound(2, -1)):
        with pytest.raises(PlanError, match="bound nothing"):
            nonsense()
    for arguments in ((0, 1, 1), (2, -1, 1), (2, 1, float("nan"))):
        with pytest.raises(PlanError, match="bound nothing"):
            reduction_bound(*arguments)
