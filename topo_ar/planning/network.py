"""A directed graph with bandwidths as exact integers: what the bounds on graphs compute with."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import TYPE_CHECKING

from topo_ar.errors import PlanError

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Vertices by position, edges by position, and capacities in whole multiples of `unit`.

    Attributes
    ----------
    names : tuple
        The graph's name of each vertex.
    ranks : tuple of int
        The vertices that hold ranks, in rank order.
    machines : tuple
        The attribute ``node`` of each vertex; None where it has none.
    tails, heads : tuple of int
        The ends of each edge.
    capacities : tuple of int or None
        None for an edge without ``bandwidth``: it is never what limits.
    unit : Fraction
        Bytes/s of one unit of capacity.
    """

    names: tuple[Hashable, ...]
    ranks: tuple[int, ...]
    machines: tuple[Hashable, ...]
    tails: tuple[int, ...]
    heads: tuple[int, ...]
    capacities: tuple[int | None, ...]
    unit: Fraction

    @property
    def limit(self) -> int:
        """The sum of all capacities: no cut that has a limit carries more."""
        return sum(capacity for capacity in self.capacities if capacity is not None)

    def reversed(self) -> "Network":
        """Return the network with every edge turned round."""
        return Network(
            self.names,
            self.ranks,
            self.machines,
            self.heads,
            self.tails,
            self.capacities,
            self.unit,
        )

    def positions(self, names: Iterable[Hashable], what: str) -> frozenset[int]:
        """Return the vertices of these names.

        Raises
        ------
        PlanError
            If a name is no vertex, or is a rank.
        """
        names = list(names)
        index = {name: position for position, name in enumerate(self.names)} if names else {}
        held = {self.names[rank] for rank in self.ranks} if names else set()
        for name in names:
            if name not in index:
                raise PlanError(f"{what} {name!r} is not in the graph; name one of its switches")
            if name in held:
                raise PlanError(f"{what} {name!r} holds a rank; only a switch can be named")
        return frozenset(index[name] for name in names)


def from_graph(graph: "nx.DiGraph[Hashable]", ranks: Sequence[Hashable]) -> Network:
    """Return the network of a ``networkx.DiGraph`` whose edges carry ``bandwidth`` in bytes/s.

    Integers and fractions are taken exactly, and so are floats: as the binary number that they
    are. Loops are dropped.

    Raises
    ------
    PlanError
        If there are fewer than two ranks, one is missing or named twice, a bandwidth is not a
        positive number, ranks cannot reach each other, or no bandwidth limits them.
    """
    if not graph.is_directed() or graph.is_multigraph():
        raise PlanError("a bound needs a networkx.DiGraph; turn each link into two edges")
    index = {name: position for position, name in enumerate(graph)}
    _check_ranks(ranks, index)
    tails, heads, rates = [], [], []
    for tail, head, attributes in graph.edges(data=True):
        if tail != head:
            tails.append(index[tail])
            heads.append(index[head])
            rates.append(_rate(tail, head, attributes.get("bandwidth")))
    # Many edges share few rates: the arithmetic of fractions is slow.
    different = {rate for rate in rates if rate is not None}
    denominator = math.lcm(*(rate.denominator for rate in different))
    whole = {rate: int(rate * denominator) for rate in different}
    divisor = math.gcd(*whole.values()) or 1
    scaled = {rate: value // divisor for rate, value in whole.items()}
    network = Network(
        tuple(graph),
        tuple(index[rank] for rank in ranks),
        tuple(attributes.get("node") for _, attributes in graph.nodes(data=True)),
        tuple(tails),
        tuple(heads),
        tuple(None if rate is None else scaled[rate] for rate in rates),
        Fraction(divisor, denominator),
    )
    _check_reach(network)
    return network


def _check_ranks(ranks: Sequence[Hashable], index: dict[Hashable, int]) -> None:
    if len(ranks) < 2:
        raise PlanError(f"a bound needs at least two ranks, but {len(ranks)} given")
    seen = set[Hashable]()
    for rank, name in enumerate(ranks):
        if name not in index:
            raise PlanError(f"rank {rank} sits on {name!r}, which is not in the graph")
        if name in seen:
            raise PlanError(f"two ranks sit on {name!r}; name each device once")
        seen.add(name)


def _rate(tail: Hashable, head: Hashable, bandwidth: object) -> Fraction | None:
    if bandwidth is None:
        return None
    number = isinstance(bandwidth, Real) and not isinstance(bandwidth, bool)
    if not number or not 0 < bandwidth < math.inf:  # type: ignore[operator]
        raise PlanError(
            f"the link {tail!r} -> {head!r} has a bandwidth of {bandwidth!r} bytes/s; it must be "
            "a positive number, or be left out if unknown"
        )
    if isinstance(bandwidth, Integral):
        return Fraction(int(bandwidth))
    if isinstance(bandwidth, Rational):
        return Fraction(bandwidth)
    return Fraction(float(bandwidth))  # type: ignore[arg-type]


def _check_reach(network: Network) -> None:
    first, *others = network.ranks
    every = range(len(network.tails))
    limitless = [edge for edge in every if network.capacities[edge] is None]
    joined = True
    for edges, where in ((network.tails, "from"), (network.heads, "to")):
        ends = network.heads if where == "from" else network.tails
        reached = _reached(first, edges, ends, every)
        for rank in others:
            if rank not in reached:
                raise PlanError(
                    f"{network.names[rank]!r} cannot be reached {where} "
                    f"{network.names[first]!r}; ranks must be connected in both directions"
                )
        joined &= _reached(first, edges, ends, limitless).issuperset(others)
    if joined:
        edge = limitless[0]
        raise PlanError(
            "no bandwidth is known that limits the ranks; give one to links such as "
            f"{network.names[network.tails[edge]]!r} -> {network.names[network.heads[edge]]!r}"
        )


def _reached(
    start: int, tails: Sequence[int], heads: Sequence[int], edges: Iterable[int]
) -> set[int]:
    onward: dict[int, list[int]] = {}
    for edge in edges:
        onward.setdefault(tails[edge], []).append(heads[edge])
    reached, pending = {start}, [start]
    while pending:
        for there in onward.get(pending.pop(), ()):
            if there not in reached:
                reached.add(there)
                pending.append(there)
    return reached
