"""The order of nodes and ranks: rails near NICs, racks together, rings that cross once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_cases import any_levels, cluster, rate
from topo_ar.errors import PlanError
from topo_ar.execution.program import compile_program
from topo_ar.planning.lowering import lower
from topo_ar.planning.placement import place
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.topology.levels import Levels, Rack


def dealt(levels, ranks):
    return replace(
        levels,
        nodes=tuple(replace(n, ranks=r) for n, r in zip(levels.nodes, ranks, strict=True)),
    )


def test_what_is_in_good_order_stays():
    levels = cluster([4, 4, 2], 4e9, [125e6])
    placement = place(levels)
    assert placement.levels == levels
    assert placement.ring_crossings == (3, 3)
    assert placement.rack_crossings == (0, 0)
    assert placement.rails_moved == 0


def test_ranks_dealt_round_robin_are_told_what_a_better_order_gains():
    levels = dealt(cluster([2, 2], 4e9, [125e6]), [(0, 2), (1, 3)])
    assert place(levels).ring_crossings == (4, 2)
    reason = plan(levels, 25_000_000).reason
    assert "from node to node 4 times, one through the ranks node by node 2 times" in reason
    assert "2.00 times the bytes out of the nodes" in reason
    assert "--distribution=block" in reason
    assert "from node to node" not in plan(cluster([2, 2], 4e9, [125e6]), 25_000_000).reason


def test_rails_pair_ranks_near_the_same_nic():
    first, second = cluster([4, 4], 4e9, [125e6, 125e6]).nodes
    levels = Levels(
        (
            replace(first, rank_nics=((0,), (0,), (1,), (1,))),
            replace(second, rank_nics=((1,), (0,), (1,), (0,))),
        )
    )
    made = plan(levels, 25_000_000, family=Family.HIERARCHICAL_PIPELINED)
    assert made.nodes == ((0, 1, 2, 3), (5, 7, 4, 6))
    assert "In 1 of 2 nodes the ranks stand in the order of their NICs" in made.reason
    # The runtime knows ranks of a node by number: rank 4 is its first.
    schedule = lower(made, made.nbytes // 4, 4)
    chunk = compile_program(schedule, 4, 2 << 20)[0]
    assert chunk.segments[0].rail == (2, 4)
    assert chunk.owners == (0, 1, 2, 3)
    leader = plan(levels, 4096, family=Family.HIERARCHICAL_LEADER)
    assert compile_program(lower(leader, 1024, 4), 4, 2 << 20)[0].owners == (1,)


def test_nodes_of_a_rack_stand_together():
    levels = cluster([2] * 4, 4e9, [125e6])
    racks = (Rack("leaf0", (0, 2), rate(2e8)), Rack("leaf1", (1, 3), rate(2e8)))
    placement = place(replace(levels, racks=racks))
    assert [node.name for node in placement.levels.nodes] == ["node0", "node2", "node1", "node3"]
    assert [rack.nodes for rack in placement.levels.racks] == [(0, 1), (2, 3)]
    assert placement.rack_crossings == (4, 2)
    reason = plan(replace(levels, racks=racks), 25_000_000).reason
    assert "from rack to rack 2 times, by rank number 4 times" in reason


def test_distances_put_near_nodes_next_to_each_other():
    levels = cluster([2] * 6, 4e9, [125e6])
    # On a circle: nodes 0, 3, 1, 4, 2, 5.
    at = dict(zip([0, 3, 1, 4, 2, 5], range(6), strict=True))

    def far(a, b):
        steps = abs(at[a // 2] - at[b // 2])
        return min(steps, 6 - steps)

    distances = [[far(a, b) for b in range(12)] for a in range(12)]
    order = [int(node.name[4:]) for node in place(levels, distances).levels.nodes]
    hops = [far(2 * a, 2 * b) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
    assert hops == [1] * 6


@pytest.mark.parametrize(
    ("distances", "complaint"),
    [([[0]], "not 4 rows of 4"), ([[-1.0] * 4] * 4, "negative"), ([[float("nan")] * 4] * 4, "neg")],
)
def test_distances_that_cannot_be(distances, complaint):
    with pytest.raises(PlanError, match=complaint):
        place(cluster([2, 2], 1e9, [1e9]), distances)


@given(any_levels(), st.randoms())
def test_the_order_holds_every_rank_once_and_never_crosses_more(levels, random):
    world = levels.world_size
    distances = [[random.random() for _ in range(world)] for _ in range(world)]
    for given_distances in (None, distances):
        placement = place(levels, given_distances)
        placed = [rank for node in placement.levels.nodes for rank in node.ranks]
        assert sorted(placed) == list(range(world))
        before, after = placement.ring_crossings
        assert after <= before
        assert after == (len(levels.nodes) if len(levels.nodes) > 1 else 0)
