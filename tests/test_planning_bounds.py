"""Bounds on graphs against the tables of the planning notes and against independent solvers."""

import random
from fractions import Fraction
from itertools import combinations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests import planning_topologies as known
from topo_ar.errors import PlanError
from topo_ar.planning.bounds import all_gather_bound, all_reduce_bound, reduce_scatter_bound

F = Fraction

ALL_GATHER = {
    "A100 x1": (known.a100(1), F(7, 300)),
    "A100 x2": (known.a100(2), F(3, 65)),
    "A100 x4": (known.a100(4), F(3, 25)),
    "A100 x16": (known.a100(16), F(3, 5)),
    "H100 x2": (known.h100(2), F(3, 100)),
    "H100 x16": (known.h100(16), F(3, 10)),
    "MI250 x1": (known.mi250(), F(7, 150)),
    "MI250 x2": (known.mi250(2), F(15, 166)),
    "DGX-1V": (known.dgx1v(), F(7, 150)),
    "ring 8": (known.ring(8, 25), F(7, 50)),
    "mesh 4x3": (known.mesh(4, 3, 50), F(11, 100)),
    "2x4 rails": (known.nvswitch_cluster([4, 4], 300, 25), F(1, 25)),
    "2x4 mesh and rails": (known.mesh_and_rails(), F(1, 25)),
    "2x4 one NIC": (known.nvswitch_cluster([4, 4], 300, 25, one_nic=True), F(4, 25)),
    "4x4 rails": (known.nvswitch_cluster([4] * 4, 300, 25), F(3, 25)),
    "4x4 one NIC": (known.nvswitch_cluster([4] * 4, 300, 25, one_nic=True), F(12, 25)),
    "4+2 rails": (known.nvswitch_cluster([4, 2], 300, 25), F(2, 25)),
    "4+2 one NIC": (known.nvswitch_cluster([4, 2], 300, 25, one_nic=True), F(4, 25)),
}


@pytest.mark.parametrize("name", ALL_GATHER)
def test_all_gather_and_reduce_scatter_are_the_notes_exact_values(name):
    (graph, ranks), inverse = ALL_GATHER[name]
    gathered, scattered = all_gather_bound(graph, ranks), reduce_scatter_bound(graph, ranks)
    assert gathered.algbw == len(ranks) / inverse
    assert scattered.algbw == gathered.algbw
    assert (gathered.kind, scattered.kind) == ("all_gather_cut", "reduce_scatter_cut")
    inside = len(gathered.bottleneck & set(ranks))
    assert F(inside, _leaving(graph, gathered.bottleneck)) == inverse
    outside = len(set(ranks) - scattered.bottleneck)
    assert F(outside, _leaving(graph, scattered.bottleneck)) == inverse


def _leaving(graph, side):
    return sum(rate for a, b, rate in graph.edges(data="bandwidth") if a in side and b not in side)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("A100 x2", 1), ("A100 x4", 8), ("MI250 x1", 2), ("DGX-1V", 1), ("4x4 rails", 4)],
)
def test_the_bottleneck_of_an_all_gather_is_the_notes_cut(name, left_out):
    (graph, ranks), _ = ALL_GATHER[name]
    assert len(set(ranks) - all_gather_bound(graph, ranks).bottleneck) == left_out


def clusters(sizes, *options, **more):
    return known.nvswitch_cluster(sizes, *options, **more)


# Topology; algbw with plain switches, with NVLink SHARP, and with SHARP in the fabric too.
ALL_REDUCE = {
    "A100 x1": (known.a100(1), F(1200, 7), 300, 300),
    "A100 x2": (known.a100(2), F(520, 3), 200, 200),
    "A100 x4": (known.a100(4), F(400, 3), F(400, 3), 200),
    "H100 x2": (known.h100(2), F(800, 3), 400, 400),
    "MI250 x1": (known.mi250(), F(1200, 7), None, None),
    "MI250 x2": (known.mi250(2), F(32 * 166, 30), None, 182),
    "DGX-1V": (known.dgx1v(), F(600, 7), None, None),
    "mesh 4x3": (known.mesh(4, 3, 50), F(1700, 22), None, None),
    "4+2": (clusters([4, 2], 300, 25), 50, 50, 50),
    "4+2+2": (clusters([4, 2, 2], 300, 25), 50, 50, 50),
    "4+4+2": (clusters([4, 4, 2], 300, 25), 50, None, None),
    "8+8+8+4": (clusters([8, 8, 8, 4], 300, 25), 100, None, None),
    "8+4+4 one NIC": (clusters([8, 4, 4], 300, 25, one_nic=True), F(75, 4), None, None),
    "2x4 all 25": (clusters([4, 4], 25, 25), F(200, 7), F(250, 7), F(175, 4)),
    "2x4 rails": (clusters([4, 4], 300, 25), 100, None, None),
    "2x4 one NIC": (clusters([4, 4], 300, 25, one_nic=True), 25, None, None),
    "4x4 rails": (clusters([4] * 4, 300, 25), F(200, 3), None, None),
    "4x4 one NIC": (clusters([4] * 4, 300, 25, one_nic=True), F(50, 3), None, None),
    "2x4 10GbE": (clusters([4, 4], 12, F(5, 4), one_nic=True), F(5, 4), None, None),
}


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_is_the_notes_optimum_in_every_mode(name):
    (graph, ranks), plain, nvls, sharp = ALL_REDUCE[name]
    inside = known.nvswitches(graph)
    fabric = [known.FABRIC] if known.FABRIC in graph else []
    for switches, optimum in ((), plain), (inside, nvls), ([*inside, *fabric], sharp):
        if optimum is not None:
            bound = all_reduce_bound(graph, ranks, switches, switches)
            assert bound.algbw == optimum
            assert bound.tight
            assert bound.kind in ("all_reduce_lp", "all_reduce_lp_symmetric")
            assert 0 < len(bound.bottleneck & set(ranks)) < len(ranks)
            assert bound.seconds(10**6) == float(10**6 / F(optimum))


@pytest.mark.parametrize("name", ["A100 x2", "A100 x4", "4x4 one NIC", "8+4+4 one NIC"])
def test_symmetry_changes_no_bound(name):
    (graph, ranks), *_ = ALL_REDUCE[name]
    # A mark on each rank's edges that differs, and costs nothing, leaves nothing alike.
    spread = graph.copy()
    for number, rank in enumerate(ranks):
        known.both_ways(spread, rank, f"dead end {number}", number + 1)
    alike, apart = all_reduce_bound(graph, ranks), all_reduce_bound(spread, ranks)
    assert (alike.kind, apart.kind) == ("all_reduce_lp_symmetric", "all_reduce_lp")
    assert alike.algbw == apart.algbw
    assert all_gather_bound(graph, ranks).algbw == all_gather_bound(spread, ranks).algbw


def test_a_degraded_nic_is_the_bottleneck():
    graph, ranks = known.nvswitch_cluster([4] * 4, 300, 100, one_nic=True)
    known.both_ways(graph, "node2/nvswitch", known.FABRIC, 20)
    bound = all_reduce_bound(graph, ranks)
    assert bound.algbw == 20
    assert {name.split("/")[0] for name in bound.bottleneck & set(ranks)} in (
        {"node2"},
        {"node0", "node1", "node3"},
    )


def racks(count, nodes, uplink):
    graph, ranks = nx.DiGraph(), []
    for rack in range(count):
        leaf = f"leaf{rack}"
        known.both_ways(graph, leaf, "spine", uplink)
        for k in range(nodes):
            node = f"rack{rack}node{k}"
            gpus = [f"{node}/gpu{i}" for i in range(4)]
            graph.add_nodes_from([*gpus, f"{node}/nvswitch"], node=node)
            for gpu in gpus:
                known.both_ways(graph, gpu, f"{node}/nvswitch", 300)
                known.both_ways(graph, gpu, leaf, 25)
            ranks += gpus
    return graph, ranks


def test_racks_that_are_alike_fold_too():
    graph, ranks = racks(3, 2, 50)
    spread = graph.copy()
    for number, rank in enumerate(ranks):
        known.both_ways(spread, rank, f"dead end {number}", number + 1)
    folded, whole = all_reduce_bound(graph, ranks), all_reduce_bound(spread, ranks)
    assert folded.kind == "all_reduce_lp_symmetric"
    assert folded.algbw == whole.algbw == F(3 * 50, 4)


def test_thousands_of_ranks_fold_to_a_few():
    graph, ranks = racks(32, 16, 50)
    bound = all_reduce_bound(graph, ranks)
    assert bound.kind == "all_reduce_lp_symmetric"
    assert bound.algbw == F(32 * 50, 2 * 31)
    assert all_gather_bound(graph, ranks).algbw == F(32 * 50, 31)


def test_the_coarse_bound_says_so_and_holds():
    for (graph, ranks), plain, *_ in ALL_REDUCE.values():
        coarse = all_reduce_bound(graph, ranks, exact=False)
        assert coarse.kind == "all_reduce_cut"
        assert not coarse.tight
        assert coarse.algbw >= plain
    (graph, ranks), plain, *_ = ALL_REDUCE["A100 x4"]
    assert all_reduce_bound(graph, ranks, exact=False).algbw == plain


def test_too_many_ranks_that_differ_get_the_coarse_bound():
    graph, ranks = known.mesh(9, 8, 50)
    assert all_reduce_bound(graph, ranks).kind == "all_reduce_cut"


@st.composite
def links(draw, max_vertices=6, full_duplex=False):
    """A connected graph of ranks and perhaps switches, as {(a, b): capacity}."""
    count = draw(st.integers(2, max_vertices))
    num_ranks = draw(st.integers(2, count))
    rates = st.integers(1, 9)
    found = {}
    for vertex in range(1, count):
        other = draw(st.integers(0, vertex - 1))
        found[other, vertex] = draw(rates)
        found[vertex, other] = found[other, vertex] if full_duplex else draw(rates)
    pairs = [(a, b) for a in range(count) for b in range(a) if (a, b) not in found]
    for a, b in draw(st.lists(st.sampled_from(pairs), max_size=6)) if pairs else ():
        found[a, b] = draw(rates)
        if full_duplex:
            found[b, a] = found[a, b]
    return found, list(range(num_ranks))


def graph_of(found, factor=1):
    graph = nx.DiGraph()
    for (a, b), rate in found.items():
        graph.add_edge(a, b, bandwidth=rate * factor)
    return graph


@given(links(max_vertices=7))
@settings(max_examples=60)
def test_all_gather_is_the_largest_quotient_of_all_cuts(case):
    found, ranks = case
    graph = graph_of(found)
    vertices = sorted(graph)
    worst = max(
        F(len(set(side) & set(ranks)), _leaving(graph, set(side)))
        for size in range(1, len(vertices))
        for side in combinations(vertices, size)
        if set(ranks) & set(side) and not set(ranks) <= set(side)
    )
    assert all_gather_bound(graph, ranks).algbw == len(ranks) / worst


def flow_program(found, ranks, multicast=(), reducing=()):
    """The all-reduce optimum by one large program with a flow to and from every rank."""
    edges = list(found)
    m, n = len(edges), len(ranks)
    vertices = {v for edge in edges for v in edge}
    columns = n + 2 * m + 2 * n * m
    upper, limits, equal, values = [], [], [], []
    for e, edge in enumerate(edges):
        row = np.zeros(columns)
        row[n + e] = row[n + m + e] = 1
        upper.append(row)
        limits.append(found[edge])
    for kind, start in enumerate((n, n + m)):
        for t, rank in enumerate(ranks):
            flow = n + 2 * m + (2 * t + kind) * m
            for e in range(m):
                row = np.zeros(columns)
                row[flow + e], row[start + e] = 1, -1
                upper.append(row)
                limits.append(0)
            for v in vertices - {rank}:
                row = np.zeros(columns)
                for e, (a, b) in enumerate(edges):
                    row[flow + e] += ((a == v) - (b == v)) * (1 if kind == 0 else -1)
                if v in ranks:
                    row[ranks.index(v)] = -1
                equal.append(row)
                values.append(0)
        for v in vertices - set(ranks) - set((multicast, reducing)[kind]):
            row = np.zeros(columns)
            for e, (a, b) in enumerate(edges):
                row[start + e] = (b == v) - (a == v)
            equal.append(row)
            values.append(0)
    goal = np.zeros(columns)
    goal[:n] = -1
    result = linprog(goal, np.array(upper), limits, np.array(equal), values, method="highs")
    assert result.status == 0
    return -result.fun


@given(links(), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_all_reduce_is_the_optimum_of_the_program_of_flows(case, copies, adds):
    found, ranks = case
    graph = graph_of(found)
    switches = [v for v in graph if v not in ranks]
    multicast, reducing = switches if copies else [], switches if adds else []
    bound = all_reduce_bound(graph, ranks, multicast, reducing)
    assert bound.tight
    assert float(bound.algbw) == pytest.approx(
        flow_program(found, ranks, multicast, reducing), rel=1e-6
    )


@given(links(full_duplex=True))
@settings(max_examples=25)
def test_more_able_switches_only_help(case):
    found, ranks = case
    graph = graph_of(found)
    switches = [v for v in graph if v not in ranks]
    gathered, scattered = all_gather_bound(graph, ranks), reduce_scatter_bound(graph, ranks)
    composed = 1 / (1 / gathered.algbw + 1 / scattered.algbw)
    plain = all_reduce_bound(graph, ranks).algbw
    copying = all_reduce_bound(graph, ranks, switches).algbw
    both = all_reduce_bound(graph, ranks, switches, switches).algbw
    assert composed <= plain <= copying <= both
    assert plain <= all_reduce_bound(graph, ranks, exact=False).algbw
    assert both <= all_reduce_bound(graph, ranks, switches, switches, exact=False).algbw


@given(links(), st.fractions(F(1, 9), 9), st.randoms())
@settings(max_examples=30)
def test_scaling_scales_and_relabelling_changes_nothing(case, factor, shuffle):
    found, ranks = case
    names = list({v for edge in found for v in edge})
    others = [f"v{k}" for k in range(len(names))]
    shuffle.shuffle(others)
    renamed = dict(zip(names, others, strict=True))
    edges = list(found.items())
    shuffle.shuffle(edges)
    other = graph_of({(renamed[a], renamed[b]): rate for (a, b), rate in edges}, factor)
    places = [renamed[rank] for rank in ranks]
    shuffle.shuffle(places)
    for bound in all_gather_bound, reduce_scatter_bound, all_reduce_bound:
        assert bound(other, places).algbw == bound(graph_of(found), ranks).algbw * factor


@given(links(full_duplex=True), st.randoms())
@settings(max_examples=30)
def test_removing_a_link_never_helps(case, shuffle):
    found, ranks = case
    a, b = shuffle.choice(list(found))
    fewer = {edge: rate for edge, rate in found.items() if edge not in ((a, b), (b, a))}
    smaller = graph_of(fewer)
    smaller.add_nodes_from(ranks)
    try:
        cut_off = all_reduce_bound(smaller, ranks).algbw
    except PlanError:
        return
    assert cut_off <= all_reduce_bound(graph_of(found), ranks).algbw
    assert all_gather_bound(smaller, ranks).algbw <= all_gather_bound(graph_of(found), ranks).algbw


def test_rates_in_bytes_and_floats_and_fractions_agree():
    def bound(rate):
        return all_gather_bound(*known.ring(5, rate)).algbw

    assert bound(25_000_000_000) == bound(25e9) == bound(F(25 * 10**9)) == bound(np.float64(25e9))
    # A rate with all the bits of a float: too fine for flows counted in 32 bits.
    fine = 25e9 / 3
    assert bound(fine) == F(fine) * F(5, 2)
    graph, ranks = known.ring(5, fine)
    assert all_reduce_bound(graph, ranks).algbw == F(fine) * F(5, 4)


def test_links_without_a_rate_never_limit():
    graph, ranks = known.nvswitch_cluster([2, 2], 300, 25, one_nic=True)
    for rank in ranks[:2]:
        del graph[rank]["node0/nvswitch"]["bandwidth"]
    assert all_reduce_bound(graph, ranks).algbw == 25
    assert all_gather_bound(graph, ranks).algbw == 50


def nonsense():
    graph, ranks = known.ring(4, 25)
    apart = graph.copy()
    apart.add_node("alone")
    one_way = nx.DiGraph([(0, 1, {"bandwidth": 1})])
    unknown = nx.DiGraph([(0, 1), (1, 0)])
    yield graph, [0], "two ranks"
    yield graph, [], "two ranks"
    yield graph, [0, 9], "rank 1 sits on 9"
    yield graph, [0, 1, 0], "two ranks sit on 0"
    yield apart, [0, "alone"], "'alone' cannot be reached"
    yield one_way, [0, 1], "1 cannot be reached|0 cannot be reached"
    yield unknown, [0, 1], "no bandwidth is known"
    yield nx.Graph(graph), ranks, "DiGraph"
    for value in (0, -25, 0.0, float("nan"), float("inf"), "25", True):
        broken = graph.copy()
        broken[2][3]["bandwidth"] = value
        yield broken, ranks, "the link 2 -> 3 has a bandwidth of"


@pytest.mark.parametrize(("graph", "ranks", "complaint"), list(nonsense()))
def test_nonsense_is_refused_by_name(graph, ranks, complaint):
    for bound in all_gather_bound, reduce_scatter_bound, all_reduce_bound:
        with pytest.raises(PlanError, match=complaint):
            bound(graph, ranks)


@pytest.mark.parametrize(("switch", "complaint"), [("x", "not in the graph"), (0, "holds a rank")])
def test_switches_that_are_none_are_refused(switch, complaint):
    graph, ranks = known.ring(4, 25)
    with pytest.raises(PlanError, match=complaint):
        all_reduce_bound(graph, ranks, multicast=[switch])


def test_the_program_is_quick_for_32_ranks_that_all_differ():
    graph, ranks = known.a100(4)
    shuffle = random.Random(1)
    for rank in ranks:
        known.both_ways(graph, rank, known.FABRIC, 25 + shuffle.randint(0, 9))
    bound = all_reduce_bound(graph, ranks)
    assert bound.kind == "all_reduce_lp"
    total = sum(graph[rank][known.FABRIC]["bandwidth"] for rank in ranks)
    assert bound.algbw == F(total, 2 * 3)
