"""A bottleneck of a topology in words: which links, whose they are, and what each carries."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from topo_ar.planning.flow_graph import FlowGraph, Part
from topo_ar.topology.model import LinkKind
from topo_ar.units import format_rate

_WORDS = {
    LinkKind.NVLINK: "NVLink ports",
    LinkKind.XGMI: "xGMI links",
    LinkKind.C2C: "C2C links",
    LinkKind.PCIE: "PCIe links",
    LinkKind.UPI: "CPU interconnects",
    LinkKind.SHM: "memory links",
    LinkKind.INFINIBAND: "links between switches",
    LinkKind.ETHERNET: "links between switches",
}
# Longer lists of devices, nodes and rates are cut short.
_MAX_NAMED = 4


def name_bottleneck(
    graph: FlowGraph, side: frozenset[str], links: Collection[tuple[str, str]]
) -> str:
    """Return what limits an all-reduce, such as "node3's NICs (4 x 25 GB/s)".

    Parameters
    ----------
    graph : FlowGraph
        Vertices and edges with the links they stand for.
    side : frozenset of str
        The heaviest cut: the vertices that its edges lead away from.
    links : collection of (str, str)
        The edges that limit, of this cut and of those like it. Each is named once, with the rate
        of the narrowest link of its chain.
    """
    inside = [rank for rank in graph.ranks if rank in side]
    outside = [rank for rank in graph.ranks if rank not in side]
    named = min(inside, outside, key=len)
    nodes = list(dict.fromkeys(graph.node_of[rank] for rank in named))
    if len(nodes) == 1:
        together = sum(graph.node_of[rank] == nodes[0] for rank in graph.ranks)
        if 1 < len(named) < together:
            devices = _listed(rank.removeprefix(f"{nodes[0]}/") for rank in named)
            crossing = [edge for edge in _edges(graph) if edge[0] in side and edge[1] not in side]
            parts = [part for group in _by_node(graph, crossing).values() for part in group]
            return f"the links of the package {devices} of {nodes[0]}: {_links(parts)}"
    if len(named) == 1 and all(named[0] in link for link in links):
        return f"{named[0]}'s {_links(_by_node(graph, links)[nodes[0]])}"
    return _of_nodes(graph, _by_node(graph, links))


def _edges(graph: FlowGraph) -> Iterator[tuple[str, str]]:
    return ((tail, head) for tail, edges in graph.out.items() for head in edges)


def _by_node(graph: FlowGraph, links: Iterable[tuple[str, str]]) -> dict[str | None, list[Part]]:
    """Return the parts of these edges by node, each link in one direction only."""
    seen = set[frozenset[str]]()
    found: dict[str | None, list[Part]] = {}
    for tail, head in sorted(links):
        pair = frozenset((graph.stands_for[tail][0], graph.stands_for[head][0]))
        if pair not in seen:
            seen.add(pair)
            for part in graph.out[tail][head].parts:
                found.setdefault(part.node, []).append(part)
    return found


def _of_nodes(graph: FlowGraph, found: Mapping[str | None, Sequence[Part]]) -> str:
    holding = {graph.node_of[rank] for rank in graph.ranks}
    texts = {node: _links(parts) for node, parts in sorted(found.items(), key=str)}
    if len(holding) > 1 and texts.keys() == holding and len(set(texts.values())) == 1:
        return f"each node's {next(iter(texts.values()))}"
    named = [f"the {text}" if node is None else f"{node}'s {text}" for node, text in texts.items()]
    more = f" and those of {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return ", ".join(named[:_MAX_NAMED]) + more


def _links(parts: Iterable[Part]) -> str:
    """Return the links by kind, ``NVLink ports (2 x 300 GB/s) and NICs (1 x 25 GB/s)``."""
    counts: dict[str, Counter[float | None]] = {}
    for part in parts:
        word = "NICs" if part.nic else _WORDS[part.kind]
        counts.setdefault(word, Counter())[part.rate] += 1
    return " and ".join(f"{word} ({_rates(found)})" for word, found in sorted(counts.items()))


def _rates(counts: Counter[float | None]) -> str:
    known = [rate for rate in counts if rate is not None]
    if len(known) == len(counts) > _MAX_NAMED:
        least, most = format_rate(min(known)), format_rate(max(known))
        return f"{counts.total()} x {least} to {most}"
    return " + ".join(
        f"{count} x {'unknown' if rate is None else format_rate(rate)}"
        for rate, count in counts.items()
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return "{" + ", ".join(names[:_MAX_NAMED]) + more + "}"
