"""Plans and schedules of every family, made without the planner; an interpreter for them."""

from itertools import accumulate, pairwise

from hypothesis import strategies as st

from topo_ar.planning.lowering import lower, lower_ring
from topo_ar.planning.lowering_nodes import LEADERS
from topo_ar.planning.plan import Family, Plan, Shards
from topo_ar.planning.schedule import Op
from topo_ar.planning.step_list import cut

TWO_LEVEL = (
    Family.HIERARCHICAL_SEQUENTIAL,
    Family.HIERARCHICAL_PIPELINED,
    Family.HIERARCHICAL_LEADER,
    Family.HIERARCHICAL_RING,
    Family.HIERARCHICAL_HALVING,
    Family.HIERARCHICAL_DOUBLING,
)
ANY_NODES = (
    Family.FLAT_RING,
    Family.DOUBLE_BINARY_TREE,
    Family.HALVING_DOUBLING,
    Family.DIRECT,
    Family.HIERARCHICAL_WEIGHTED,
)


def in_order(sizes):
    """Ranks 0, 1, ... on nodes of these sizes."""
    ends = list(accumulate(sizes))
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))


def make_plan(family, nodes, numel, chunks=1, itemsize=4, *, shards=None, islands=(), racks=()):
    """Chunks as a number of equal ones or as their sizes in elements."""
    if isinstance(chunks, int):
        chunks = [end - begin for begin, end in cut(0, numel, [1] * chunks)]
    if shards is None:
        leader = family in LEADERS
        own = tuple((1,) + (int(not leader),) * (len(node) - 1) for node in nodes)
        shards = Shards((1,) * len(nodes), own)
    return Plan(
        topology_hash="",
        world_size=sum(map(len, nodes)),
        nbytes=numel * itemsize,
        family=family,
        nodes=tuple(nodes),
        chunk_nbytes=tuple(size * itemsize for size in chunks),
        shards=shards,
        predicted_seconds=0.0,
        bound_seconds=0.0,
        wire_limit_seconds=0.0,
        gap=0.0,
        bottleneck="",
        alternatives=(),
        reason="",
        islands=islands,
        racks=racks,
    )


def make(family, nodes, numel, chunks=1, itemsize=4, **options):
    return lower(make_plan(family, nodes, numel, chunks, itemsize, **options), numel, itemsize)


def make_ring(nodes, numel, channels=1, itemsize=4):
    plan = make_plan(Family.FLAT_RING, nodes, numel, 1, itemsize)
    return lower_ring(plan, numel, itemsize, channels)


def split(draw, world):
    """Ranks 0..world-1 in any order on nodes of any sizes."""
    order = draw(st.permutations(range(world)))
    edges = sorted({0, world, *draw(st.lists(st.integers(1, world), max_size=4))})
    return tuple(tuple(order[a:b]) for a, b in pairwise(edges))


@st.composite
def any_plan(draw, max_world=16):
    """A plan of any family for 1 to 16 ranks on any nodes that suit it; numel and itemsize."""
    family = draw(st.sampled_from(list(Family)))
    shards, islands, racks = None, (), ()
    if family in ANY_NODES:
        nodes = split(draw, draw(st.integers(1, max_world)))
        if family is Family.HIERARCHICAL_WEIGHTED:
            weight = st.integers(0, 4)
            shards = Shards(
                draw(st.tuples(*[weight for _ in nodes]).filter(any)),
                tuple(draw(st.tuples(*[weight for _ in node]).filter(any)) for node in nodes),
            )
    else:
        three = family is Family.HIERARCHICAL_THREE_LEVEL
        inner = draw(st.integers(1, 3)) if three else 1
        outer = draw(st.integers(1, 4))
        width = draw(st.integers(1, max_world // (inner * outer)))
        order = draw(st.permutations(range(inner * outer * width)))
        in_racks = draw(st.booleans())
        size = width if in_racks else width * inner
        nodes = tuple(tuple(order[i : i + size]) for i in range(0, len(order), size))
        if three and in_racks:
            places = draw(st.permutations(range(len(nodes))))
            racks = tuple(tuple(places[i : i + inner]) for i in range(0, len(nodes), inner))
        elif three:
            islands = tuple(tuple(order[i : i + width]) for i in range(0, len(order), width))
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    chunks = draw(st.lists(st.integers(0, 60), max_size=4))
    numel = sum(chunks)
    options = {"shards": shards, "islands": islands, "racks": racks}
    return make_plan(family, nodes, numel, chunks, itemsize, **options), numel, itemsize


def interpret(step, data):
    """Run a step on one row for each rank; what a reduce-scatter leaves behind is spoiled."""
    group = list(step.group)
    before = data[group].copy()
    for position, (begin, end) in enumerate(step.shards):
        total = before[:, begin:end].sum(axis=0)
        if step.op == Op.ALL_GATHER:
            data[group, begin:end] = before[position, begin:end]
        elif step.op == Op.REDUCE_SCATTER:
            data[group, begin:end] = 10**6
            data[group[position], begin:end] = total
        else:
            data[group, begin:end] = total
