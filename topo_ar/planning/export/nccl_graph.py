"""The order of GPUs inside a node, for NCCL's ``NCCL_GRAPH_FILE``.

A job on the same machines takes the file by::

    NCCL_GRAPH_FILE=graph.xml torchrun ... train.py

and ``NCCL_GRAPH_DUMP_FILE`` writes what it then uses. NCCL joins the nodes itself, in rank order; a
file that is left in ``/etc/nccl.conf`` also binds jobs that it does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, ParseError, SubElement, indent, tostring

from topo_ar.errors import PlanError
from topo_ar.planning.nccl_machine import nccl_machine
from topo_ar.planning.nccl_search import nccl_job
from topo_ar.topology.model import Topology
from topo_ar.topology.paths import PathClass, Paths

_RING, _TREE = 4, 1
_KINDS = ((0, _RING), (1, _TREE))


@dataclass(frozen=True, slots=True)
class Channel:
    """One ring or chain through a node: the GPUs in order, and the NIC at both of its ends."""

    gpus: tuple[int, ...]
    nic: int | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """The channels of one pattern; speeds in bytes/s of a channel."""

    number: int
    pattern: int
    intra: float
    inter: float
    type_intra: str
    type_inter: str
    channels: tuple[Channel, ...]


def graphs(topology: Topology, order: Sequence[int] | None = None) -> list[Graph]:
    """Return the ring and the tree graph of a node of `topology`.

    Parameters
    ----------
    topology : Topology
        Equal nodes of NVIDIA GPUs; the first is described, GPUs and NICs counted in its order.
    order : sequence of int, optional
        Local ranks in the order in which rings go through them, as a plan's ``nodes`` give it;
        by default as they are. Channel k begins at the GPU nearest to NIC k.

    Raises
    ------
    PlanError
        As for `nccl_machine`, or if `order` is not an order of the node's local ranks.
    """
    machine = nccl_machine(topology)
    job = nccl_job(machine)
    devices = {device.id: device for device in topology.devices}
    home = devices[topology.ranks[0]].node
    ranks = [rank for rank in topology.ranks if devices[rank].node == home]
    order = tuple(range(len(ranks))) if order is None else tuple(order)
    if sorted(order) != list(range(len(ranks))):
        raise PlanError(
            f"the order {list(order)} must name each of the local ranks 0..{len(ranks) - 1} once"
        )
    paths = Paths(topology)
    intra = max((paths.between(a, b).path_class for a in ranks for b in ranks if a != b), default=0)
    starts, type_inter = _starts(paths, ranks, job.ring.count, machine.num_nodes > 1)
    channels = tuple(_channel(order, gpu, nic) for gpu, nic in starts)
    return [
        Graph(
            number,
            pattern,
            found.intra,
            found.inter,
            PathClass(intra).name,
            type_inter,
            channels,
        )
        for (number, pattern), found in zip(_KINDS, (job.ring, job.tree), strict=True)
    ]


def _starts(
    paths: Paths, ranks: Sequence[str], count: int, several: bool
) -> tuple[list[tuple[int, int | None]], str]:
    """Return the first GPU and the NIC of each channel, and the farthest class between them."""
    if not several:
        return [(k % len(ranks), None) for k in range(count)], PathClass.PIX.name
    nearest = [paths.nearest_nics(rank) for rank in ranks]
    names = list(dict.fromkeys(nic for found in nearest for nic in found.nics))
    pairs = [(gpu, names.index(nic)) for gpu, found in enumerate(nearest) for nic in found.nics]
    if not pairs:
        raise PlanError("no GPU reaches a NIC of its node; correct the topology")
    # Every NIC begins a channel before one begins a second.
    by_nic = [[pair for pair in pairs if pair[1] == nic] for nic in range(len(names))]
    turns = [by_nic[k % len(names)] for k in range(count)]
    starts: list[tuple[int, int | None]] = [
        found[k // len(names) % len(found)] for k, found in enumerate(turns)
    ]
    return starts, max(found.path_class for found in nearest).name


def _channel(order: tuple[int, ...], first: int, nic: int | None) -> Channel:
    at = order.index(first)
    return Channel(order[at:] + order[:at], nic)


def to_xml(found: Sequence[Graph]) -> str:
    """Return the graphs as the XML that NCCL reads."""
    root = Element("graphs", version="1")
    for graph in found:
        element = SubElement(
            root,
            "graph",
            id=str(graph.number),
            pattern=str(graph.pattern),
            crossnic="0",
            nchannels=str(len(graph.channels)),
            speedintra=f"{graph.intra / 1e9:g}",
            speedinter=f"{graph.inter / 1e9:g}",
            latencyinter="0",
            typeintra=graph.type_intra,
            typeinter=graph.type_inter,
            samechannels="0",
        )
        for channel in graph.channels:
            row = SubElement(element, "channel")
            if channel.nic is not None:
                SubElement(row, "net", dev=str(channel.nic))
            for gpu in channel.gpus:
                SubElement(row, "gpu", dev=str(gpu))
            if channel.nic is not None:
                SubElement(row, "net", dev=str(channel.nic))
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def from_xml(text: str) -> list[Graph]:
    """Read graphs back, each of whose channels must visit the same GPUs once.

    Raises
    ------
    PlanError
        If `text` is no such XML, naming the graph and channel.
    """
    from defusedxml.ElementTree import fromstring

    try:
        root = fromstring(text)
    except ParseError as error:
        raise PlanError(f"not an NCCL graph file: {error}") from None
    if root.tag != "graphs":
        raise PlanError(f"the root is <{root.tag}>; an NCCL graph file has <graphs>")
    try:
        return [_graph(element) for element in root.iter("graph")]
    except (KeyError, ValueError) as error:
        raise PlanError(f"an NCCL graph lacks or garbles {error}") from None


def _graph(element: Element) -> Graph:
    number = int(element.attrib["id"])
    channels = tuple(
        Channel(
            tuple(int(gpu.attrib["dev"]) for gpu in row.iter("gpu")),
            next((int(net.attrib["dev"]) for net in row.iter("net")), None),
        )
        for row in element.iter("channel")
    )
    for position, channel in enumerate(channels):
        if sorted(channel.gpus) != sorted(set(channels[0].gpus)):
            raise PlanError(
                f"graph {number}, channel {position} visits GPUs {list(channel.gpus)}, but each of "
                f"{sorted(set(channels[0].gpus))} must be visited once"
            )
    return Graph(
        number,
        int(element.attrib["pattern"]),
        float(element.attrib["speedintra"]) * 1e9,
        float(element.attrib["speedinter"]) * 1e9,
        element.attrib["typeintra"],
        element.attrib["typeinter"],
        channels,
    )
