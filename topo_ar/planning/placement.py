"""In which order nodes and ranks should stand, so that neighbours are near each other.

Rails join the ranks at the same place of every node, and rings go through nodes and ranks in their
order. Good places pair ranks that are near the same NIC, keep the nodes of a rack together, and
let a ring enter and leave every node and every rack once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from topo_ar.errors import PlanError
from topo_ar.topology.levels import Levels, NodeLevel

Distances = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Levels in good order, and how often a ring leaves a node or a rack before and after.

    Attributes
    ----------
    levels : Levels
        The same nodes and ranks in the order that rings and rails should use.
    ring_crossings : tuple of int
        Hops between nodes of a ring over all ranks: by number, and in the new order.
    rack_crossings : tuple of int
        The same between racks; zeros where there are none.
    rails_moved : int
        Nodes whose ranks stand in another order than that of their numbers.
    """

    levels: Levels
    ring_crossings: tuple[int, int]
    rack_crossings: tuple[int, int]
    rails_moved: int


def place(levels: Levels, distances: Distances | None = None) -> Placement:
    """Return nodes and ranks in good order; what is in good order already stays as it is.

    Parameters
    ----------
    levels : Levels
        The cluster.
    distances : sequence of sequence of float, optional
        How far rank b is from rank a, ``distances[a][b]``, in any unit, such as measured seconds
        of a small message. Neighbouring nodes are then near ones: the order begins at the first
        node, goes on to the nearest that is left, and is improved by turning round parts of it.

    Raises
    ------
    PlanError
        If `distances` is not a square of the ranks or holds a negative number or NaN.
    """
    racks = [rack.nodes for rack in levels.racks] or [tuple(range(len(levels.nodes)))]
    if distances is not None:
        near = _between_nodes(levels, distances)
        racks = [_tour(rack, near) for rack in racks]
    order = [node for rack in racks for node in rack]
    at = {node: place for place, node in enumerate(order)}
    nodes = tuple(_by_nic(levels.nodes[node]) for node in order)
    placed = Levels(
        nodes,
        tuple(
            replace(rack, nodes=tuple(sorted(at[node] for node in rack.nodes)))
            for rack in levels.racks
        ),
    )
    node_of = {rank: i for i, node in enumerate(nodes) for rank in node.ranks}
    by_number = [node_of[rank] for rank in range(levels.world_size)]
    in_order = [i for i, node in enumerate(nodes) for _ in node.ranks]
    rack_of = {node: i for i, rack in enumerate(placed.racks) for node in rack.nodes}
    return Placement(
        placed,
        (_changes(by_number), _changes(in_order)),
        (
            _changes([rack_of.get(node, 0) for node in by_number]),
            _changes([rack_of.get(node, 0) for node in in_order]),
        ),
        sum(node.ranks != levels.nodes[i].ranks for node, i in zip(nodes, order, strict=True)),
    )


def _by_nic(node: NodeLevel) -> NodeLevel:
    """Return the node with its ranks in the order of the NICs that they are near."""
    if not node.rank_nics:
        return node
    order = sorted(range(len(node.ranks)), key=lambda k: (min(node.rank_nics[k]), k))
    return replace(
        node,
        ranks=tuple(node.ranks[k] for k in order),
        rank_nics=tuple(node.rank_nics[k] for k in order),
    )


def _changes(places: Sequence[int]) -> int:
    return sum(here != there for here, there in zip(places, [*places[1:], places[0]], strict=True))


def _between_nodes(levels: Levels, distances: Distances) -> list[list[float]]:
    """Return the shortest distance between the ranks of every two nodes, there and back."""
    world = levels.world_size
    if len(distances) != world or any(len(row) != world for row in distances):
        raise PlanError(
            f"the distances are not {world} rows of {world} numbers; give one for each two ranks"
        )
    if not all(value >= 0 for row in distances for value in row):
        raise PlanError("a distance between two ranks is negative or no number; measure it again")
    return [
        [
            min(distances[a][b] + distances[b][a] for a in here.ranks for b in there.ranks)
            for there in levels.nodes
        ]
        for here in levels.nodes
    ]


def _tour(nodes: Sequence[int], near: Distances) -> tuple[int, ...]:
    """Return a short closed way through `nodes`: the nearest next, then 2-opt."""
    left = list(nodes[1:])
    way = [nodes[0]]
    while left:
        way.append(min(left, key=lambda node: (near[way[-1]][node], node)))
        left.remove(way[-1])
    size = len(way)
    better = True
    while better:
        better = False
        for i in range(size - 1):
            for j in range(i + 2, size - (i == 0)):
                a, b, c, d = way[i], way[i + 1], way[j], way[(j + 1) % size]
                if near[a][c] + near[b][d] < (near[a][b] + near[c][d]) * (1 - 1e-12):
                    way[i + 1 : j + 1] = reversed(way[i + 1 : j + 1])
                    better = True
    return tuple(way)
