"""The topology as a networkx graph, for flows, cuts and drawings."""

from typing import TYPE_CHECKING, Literal

from topo_ar.topology.model import Figure, Link, LinkKind, Topology

if TYPE_CHECKING:
    import networkx as nx

RateKind = Literal["nominal", "effective"]

# A pair joined by links of several kinds takes the name of the nearest, in this order.
_NEAREST_FIRST = tuple(LinkKind)


def link_rate(link: Link, rate: RateKind) -> Figure | None:
    """Return the figure of `link` in bytes/s that `rate` asks for.

    A nominal rate is a promise of the data sheet and is never replaced; an effective rate that is
    not known is taken to be the nominal one.
    """
    return link.nominal if rate == "nominal" else link.effective or link.nominal


def to_networkx(topology: Topology, rate: RateKind = "nominal") -> "nx.DiGraph[str]":
    """Return the graph of `topology`; each link becomes two directed edges.

    Nodes carry ``kind``, ``node`` and ``numa``; edges carry ``bandwidth`` (bytes/s), ``latency``
    (seconds, absent if unknown), ``kind``, ``source`` and ``count``. Parallel links add up; their
    latency is the smallest, their kind that of the nearest link.

    An edge with a link of unknown rate has no ``bandwidth``. The flow functions of networkx read
    that as unlimited, so what they bound stays a bound; ``graph.graph["unknown"]`` lists such
    edges.
    """
    import networkx as nx

    graph: nx.DiGraph[str] = nx.DiGraph(name=topology.name)
    for device in topology.devices:
        graph.add_node(device.id, kind=device.kind.value, node=device.node, numa=device.numa)
    pairs: dict[tuple[str, str], list[Link]] = {}
    for link in topology.links:
        pairs.setdefault((min(link.a, link.b), max(link.a, link.b)), []).append(link)
    unknown = []
    for (a, b), links in pairs.items():
        attributes = _edge_attributes(links, rate)
        if "bandwidth" not in attributes:
            unknown.append((a, b))
        graph.add_edge(a, b, **attributes)
        graph.add_edge(b, a, **attributes)
    graph.graph["unknown"] = tuple(unknown)
    return graph


def _edge_attributes(links: list[Link], rate: RateKind) -> dict[str, str | float]:
    nearest = min(links, key=lambda link: _NEAREST_FIRST.index(link.kind))
    figures = [link_rate(link, rate) for link in links]
    known = [figure for figure in figures if figure is not None]
    latencies = [link.latency.value for link in links if link.latency is not None]
    attributes: dict[str, str | float] = {
        "kind": nearest.kind.value,
        "count": sum(link.count for link in links),
        "source": known[0].source.value if known else "unknown",
    }
    if len(known) == len(links):
        attributes["bandwidth"] = sum(figure.value for figure in known)
    if latencies:
        attributes["latency"] = min(latencies)
    return attributes
