"""What no all-gather and no all-reduce on a graph can beat, and the cut that says so.

Nodes of a graph are ranks or switches; its edges carry ``bandwidth`` in bytes/s, one way. Integers
and fractions are taken exactly, floats as the binary numbers that they are; an edge without
``bandwidth`` is never what limits. Latency is left out (`level_bounds.latency_bound`).

References
----------
All-gather: Zhao et al., "ForestColl", 2024 (the cut bound, reached by packing trees); here found by
Newton's method on cuts. All-reduce: the linear program of `all_reduce_lp`.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from topo_ar.planning.machines import all_reduce_cut
from topo_ar.planning.network import Network, from_graph

if TYPE_CHECKING:
    import networkx as nx

GraphBoundKind = Literal[
    "all_gather_cut",
    "reduce_scatter_cut",
    "all_reduce_lp",
    "all_reduce_lp_symmetric",
    "all_reduce_cut",
]

# Beyond this the linear program takes minutes: ranks that differ, and edges over the flows to each.
MAX_LP_RANKS = 64
MAX_LP_EDGES = 60_000


@dataclass(frozen=True, slots=True)
class GraphBound:
    """The largest rate of a collective on a graph.

    Attributes
    ----------
    algbw : Fraction
        Bytes/s: total bytes gathered (or each rank's buffer, of an all-reduce) over seconds.
    bottleneck : frozenset
        The cut: the graph's nodes that its edges lead away from. Where several cuts limit
        together, the heaviest of them; of equal ones the first.
    links : frozenset of tuple
        The edges, as (tail, head), that the bound is a weighted sum of the bandwidths of: those of
        the cut, and where several cuts limit together, of all of them.
    kind : str
        ``all_gather_cut`` and ``reduce_scatter_cut`` are exact where every switch can send out as
        much as it takes in (links are full duplex), and upper limits elsewhere. ``all_reduce_lp``
        is the optimum of the linear program; ``all_reduce_lp_symmetric`` the same, with one
        variable for all that may change places. ``all_reduce_cut`` is proven, but may be out of
        reach: it knows the ports of ranks and machines only.
    tight : bool
        Whether `algbw` is the optimum of what `kind` stands for, not just an upper limit.
    """

    algbw: Fraction
    bottleneck: frozenset[Hashable]
    links: frozenset[tuple[Hashable, Hashable]]
    kind: GraphBoundKind
    tight: bool = True

    def seconds(self, nbytes: int) -> float:
        """Return the least seconds for `nbytes` bytes."""
        return float(nbytes / self.algbw)


def all_gather_bound(graph: "nx.DiGraph[Hashable]", ranks: Sequence[Hashable]) -> GraphBound:
    """Return the exact bound of an all-gather of equal parts.

    ``T = S / N * max |A and ranks| / B+(A)`` over sets A that leave out a rank: what A holds must
    leave it. Exact rational arithmetic; one maximum flow for each rank (for each orbit of ranks
    where machines are alike) and round, of which there are few.

    Raises
    ------
    PlanError
        If the graph or the ranks make no sense; the message names the node or the edge.

    Examples
    --------
    >>> import networkx as nx
    >>> ring = nx.cycle_graph(8, create_using=nx.DiGraph)
    >>> nx.set_edge_attributes(ring, 25_000_000_000, "bandwidth")
    >>> all_gather_bound(ring, range(8)).algbw == 25_000_000_000 * Fraction(8, 7)
    True
    """
    return _gather(from_graph(graph, ranks), "all_gather_cut")


def reduce_scatter_bound(graph: "nx.DiGraph[Hashable]", ranks: Sequence[Hashable]) -> GraphBound:
    """Return the exact bound of a reduce-scatter: that of an all-gather, every edge turned round.

    Raises
    ------
    PlanError
        If the graph or the ranks make no sense; the message names the node or the edge.
    """
    return _gather(from_graph(graph, ranks).reversed(), "reduce_scatter_cut")


def _gather(network: Network, kind: GraphBoundKind) -> GraphBound:
    from topo_ar.planning.cuts import all_gather_cut
    from topo_ar.planning.symmetry import find_symmetry

    quotient, side = all_gather_cut(network, find_symmetry(network))
    if kind == "reduce_scatter_cut":
        network, side = network.reversed(), ~side
    return GraphBound(
        algbw=len(network.ranks) * network.unit / quotient,
        bottleneck=_names(network, side),
        links=_crossing(network, side),
        kind=kind,
    )


def all_reduce_bound(
    graph: "nx.DiGraph[Hashable]",
    ranks: Sequence[Hashable],
    multicast: Iterable[Hashable] = (),
    reducing: Iterable[Hashable] = (),
    *,
    exact: bool = True,
) -> GraphBound:
    """Return the bound of an all-reduce in which each piece has a root.

    Parameters
    ----------
    graph : networkx.DiGraph
        Ranks and switches. The attribute ``node`` of its nodes tells which machine they are in; it
        helps to find machines that are alike.
    ranks : sequence
        The graph's nodes that hold ranks.
    multicast, reducing : iterable
        Switches that can copy a message to many, and that can add: both for NVLink SHARP in an
        NVSwitch or SHARP in an InfiniBand switch. Other switches only forward.
    exact : bool
        Whether to solve the linear program. It is solved for up to 64 ranks, and for any number
        where machines are alike and no more than 64 ranks differ.

    Raises
    ------
    PlanError
        If the graph, the ranks or the switches make no sense; the message names the node or edge.
    """
    network = from_graph(graph, ranks)
    copying = network.positions(multicast, "the multicast switch")
    adding = network.positions(reducing, "the reducing switch")
    if exact:
        from topo_ar.planning.all_reduce_lp import all_reduce_rate
        from topo_ar.planning.cuts import narrowest
        from topo_ar.planning.symmetry import find_symmetry

        symmetry = find_symmetry(network, [copying, adding])
        effort = sum(len(view.tails) for view in symmetry.views)
        if len(symmetry.views) <= MAX_LP_RANKS and effort <= MAX_LP_EDGES:
            found = all_reduce_rate(network, symmetry, copying, adding)
            if found is not None:
                return GraphBound(
                    algbw=found.rate * network.unit,
                    bottleneck=_names(network, narrowest(network, found.side)),
                    links=_links(network, found.limits),
                    kind="all_reduce_lp" if symmetry.trivial else "all_reduce_lp_symmetric",
                    tight=found.optimal,
                )
    ports = all_reduce_cut(network, copying | adding)
    limiting = frozenset(ports.links)
    return GraphBound(
        algbw=ports.rate * network.unit,
        bottleneck=frozenset(network.names[vertex] for vertex in ports.side),
        links=_links(network, [edge in limiting for edge in range(len(network.tails))]),
        kind="all_reduce_cut",
        tight=False,
    )


def _names(network: Network, side: Iterable[bool]) -> frozenset[Hashable]:
    return frozenset(name for name, inside in zip(network.names, side, strict=True) if inside)


def _crossing(network: Network, side: Iterable[bool]) -> frozenset[tuple[Hashable, Hashable]]:
    inside = [bool(vertex) for vertex in side]
    ends = zip(network.tails, network.heads, strict=True)
    return _links(network, [inside[tail] and not inside[head] for tail, head in ends])


def _links(network: Network, chosen: Iterable[bool]) -> frozenset[tuple[Hashable, Hashable]]:
    edges = zip(network.tails, network.heads, chosen, strict=True)
    return frozenset(
        (network.names[tail], network.names[head]) for tail, head, taken in edges if taken
    )
