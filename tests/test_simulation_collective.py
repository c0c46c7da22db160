"""Simulated all-reduces against exact event times, bounds, counted bytes and each other."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule_cases import any_plan, in_order, make, make_ring
from tests.simulation_cases import any_star, even_stars, star
from topo_ar.errors import PlanError, TopologyError
from topo_ar.planning.bounds import all_reduce_bound
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME, NCCL_RUNTIME
from topo_ar.planning.timing import time_schedule
from topo_ar.planning.traffic import bytes_sent
from topo_ar.simulation.collective import simulate
from topo_ar.topology.graph import to_networkx
from topo_ar.topology.levels import levels
from topo_ar.topology.presets import preset

# The ports alone: nothing is charged beside latency and bytes.
BARE = replace(GPU_RUNTIME, message_seconds=0.0, ring_rails=False)
ALONE = [
    Family.FLAT_RING,
    Family.HALVING_DOUBLING,
    Family.DIRECT,
    Family.HIERARCHICAL_SEQUENTIAL,
    Family.HIERARCHICAL_LEADER,
    Family.HIERARCHICAL_WEIGHTED,
]


@settings(max_examples=60)
@given(even_stars(), st.sampled_from(ALONE), st.integers(1, 5))
def test_without_contention_the_times_are_the_exact_ones(case, family, size):
    topology, n, g = case
    if n * g == 1 or (family is Family.HALVING_DOUBLING and (n * g) & (n * g - 1)):
        return
    schedule = make(family, in_order([g] * n), 16 * n * g * size)
    exact = time_schedule(schedule, levels(topology))
    found = simulate(schedule, topology, runtime=BARE)
    assert found.seconds == pytest.approx(exact.seconds, rel=1e-9)


@settings(max_examples=40)
@given(even_stars(), st.integers(1, 6))
def test_pipelines_on_a_slow_network_end_exactly_too(case, chunks):
    topology, n, g = case
    if n != 2 or g == 1:
        return
    nodes = in_order([g] * n)
    schedule = make(Family.HIERARCHICAL_PIPELINED, nodes, 16 * n * g * chunks, chunks)
    known = levels(topology)
    exact = time_schedule(schedule, known)
    found = simulate(schedule, topology, runtime=BARE)
    node = known.nodes[0]
    inside = 2 * (g - 1) / (g * node.intra.payload)
    if 1 / node.nics[0].payload >= 2 * inside and node.intra.latency == 0:
        assert found.seconds == pytest.approx(exact.seconds, rel=1e-9)
    # Where both ways share the ports inside, fair shares end no later than turns and half a turn.
    assert found.seconds <= exact.seconds * 1.5


@pytest.mark.parametrize(
    ("nodes", "chunks", "seconds"),
    [(2, 1, 13 / 1200), (2, 2, 19 / 2400), (4, 1, 1 / 75), (4, 2, 1 / 96), (4, 4, 43 / 4800)],
)
def test_chunks_of_two_and_four_a100_end_as_the_notes_say(nodes, chunks, seconds):
    topology = star([8] * nodes, 300, [200])
    schedule = make(
        Family.HIERARCHICAL_PIPELINED, in_order([8] * nodes), 64 * nodes * chunks, chunks, 1
    )
    found = simulate(schedule, topology, runtime=BARE)
    assert found.seconds / schedule.numel == pytest.approx(seconds, rel=1e-9)


@st.composite
def jobs(draw):
    made, numel, itemsize = draw(any_plan(max_world=9))
    schedule = lower(made, numel, itemsize)
    order = sorted(made.nodes, key=min)
    return schedule, draw(any_star([len(node) for node in order])), order


def placed(topology, nodes):
    """Seat the ranks as the plan's nodes say."""
    seats = {rank: f"node{i}/gpu{k}" for i, node in enumerate(nodes) for k, rank in enumerate(node)}
    return msgspec.structs.replace(topology, ranks=tuple(seats[r] for r in range(len(seats))))


@settings(max_examples=80)
@given(jobs())
def test_folding_is_exact_and_bytes_are_those_of_the_schedule(job):
    schedule, topology, nodes = job
    topology = placed(topology, nodes)
    known = levels(topology)
    folded = simulate(schedule, topology, runtime=BARE)
    whole = simulate(schedule, topology, runtime=BARE, fold=False)
    assert folded.seconds == pytest.approx(whole.seconds, rel=1e-9)
    traffic = bytes_sent(schedule, [node.ranks for node in known.nodes])
    assert folded.sent_inside == pytest.approx(traffic.sent_inside)
    assert folded.sent_between == pytest.approx(traffic.sent_between)
    # What the links carried, as counted while flows went on.
    for far, kind, sent in (
        (True, "infiniband", traffic.sent_between),
        (False, "nvlink", traffic.sent_inside),
    ):
        carried = sum(u.nbytes * u.count for u in folded.links if u.kind == kind)
        assert carried == pytest.approx(2 * sum(sent))  # out of a port and into another
        assert {u.between_nodes for u in folded.links if u.kind == kind} <= {far}
    assert all(use.busy <= 1 + 1e-9 for use in folded.links)


@settings(max_examples=30)
@given(jobs())
def test_nothing_is_faster_than_the_exact_bound(job):
    schedule, topology, nodes = job
    if schedule.world_size == 1 or not schedule.numel:
        return
    topology = placed(topology, nodes)
    graph = to_networkx(topology)
    for _, _, edge in graph.edges(data=True):
        edge["bandwidth"] = round(edge.get("bandwidth", 10**6))
    bound = all_reduce_bound(graph, list(topology.ranks))
    seconds = simulate(schedule, topology, runtime=BARE).seconds
    nbytes = schedule.numel * schedule.itemsize
    assert seconds >= nbytes / float(bound.algbw) * (1 - 1e-9)


def test_a_ring_that_crosses_at_every_step_pays_for_it():
    # Four ranks of a node send through one NIC at once instead of one.
    topology = star([4, 4], 1000, [1])
    schedule = make(Family.FLAT_RING, in_order([8]), 64)
    dealt = msgspec.structs.replace(
        topology, ranks=tuple(f"node{r % 2}/gpu{r // 2}" for r in range(8))
    )
    good, bad = (simulate(schedule, t, runtime=BARE).seconds for t in (topology, dealt))
    assert bad == pytest.approx(4 * good)


def test_an_oversubscribed_fabric_is_where_rings_beat_direct_messages():
    schedule = None
    seconds = {}
    for fabric, over in (("non-blocking", None), ("leaf-spine", 4)):
        topology = preset(
            "cpu-host", 4, fabric=fabric, oversubscription=over, nodes_per_leaf=over and 2
        )
        made = plan(levels(topology), 1 << 22, family=Family.HIERARCHICAL_PIPELINED)
        schedule = lower(made, 1 << 20, 4)
        seconds[fabric] = simulate(schedule, topology, runtime=CPU_RUNTIME).seconds
        again = simulate(schedule, topology, runtime=NCCL_RUNTIME).seconds
        if over:
            assert again < seconds[fabric]
    # An uplink carries half a NIC's rate for two nodes, each of which sends 2/3 of it up.
    assert seconds["leaf-spine"] > 2 * seconds["non-blocking"]


def test_what_a_runtime_costs_is_charged():
    topology = star([2, 2], 100.0, [10.0])
    schedule = make(Family.HIERARCHICAL_SEQUENTIAL, in_order([2, 2]), 400, 1, 1)
    bare = simulate(schedule, topology, runtime=BARE).seconds
    calls = simulate(schedule, topology, runtime=replace(BARE, call_seconds=7.0)).seconds
    assert calls == pytest.approx(bare + 3 * 7)
    adding = replace(BARE, reduce_seconds_per_byte=0.5)
    # Half of the buffer is added inside, then a quarter again from the other node's rank.
    assert simulate(schedule, topology, runtime=adding).seconds == pytest.approx(
        bare + 0.5 * 200 + 0.5 * 200
    )
    flat = make(Family.FLAT_RING, in_order([2, 2]), 400, 1, 1)
    slow = replace(BARE, flat_bytes_per_s=5.0, flat_hop_seconds=3.0)
    assert simulate(flat, topology, runtime=slow).seconds == pytest.approx(6 * 100 / 5 + 6 * 3)


def test_rings_of_messages_run_side_by_side():
    topology = star([1] * 3, 100, [30])
    schedule = make_ring(in_order([1] * 3), 300, itemsize=1)
    seconds = simulate(schedule, topology, runtime=BARE).seconds
    assert seconds == pytest.approx(2 * 2 / 3 * 300 / 30)


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx-a100", "mi250x-16gcd", "ws-2x3090"])
def test_presets_can_be_simulated(name):
    topology = preset(name)
    known = levels(topology)
    made = plan(known, 1 << 24, runtime=GPU_RUNTIME, family=Family.HIERARCHICAL_PIPELINED)
    schedule = lower(made, 1 << 22, 4)
    found = simulate(schedule, topology, runtime=GPU_RUNTIME)
    # Where an island is a mesh or a switch the ports of the levels are its links.
    if not known.nodes[0].islands:
        assert found.seconds == pytest.approx(time_schedule(schedule, known).seconds, rel=1e-9)
    assert found.seconds >= made.bound_seconds


def test_what_cannot_be_simulated_is_said():
    topology = star([2], 1, [1])
    with pytest.raises(PlanError, match="3 ranks, the topology has 2"):
        simulate(make(Family.FLAT_RING, in_order([3]), 3), topology)
    cut = msgspec.structs.replace(
        star([1, 1], 1, [1]),
        links=tuple(x for x in star([1, 1], 1, [1]).links if x.a != "node1/nic0"),
    )
    with pytest.raises(TopologyError, match="nic0"):
        simulate(make(Family.FLAT_RING, in_order([1, 1]), 4), cut)
