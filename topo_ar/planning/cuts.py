"""Minimum cuts of folded networks, and the exact all-gather bound from them."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topo_ar.planning.network import Network
from topo_ar.planning.symmetry import Ints, Symmetry, View

Mask = NDArray[np.bool_]

# The flow of scipy counts in 32 bits and cuts off what does not fit, without a word.
_LARGEST_FLOW = 1 << 29


def all_gather_cut(network: Network, symmetry: Symmetry) -> tuple[Fraction, Mask]:
    """Return the largest quotient |ranks in A| / B+(A) over cuts A that leave out a rank, and A.

    B+(A) is the capacity of the edges that leave A, in units of the network. The quotient rises
    by Newton's (Dinkelbach's) method from that of a single rank left out: with every capacity
    multiplied by the quotient so far, and one unit offered at each rank, a rank that cannot be
    reached by all N units shows a cut with a larger quotient. Integers only; of equal cuts the
    first is kept.
    """
    count = len(network.ranks)
    # An edge without a limit carries more than all others together, and so is in no minimum cut.
    large = network.limit * count + 1
    capacities = [large if c is None else c for c in network.capacities]
    of_orbit = [capacities[edge] for edge in symmetry.edge_first]
    entering = [0] * len(network.names)
    for head, capacity in zip(network.heads, capacities, strict=True):
        entering[head] += capacity
    tightest = min(network.ranks, key=entering.__getitem__)
    best = Fraction(count - 1, entering[tightest])
    side = np.ones(len(network.names), dtype=np.bool_)
    side[tightest] = False
    while True:
        found = None
        for view in symmetry.views:
            classes, _, counts = view.sources
            offered = _sums(classes, counts.tolist(), view.num_classes, best.denominator)
            edges = _sums(
                view.folded,
                [n * of_orbit[orbit] for n, orbit in zip(view.count, view.orbit, strict=True)],
                len(view.tails),
                best.numerator,
            )
            value, within = minimum_cut(view, edges, offered)
            if value < (count - 1) * best.denominator:
                inside = sum(int(n) for c, n in zip(classes, counts, strict=True) if within[c])
                crossing = within[view.tails[view.folded]] & ~within[view.heads[view.folded]]
                leaving = sum(
                    int(n) * of_orbit[orbit]
                    for n, orbit in zip(view.count[crossing], view.orbit[crossing], strict=True)
                )
                quotient = Fraction(inside, leaving)
                if found is None or quotient > found[0]:
                    found = quotient, within[view.class_of]
        if found is None:
            return best, side
        best, side = found


def _sums(places: Ints, values: list[int], size: int, factor: int) -> list[int]:
    totals = [0] * size
    for place, value in zip(places.tolist(), values, strict=True):
        totals[place] += int(value) * factor
    return totals


def narrowest(network: Network, side: Mask) -> Mask:
    """Return the side of the cut of least capacity that divides the ranks as `side` does.

    Capacities are rounded to about one part in 10^8 of that of `side`. Of equal cuts the one with
    the fewest vertices is returned.
    """
    tails, heads = np.array(network.tails), np.array(network.heads)
    crossing = np.flatnonzero(side[tails] & ~side[heads]).tolist()
    known = [network.capacities[edge] for edge in crossing]
    if not all(known):
        return side
    most = sum(capacity for capacity in known if capacity is not None)
    large = _LARGEST_FLOW // 2
    scale = large // 2
    capacities = [large if c is None else min(c * scale // most, large) for c in network.capacities]
    sink = len(network.names)
    offered, ends = [0] * (sink + 1), []
    for rank in network.ranks:
        if side[rank]:
            offered[rank] = large
        else:
            ends.append(rank)
    tails = np.concatenate([tails, np.array(ends, dtype=np.int64)])
    heads = np.concatenate([heads, np.full(len(ends), sink)])
    return _scipy_cut(tails, heads, capacities + [large] * len(ends), offered, sink)[1][:sink]


def minimum_cut(
    view: View, capacities: list[int], offered: list[int], *, backwards: bool = False
) -> tuple[int, Mask]:
    """Return the largest flow of what the classes offer to the view's sink, and the cut behind it.

    Parameters
    ----------
    view : View
        Classes and folded edges.
    capacities : list of int
        Of each folded edge, not negative.
    offered : list of int
        What each class can send.
    backwards : bool
        Whether flow goes from heads to tails.

    Returns
    -------
    value : int
        The flow.
    side : array of bool
        Whether each class is on the side of the sources.
    """
    total = sum(offered)
    # More than everything offered never flows through one edge.
    capacities = [min(capacity, total) for capacity in capacities]
    tails, heads = (view.heads, view.tails) if backwards else (view.tails, view.heads)
    if total <= _LARGEST_FLOW:
        return _scipy_cut(tails, heads, capacities, offered, view.sink)
    return _networkx_cut(tails, heads, capacities, offered, view.sink)


def _scipy_cut(
    tails: Ints, heads: Ints, capacities: list[int], offered: list[int], sink: int
) -> tuple[int, Mask]:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    source = len(offered)
    rows = np.concatenate([tails, np.full(source, source)])
    columns = np.concatenate([heads, np.arange(source)])
    values = np.array(capacities + offered, dtype=np.int32)
    graph = csr_array((values, (rows, columns)), shape=(source + 1, source + 1))
    result = maximum_flow(graph, source, sink)
    residual = graph - result.flow
    residual.eliminate_zeros()
    side = np.zeros(source + 1, dtype=np.bool_)
    side[breadth_first_order(residual, source, return_predecessors=False)] = True
    return int(result.flow_value), side[:source]


def _networkx_cut(
    tails: Ints, heads: Ints, capacities: list[int], offered: list[int], sink: int
) -> tuple[int, Mask]:
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph()
    source = len(offered)
    graph.add_nodes_from(range(source + 1))
    for tail, head, capacity in zip(tails.tolist(), heads.tolist(), capacities, strict=True):
        graph.add_edge(tail, head, capacity=capacity)
    for vertex, capacity in enumerate(offered):
        graph.add_edge(source, vertex, capacity=capacity)
    value, (inside, _) = nx.minimum_cut(graph, source, sink)
    side = np.zeros(source + 1, dtype=np.bool_)
    side[list(inside)] = True
    return int(value), side[:source]
