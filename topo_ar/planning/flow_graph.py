"""The directed graph that bounds are computed on: of a topology, the devices that matter.

Left out is what no all-reduce goes through: storage NICs, GPUs without a rank, dead ends, and all
NICs of a job on one node. A chain of links becomes one edge with the rate of its narrowest link.
Where NVLink or XGMI joins all ranks of a node, PCIe leads to NICs and back only: it comes twice,
once outwards and once inwards. No schedule sends over both NVLink and PCIe to the same GPU.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from topo_ar.errors import PlanError
from topo_ar.topology.graph import RateKind, link_rate
from topo_ar.topology.islands import hives
from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology
from topo_ar.topology.ports import FAST_KINDS, NETWORK_KINDS, carries_data, links_by_device

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class Part:
    """The narrowest link of a chain: its kind, the node it belongs to, whether it is a NIC's."""

    kind: LinkKind
    node: str | None
    nic: bool
    rate: float | None


@dataclass(frozen=True, slots=True)
class Edge:
    """Parallel chains from one vertex to another; `rate` is their sum, None without a limit."""

    rate: float | None
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FlowGraph:
    """Vertices with their device's node, and edges, each known from both of its ends.

    `stands_for` names the devices of each vertex; more than one where links without a known rate
    join them.
    """

    ranks: tuple[str, ...]
    node_of: dict[str, str | None]
    out: dict[str, dict[str, Edge]]
    into: dict[str, dict[str, Edge]]
    stands_for: dict[str, list[str]]

    def digraph(self) -> "nx.DiGraph[str]":
        """Return the graph for `topo_ar.planning.bounds`."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        for vertex, node in self.node_of.items():
            graph.add_node(vertex, node=node)
        for tail, edges in self.out.items():
            for head, edge in edges.items():
                graph.add_edge(tail, head, bandwidth=edge.rate)
        return graph


def flow_graph(topology: Topology, rate: RateKind = "nominal") -> FlowGraph:
    """Return the graph of `topology` at these rates; links of unknown rate do not limit.

    Time and memory grow linearly with devices and links.

    Raises
    ------
    PlanError
        If the topology has no ranks.
    """
    if not topology.ranks:
        raise PlanError(
            f"topology {topology.name!r} has no ranks, so there is nothing to bound; give it ranks"
        )
    held = frozenset(topology.ranks)
    devices = {device.id: device for device in topology.devices}
    alone = len({devices[rank].node for rank in topology.ranks}) == 1
    kept = {d.id: d for d in topology.devices if d.id in held or _forwards(d, alone=alone)}
    split = _split_nodes(topology, devices)
    graph = FlowGraph(topology.ranks, {}, {}, {}, {})
    for device in kept.values():
        for vertex in _vertices(device, held, split):
            graph.node_of[vertex] = device.node
            graph.out[vertex], graph.into[vertex] = {}, {}
            graph.stands_for[vertex] = [device.id]
    for link in topology.links:
        if link.a in kept and link.b in kept:
            a, b = kept[link.a], kept[link.b]
            edge = _edge(link, a, b, rate)
            for tail, head in _ends(a, b, link, held, split):
                _add(graph, tail, head, edge)
    _reduce(graph, held)
    return graph


def _forwards(device: Device, *, alone: bool) -> bool:
    if device.kind is DeviceKind.NIC:
        return carries_data(device) and not alone
    return device.kind is not DeviceKind.GPU


def _split_nodes(topology: Topology, devices: dict[str, Device]) -> frozenset[str | None]:
    """Return the nodes in which NVLink or XGMI joins all ranks."""
    fast = links_by_device(link for link in topology.links if link.kind in FAST_KINDS)
    members: dict[str | None, list[str]] = {}
    for rank in topology.ranks:
        members.setdefault(devices[rank].node, []).append(rank)
    return frozenset(
        node
        for node, ranks in members.items()
        if len(ranks) > 1 and ranks[0] in fast and len(hives(ranks, fast)) == 1
    )


_OUT, _IN = ":out", ":in"
# Only vertices of so few edges become part of a chain.
_SMALL = 6


def _is_split(device: Device, held: frozenset[str], split: frozenset[str | None]) -> bool:
    # NVSwitches only ever carry what goes between GPUs.
    inside = device.node in split and device.kind is not DeviceKind.NVSWITCH
    return inside and device.id not in held


def _vertices(device: Device, held: frozenset[str], split: frozenset[str | None]) -> list[str]:
    if _is_split(device, held, split):
        return [device.id + _OUT, device.id + _IN]
    return [device.id]


def _ends(
    a: Device, b: Device, link: Link, held: frozenset[str], split: frozenset[str | None]
) -> Iterator[tuple[str, str]]:
    """Yield tail and head of the edges that `link` becomes."""
    for tail, head in ((a, b), (b, a)):
        twice = _is_split(tail, held, split), _is_split(head, held, split)
        if not any(twice):
            yield tail.id, head.id
        elif all(twice):
            if tail.kind is not DeviceKind.NIC:
                yield tail.id + _OUT, head.id + _OUT
            if head.kind is not DeviceKind.NIC:
                yield tail.id + _IN, head.id + _IN
        elif twice[0]:
            leaving = head.node != tail.node or link.kind in NETWORK_KINDS
            yield tail.id + (_OUT if leaving else _IN), head.id
        else:
            entering = head.node != tail.node or link.kind in NETWORK_KINDS
            yield tail.id, head.id + (_IN if entering else _OUT)


def _edge(link: Link, a: Device, b: Device, rate: RateKind) -> Edge:
    figure = link_rate(link, rate)
    value = None if figure is None else figure.value
    nic = link.kind in NETWORK_KINDS and (a.node is not None or b.node is not None)
    return Edge(value, (Part(link.kind, a.node or b.node, nic, value),))


def _add(graph: FlowGraph, tail: str, head: str, edge: Edge) -> None:
    before = graph.out[tail].get(head)
    if before is not None:
        limits = before.rate is not None and edge.rate is not None
        total = before.rate + edge.rate if limits else None  # type: ignore[operator]
        edge = Edge(total, before.parts + edge.parts)
    graph.out[tail][head] = graph.into[head][tail] = edge


def _narrower(first: Edge, second: Edge) -> Edge:
    """Return the edge that limits a chain of both; of equal ones a NIC's."""

    def width(edge: Edge) -> tuple[float, bool]:
        rate = float("inf") if edge.rate is None else edge.rate
        return rate, not any(part.nic for part in edge.parts)

    return min(first, second, key=width)


def _reduce(graph: FlowGraph, held: frozenset[str]) -> None:
    """Take out vertices until no switch that is left can go; in one order for nodes of a kind."""
    changed = True
    while changed:
        changed = False
        pending = deque(vertex for vertex in graph.out if vertex not in held)
        while pending:
            vertex = pending.popleft()
            if vertex not in graph.out:
                continue
            near = [*graph.out[vertex], *graph.into[vertex], vertex]
            if _simplify(graph, vertex, held):
                changed = True
                # Large switches wait for the next round: each look at one takes long.
                pending += [
                    there
                    for there in dict.fromkeys(near)
                    if there in graph.out
                    and there not in held
                    and len(graph.out[there]) + len(graph.into[there]) <= _SMALL
                ]


def _simplify(graph: FlowGraph, vertex: str, held: frozenset[str]) -> bool:
    """Take out `vertex`, or an edge of it that no flow needs; False if neither can be."""
    out, into = graph.out[vertex], graph.into[vertex]
    if not out or not into:
        _drop(graph, vertex)
        return True
    # What came from a lone source does not go back there, nor the other way round.
    (source, *others), (sink, *more) = into, out
    if not others and source in out:
        del out[source], graph.into[source][vertex]
        return True
    if not more and sink in into:
        del into[sink], graph.out[sink][vertex]
        return True
    passed = not (others or more)
    relayed = len(others) == len(more) == 1 and into.keys() == out.keys()
    # A switch between nodes stays: nodes of a kind are recognised by what they are linked to.
    if graph.node_of[vertex] is not None and (passed or relayed):
        chains = [(u, w, _narrower(into[u], out[w])) for u in into for w in out if u != w]
        _drop(graph, vertex)
        for tail, head, edge in chains:
            _add(graph, tail, head, edge)
        return True
    for other in out:
        unlimited = other in into and out[other].rate is None and into[other].rate is None
        if unlimited and other not in held and graph.node_of[other] == graph.node_of[vertex]:
            _merge(graph, vertex, other)
            return True
    return False


def _drop(graph: FlowGraph, vertex: str) -> None:
    for head in graph.out.pop(vertex):
        del graph.into[head][vertex]
    for tail in graph.into.pop(vertex):
        del graph.out[tail][vertex]
    del graph.node_of[vertex], graph.stands_for[vertex]


def _merge(graph: FlowGraph, vertex: str, other: str) -> None:
    """Let `other` stand for both."""
    leaving = [(head, edge) for head, edge in graph.out[vertex].items() if head != other]
    entering = [(tail, edge) for tail, edge in graph.into[vertex].items() if tail != other]
    graph.stands_for[other] += graph.stands_for[vertex]
    _drop(graph, vertex)
    for head, edge in leaving:
        _add(graph, other, head, edge)
    for tail, edge in entering:
        _add(graph, tail, other, edge)
