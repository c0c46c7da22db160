"""What each family lowers to, and the bytes that it moves."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule_cases import TWO_LEVEL, any_plan, in_order, make, make_plan, make_ring
from topo_ar.errors import PlanError
from topo_ar.planning.lowering import lower, lower_ring
from topo_ar.planning.lowering_tree import tree_parents
from topo_ar.planning.plan import Family, Shards
from topo_ar.planning.schedule import Op, Stage
from topo_ar.planning.traffic import bytes_sent


def traffic(family, sizes, numel, chunks=1, **options):
    nodes = in_order(sizes)
    return bytes_sent(make(family, nodes, numel, chunks, 1, **options), nodes)


def sent(counted):
    return [a + b for a, b in zip(counted.sent_inside, counted.sent_between, strict=True)]


# --- flat ---


@pytest.mark.parametrize("sizes", [(1, 1), (3,), (2, 2), (4, 1), (8,), (4, 4)])
def test_a_ring_moves_twice_the_buffer_less_two_blocks(sizes):
    world, nodes = sum(sizes), in_order(sizes)
    numel = 6 * world
    ring = bytes_sent(make_ring(nodes, numel, 1, 1), nodes)
    assert sent(ring) == [2 * (world - 1) * 6] * world
    assert ring == bytes_sent(make(Family.FLAT_RING, nodes, numel, 1, 1), nodes)
    if len(sizes) > 1:
        assert ring.node_sent == ring.node_received == (2 * (world - 1) * 6,) * len(sizes)


def test_every_channel_of_a_ring_leaves_the_node_at_another_rank():
    schedule = make_ring(in_order([4, 4]), 320, 4)
    leaving = {(s.chunk, s.group[0]) for s in schedule.steps if s.group[0] < 4 <= s.group[1]}
    assert leaving == {(0, 3), (1, 0), (2, 1), (3, 2)}
    counted = bytes_sent(schedule, in_order([4, 4]))
    assert len(set(counted.sent_between)) == 1
    assert counted.node_sent == (2 * 7 * 40 * 4,) * 2


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (4, 4), (2, 2, 2, 2), (16,), (4, 4, 4, 4)])
def test_halving_doubling_keeps_large_halves_inside_nodes(sizes):
    world, nodes = sum(sizes), len(sizes)
    numel = 6 * world
    counted = traffic(Family.HALVING_DOUBLING, sizes, numel)
    assert sent(counted) == [2 * (world - 1) * 6] * world
    # As little as a hierarchy: 2 (n-1) / n of the buffer leaves each node.
    assert set(counted.node_sent) == {2 * (nodes - 1) * numel // nodes}
    steps = make(Family.HALVING_DOUBLING, in_order(sizes), numel).steps
    assert len(steps) == world * int(math.log2(world))


def test_halving_doubling_folds_surplus_ranks_first():
    steps = make(Family.HALVING_DOUBLING, in_order([6]), 48).steps
    assert [(s.stage, s.group) for s in steps[:4]] == [
        (Stage.FOLD, (1, 0)),
        (Stage.FOLD, (3, 2)),
        (Stage.HALVING, (0, 2)),
        (Stage.HALVING, (4, 5)),
    ]
    assert [(s.stage, s.group) for s in steps[-2:]] == [
        (Stage.UNFOLD, (0, 1)),
        (Stage.UNFOLD, (2, 3)),
    ]


def test_direct_sends_to_everybody():
    counted = traffic(Family.DIRECT, [2, 2, 2], 60)
    assert sent(counted) == [2 * 5 * 10] * 6
    assert counted.sent_between == (2 * 4 * 10,) * 6


# --- tree ---


@pytest.mark.parametrize("size", [*range(1, 18), 31, 32, 33, 100])
def test_two_trees_complement_each_other(size):
    inner = []
    for tree in (0, 1):
        parents = tree_parents(size, tree)
        assert parents.count(None) == 1
        for position in range(size):
            seen = [position]
            while (parent := parents[seen[-1]]) is not None:
                seen.append(parent)
                assert len(seen) <= size
            assert len(seen) - 1 <= math.log2(size)
        above = [parent for parent in parents if parent is not None]
        assert all(above.count(parent) <= 2 for parent in above)
        inner.append(set(above))
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("sizes", [(1,) * 2, (1,) * 5, (1,) * 8, (5,), (4, 4), (3, 1, 2), (4,) * 8])
def test_a_tree_moves_at_most_twice_the_buffer_through_a_port(sizes):
    numel = 240
    counted = traffic(Family.DOUBLE_BINARY_TREE, sizes, numel, 4)
    assert max(counted.sent_inside) <= 2 * numel
    assert max(counted.node_sent, default=0) <= 2 * numel
    # A tree has as few messages as there can be: 2 (N-1) S in all.
    assert sum(sent(counted)) == 2 * (sum(sizes) - 1) * numel


def test_on_two_nodes_the_trees_cross_once_each_way():
    counted = traffic(Family.DOUBLE_BINARY_TREE, [4, 4], 320, 4)
    assert counted.node_sent == counted.node_received == (320, 320)
    assert counted.sent_between == (80,) * 8  # the heads take turns


def test_tree_of_three_ranks():
    steps = make(Family.DOUBLE_BINARY_TREE, in_order([1, 1, 1]), 8).steps
    assert [(s.op, s.group, s.shards[0], s.after) for s in steps[:4]] == [
        (Op.REDUCE_SCATTER, (0, 1), (0, 0), ()),
        (Op.REDUCE_SCATTER, (2, 1), (0, 0), (0,)),
        (Op.ALL_GATHER, (1, 2), (0, 4), (1,)),
        (Op.ALL_GATHER, (1, 0), (0, 4), (1,)),
    ]
    assert len(steps) == 8


# --- hierarchies ---


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2), (3,) * 4, (1, 1, 1)])
def test_two_levels_move_what_each_level_must(sizes):
    n, g, numel = len(sizes), sizes[0], 24 * sum(sizes)
    counted = traffic(Family.HIERARCHICAL_PIPELINED, sizes, numel, 2)
    assert set(counted.sent_inside) == {2 * (g - 1) * numel // g}
    assert set(counted.node_sent) == set(counted.node_received) == {2 * (n - 1) * numel // n}


def test_leaders_send_the_buffer_to_every_other():
    counted = traffic(Family.HIERARCHICAL_LEADER, [4, 4, 4], 120)
    assert counted.node_sent == (2 * 120,) * 3
    assert counted.sent_between == (240, 0, 0, 0) * 3


@pytest.mark.parametrize(
    ("sizes", "roots"),
    [
        ((4, 2, 2), (1, 0, 0)),
        ((4, 2, 2), (1, 1, 1)),
        ((2, 2, 2, 2), (1, 1, 1, 0)),
        ((8, 8, 8, 4), (2, 2, 2, 0)),
        ((1, 3, 2), (3, 2, 1)),
        ((3, 2), (1, 1)),
    ],
)
def test_weighted_nodes_send_and_receive_their_share(sizes, roots):
    """Egress = ingress = S [1 + w_i (n-2)]."""
    n, numel = len(sizes), 240 * sum(roots)
    shards = Shards(roots, tuple((1,) * size for size in sizes))
    counted = traffic(Family.HIERARCHICAL_WEIGHTED, sizes, numel, shards=shards)
    expected = tuple(numel * (1 + Fraction(w, sum(roots)) * (n - 2)) for w in roots)
    assert counted.node_sent == expected
    assert counted.node_received == expected


def test_ranks_of_a_node_send_by_their_weights():
    shards = Shards((1, 1), ((2, 1, 1), (1, 0)))
    counted = traffic(Family.HIERARCHICAL_WEIGHTED, [3, 2], 80, shards=shards)
    assert counted.sent_between == (40, 20, 20, 80, 0)


def test_rails_join_the_owners_of_every_interval():
    steps = make(Family.HIERARCHICAL_WEIGHTED, in_order([4, 2, 1]), 80).steps
    scattered = [step for step in steps if step.stage is Stage.INTER_REDUCE_SCATTER]
    assert [(s.group, s.shards[0][0], s.shards[-1][1]) for s in scattered] == [
        ((0, 4, 6), 0, 20),
        ((1, 4, 6), 20, 40),
        ((2, 5, 6), 40, 60),
        ((3, 5, 6), 60, 80),
    ]
    inside = [step.group for step in steps if step.stage is Stage.INTRA_REDUCE_SCATTER]
    assert inside == [(0, 1, 2, 3), (4, 5)]


def test_neighbouring_intervals_of_one_rail_are_one_step():
    shards = Shards((1, 1), ((1, 0, 1), (1, 1)))
    steps = make(Family.HIERARCHICAL_WEIGHTED, in_order([3, 2]), 80, shards=shards).steps
    rails = [step for step in steps if step.op is Op.EXCHANGE]
    assert [(step.group, step.shards[0]) for step in rails] == [
        ((0, 3), (0, 40)),
        ((2, 4), (40, 80)),
    ]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 300), st.integers(1, 3))
def test_equal_weights_on_equal_nodes_are_the_pipelined_family(n, g, numel, chunks):
    nodes = in_order([g] * n)
    pipelined = make(Family.HIERARCHICAL_PIPELINED, nodes, numel, chunks)
    assert make(Family.HIERARCHICAL_WEIGHTED, nodes, numel, chunks).steps == pipelined.steps


def test_islands_are_the_innermost_level():
    islands = ((0, 1), (2, 3), (4, 5), (6, 7))
    nodes = in_order([4, 4])
    schedule = make(Family.HIERARCHICAL_THREE_LEVEL, nodes, 80, islands=islands)
    assert [(s.stage, s.group) for s in schedule.steps[:7]] == [
        *((Stage.ISLAND_REDUCE_SCATTER, island) for island in islands),
        (Stage.INTRA_REDUCE_SCATTER, (0, 2)),
        (Stage.INTRA_REDUCE_SCATTER, (4, 6)),
        (Stage.INTER_EXCHANGE, (0, 4)),
    ]
    across = bytes_sent(schedule, islands)
    assert set(across.node_sent) == {
        4 * (80 + 40)
    }  # across the islands of the node, and to the other
    assert bytes_sent(schedule, nodes).node_sent == (4 * 80,) * 2


def test_racks_are_the_outermost_level():
    racks = ((0, 2), (1, 3))
    nodes = in_order([2] * 4)
    schedule = make(Family.HIERARCHICAL_THREE_LEVEL, nodes, 80, racks=racks)
    assert [(s.stage, s.group) for s in schedule.steps[4:8]] == [
        (Stage.RACK_REDUCE_SCATTER, (0, 4)),
        (Stage.RACK_REDUCE_SCATTER, (2, 6)),
        (Stage.INTER_EXCHANGE, (0, 2)),
        (Stage.INTER_EXCHANGE, (4, 6)),
    ]
    in_racks = bytes_sent(schedule, [nodes[0] + nodes[2], nodes[1] + nodes[3]])
    assert in_racks.node_sent == (4 * 80,) * 2  # once, where rails of whole nodes send 1.5 times
    assert bytes_sent(schedule, nodes).node_sent == (4 * 120,) * 4


def test_many_racks_reduce_scatter_between_them():
    racks = ((0, 1), (2, 3), (4, 5))
    steps = make(Family.HIERARCHICAL_THREE_LEVEL, in_order([1] * 6), 90, racks=racks).steps
    assert [s.stage for s in steps] == [
        *[Stage.RACK_REDUCE_SCATTER] * 3,
        *[Stage.INTER_REDUCE_SCATTER, Stage.INTER_ALL_GATHER] * 2,
        *[Stage.RACK_ALL_GATHER] * 3,
    ]


# --- all ---


@given(any_plan())
def test_what_is_sent_is_received_and_is_enough(case):
    plan, numel, itemsize = case
    schedule = lower(plan, numel, itemsize)
    counted = bytes_sent(schedule, plan.nodes)
    assert sum(counted.sent_inside) == sum(counted.received_inside)
    assert sum(counted.sent_between) == sum(counted.received_between)
    assert sum(sent(counted)) >= 2 * (plan.world_size - 1) * plan.nbytes
    if len(plan.nodes) > 1:
        assert min(counted.node_sent) >= plan.nbytes
        assert min(counted.node_received) >= plan.nbytes
    assert {step.chunk for step in schedule.steps} <= set(range(len(plan.chunk_nbytes)))


EQUAL_NODES = in_order([2, 2])
ISLANDS = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("family", "nodes", "options", "complaint"),
    [
        *(
            (family, in_order([2, 1]), {}, "nodes of equal numbers of ranks")
            for family in TWO_LEVEL
        ),
        (
            Family.HIERARCHICAL_PIPELINED,
            EQUAL_NODES,
            {"shards": Shards((1, 1), ((1, 2), (1, 1)))},
            "the same shares in every node; use hierarchical_weighted",
        ),
        (
            Family.HIERARCHICAL_WEIGHTED,
            EQUAL_NODES,
            {"shards": Shards((1, 1), ((1, 2), (1,)))},
            "its nodes have",
        ),
        (
            Family.HIERARCHICAL_WEIGHTED,
            EQUAL_NODES,
            {"shards": Shards((1,), ((1, 2), (1, 1)))},
            "for 1 nodes",
        ),
        (
            Family.HIERARCHICAL_WEIGHTED,
            EQUAL_NODES,
            {"shards": Shards((1, 1), ((1, -2), (1, 1)))},
            "negative weight",
        ),
        (
            Family.HIERARCHICAL_WEIGHTED,
            EQUAL_NODES,
            {"shards": Shards((0, 0), ((1, 1), (1, 1)))},
            "nothing but zeros",
        ),
        (Family.HIERARCHICAL_THREE_LEVEL, EQUAL_NODES, {}, "either islands or racks"),
        (
            Family.HIERARCHICAL_THREE_LEVEL,
            EQUAL_NODES,
            {"islands": ISLANDS, "racks": ((0, 1),)},
            "either islands or racks",
        ),
        (Family.HIERARCHICAL_THREE_LEVEL, in_order([2, 1]), {"islands": ISLANDS}, "equal numbers"),
        (
            Family.HIERARCHICAL_THREE_LEVEL,
            EQUAL_NODES,
            {"islands": ((0,), (1,), (2, 3))},
            r"islands have \[1, 1, 2\] members",
        ),
        (Family.HIERARCHICAL_THREE_LEVEL, EQUAL_NODES, {"islands": ((0, 1),)}, "each of 0..3 once"),
        (
            Family.HIERARCHICAL_THREE_LEVEL,
            EQUAL_NODES,
            {"islands": ((0, 2), (1, 3))},
            r"island \[0, 2\] lies in more than one node",
        ),
        (
            Family.HIERARCHICAL_THREE_LEVEL,
            EQUAL_NODES,
            {"islands": ISLANDS, "shards": Shards((1, 1), ((1, 2), (1, 2)))},
            "equal shares",
        ),
        (
            Family.HIERARCHICAL_THREE_LEVEL,
            in_order([1] * 3),
            {"racks": ((0, 1), (2,))},
            r"racks have \[2, 1\] members",
        ),
        (Family.DIRECT, ((0, 1), (1, 2)), {}, "each of 0..3 once"),
        (Family.DIRECT, ((0, 1), ()), {}, "none may be empty"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(family, nodes, options, complaint):
    with pytest.raises(PlanError, match=complaint):
        lower(make_plan(family, nodes, 40, **options), 40, 4)


def test_a_ring_is_for_the_plan_s_buffer():
    with pytest.raises(PlanError, match="plan is for 160 bytes"):
        lower_ring(make_plan(Family.FLAT_RING, EQUAL_NODES, 40), 41, 4)
    with pytest.raises(PlanError, match="at least one channel"):
        make_ring(EQUAL_NODES, 40, 0)
