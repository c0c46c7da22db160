"""How near two devices are: the path class in NCCL's words, and the narrowest link between.

The nearest path is the one of the lowest class; among those the widest; among those the shortest.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from topo_ar.errors import TopologyError
from topo_ar.topology.graph import RateKind, link_rate
from topo_ar.topology.model import DeviceKind, Link, LinkKind, Topology
from topo_ar.topology.ports import carries_data


class PathClass(IntEnum):
    """Path classes with NCCL's numbers (``src/include/graph.h``); smaller is nearer."""

    LOC = 0  # the same device
    NVL = 1  # NVLink or XGMI, also over a switch
    NVB = 2  # two NVLinks, over another GPU
    C2C = 3  # NVLink-C2C
    PIX = 4  # one PCIe bridge
    PXB = 5  # several PCIe bridges
    PHB = 8  # through a CPU or the memory of a host
    SYS = 9  # between the CPUs of a host
    NET = 10  # through a network
    DIS = 11  # not connected


@dataclass(frozen=True, slots=True)
class Path:
    """A way between two devices: all devices on it, its class, and its narrowest link in bytes/s.

    `bandwidth` is None where a link on the way has no known rate, and infinite on a device itself.
    """

    devices: tuple[str, ...]
    path_class: PathClass
    bandwidth: float | None


@dataclass(frozen=True, slots=True)
class NearestNics:
    """All NICs that share the best path class seen from a device; none and DIS if there is none."""

    nics: tuple[str, ...]
    path_class: PathClass


@dataclass(frozen=True, slots=True)
class _Edge:
    far: str
    path_class: PathClass
    bandwidth: float | None


_OFF_PCIE = (LinkKind.NVLINK, LinkKind.XGMI, LinkKind.C2C)


class Paths:
    """The paths of a topology; searches are kept, so ask one instance for all pairs.

    Parameters
    ----------
    topology : Topology
        A sound topology.
    rate : {"effective", "nominal"}
        Which figure makes a link wide.
    """

    def __init__(self, topology: Topology, rate: RateKind = "effective") -> None:
        self._topology = topology
        self._on_pcie: Paths | None = None
        self._counts: dict[tuple[str, LinkKind], dict[str, int]] | None = None
        self._devices = {device.id: device for device in topology.devices}
        self._edges = _edges(topology, rate)
        self._nics: dict[str | None, list[str]] = {}
        for device in topology.devices:
            if device.kind is DeviceKind.NIC and carries_data(device):
                self._nics.setdefault(device.node, []).append(device.id)
        self._classes: dict[tuple[str, str | None], dict[str, PathClass]] = {}

    def between(self, a: str, b: str) -> Path:
        """Return the nearest path from `a` to `b`; both directions have the same class and width.

        Raises
        ------
        TopologyError
            If one of them is no device.
        """
        for name in (a, b):
            if name not in self._devices:
                raise TopologyError(
                    f"{name!r} is no device; see `topo-ar show` for those there are"
                )
        if a == b:
            return Path((a,), PathClass.LOC, math.inf)
        # Inside one node no way leaves it, unless the node is in pieces.
        node = self._devices[a].node if self._devices[a].node == self._devices[b].node else None
        found = self._reach(a, node).get(b)
        if found is None and node is not None:
            node, found = None, self._reach(a, None).get(b)
        bridged = self._over_a_gpu(a, b)
        if bridged is not None and (found is None or found > PathClass.NVB):
            return bridged
        if found is None:
            return Path((a, b), PathClass.DIS, None)
        return self._widest(a, b, found, node)

    def nearest_nics(self, device: str) -> NearestNics:
        """Return the NICs of the device's node that are nearest to it: all that tie.

        Raises
        ------
        TopologyError
            If `device` is no device.
        """
        if device not in self._devices:
            raise TopologyError(f"{device!r} is no device; see `topo-ar show` for those there are")
        nics = self._nics.get(self._devices[device].node, [])
        classes = {nic: self.between(device, nic).path_class for nic in nics}
        best = min(classes.values(), default=PathClass.DIS)
        if best is PathClass.DIS:
            return NearestNics((), best)
        return NearestNics(tuple(nic for nic in nics if classes[nic] is best), best)

    def nvidia_class(self, a: str, b: str) -> str | None:
        """Return what ``nvidia-smi topo -m`` prints for a pair, None where it has no word for it.

        ``NV4`` counts the NVLinks between two GPUs, direct or over NVSwitches; ``XGMI`` is
        rocm-smi's word for a direct link. Otherwise the PCIe path counts: what NCCL calls PHB is
        ``PHB`` under one host bridge and ``NODE`` between two, by the attribute ``host_bridge`` of
        both devices, and ``PHB or NODE`` where that is not known.

        Raises
        ------
        TopologyError
            If one of them is no device.
        """
        if self.between(a, b).path_class is PathClass.LOC:
            return "X"
        if count := self._links_between(a, b, LinkKind.NVLINK):
            return f"NV{count}"
        if self._links_between(a, b, LinkKind.XGMI):
            return "XGMI"
        if self._on_pcie is None:
            links = tuple(link for link in self._topology.links if link.kind not in _OFF_PCIE)
            self._on_pcie = Paths(msgspec.structs.replace(self._topology, links=links))
        path_class = self._on_pcie.between(a, b).path_class
        if path_class >= PathClass.NET:
            return None
        if path_class is not PathClass.PHB:
            return path_class.name
        bridges = {self._devices[end].attributes.get("host_bridge") for end in (a, b)}
        if None in bridges:
            return "PHB or NODE"
        return "PHB" if len(bridges) == 1 else "NODE"

    def fast_links(self, a: str, b: str) -> int:
        """Return how many NVLinks or XGMI links join two GPUs, directly or over a switch."""
        return sum(self._links_between(a, b, kind) for kind in (LinkKind.NVLINK, LinkKind.XGMI))

    def _links_between(self, a: str, b: str, kind: LinkKind) -> int:
        """Return how many links join two GPUs directly, or over one switch of links."""
        if self._counts is None:
            self._counts = _counts(self._topology)
        near = self._counts.get((a, kind), {})
        far = self._counts.get((b, kind), {})
        switched = [
            min(count, far[middle])
            for middle, count in near.items()
            if middle in far and self._devices[middle].kind is DeviceKind.NVSWITCH
        ]
        return near.get(b, 0) + sum(switched)

    def _leaving(self, here: str, source: str, node: str | None) -> Iterator[_Edge]:
        """Yield the edges a path from `source` may take out of `here`, a GPU never being passed."""
        if here == source or self._devices[here].kind is not DeviceKind.GPU:
            for edge in self._edges.get(here, ()):
                if node is None or self._devices[edge.far].node == node:
                    yield edge

    def _reach(self, source: str, node: str | None) -> dict[str, PathClass]:
        """Return the lowest class in which each device can be reached (a minimax Dijkstra)."""
        key = (source, node)
        if key in self._classes:
            return self._classes[key]
        settled: dict[str, PathClass] = {}
        heap = [(PathClass.LOC, source)]
        while heap:
            path_class, here = heapq.heappop(heap)
            if here in settled:
                continue
            settled[here] = path_class
            for edge in self._leaving(here, source, node):
                if edge.far not in settled:
                    heapq.heappush(heap, (max(path_class, edge.path_class), edge.far))
        return self._classes.setdefault(key, settled)

    def _widest(self, a: str, b: str, limit: PathClass, node: str | None) -> Path:
        """Return the widest, then shortest path over edges of at most class `limit`."""
        heap: list[tuple[float, int, str, tuple[str, ...], bool]] = [(-math.inf, 0, a, (), True)]
        settled = set[str]()
        while heap:
            width, hops, here, way, known = heapq.heappop(heap)
            if here == b:
                return Path((*way, b), limit, -width if known else None)
            if here in settled:
                continue
            settled.add(here)
            for edge in self._leaving(here, a, node):
                if edge.path_class <= limit and edge.far not in settled:
                    bandwidth = math.inf if edge.bandwidth is None else edge.bandwidth
                    narrower = max(width, -bandwidth)
                    sure = known and edge.bandwidth is not None
                    heapq.heappush(heap, (narrower, hops + 1, edge.far, (*way, here), sure))
        raise AssertionError(f"{b} was reached from {a} before and is not now")

    def _over_a_gpu(self, a: str, b: str) -> Path | None:
        """Return the widest way of two NVLinks over one other GPU."""
        if (
            self._devices[a].kind is not DeviceKind.GPU
            or self._devices[b].kind is not DeviceKind.GPU
        ):
            return None
        to_b = {edge.far: edge for edge in self._nvlinks(b)}
        found = [
            Path((a, edge.far, b), PathClass.NVB, _narrower(edge, to_b[edge.far]))
            for edge in self._nvlinks(a)
            if edge.far in to_b
        ]
        return max(found, key=lambda path: path.bandwidth or 0.0, default=None)

    def _nvlinks(self, gpu: str) -> Iterator[_Edge]:
        for edge in self._edges.get(gpu, ()):
            direct = self._devices[edge.far].kind is DeviceKind.GPU
            if direct and edge.path_class is PathClass.NVL:
                yield edge


def _narrower(one: _Edge, other: _Edge) -> float | None:
    if one.bandwidth is None or other.bandwidth is None:
        return None
    return min(one.bandwidth, other.bandwidth)


def _edges(topology: Topology, rate: RateKind) -> dict[str, list[_Edge]]:
    """Return the edges out of each device; parallel links of one class add up."""
    kinds = {device.id: device.kind for device in topology.devices}
    widths: dict[tuple[str, str, PathClass], float] = {}
    for link in topology.links:
        path_class = _link_class(link, kinds[link.a], kinds[link.b])
        figure = link_rate(link, rate)
        width = math.nan if figure is None else figure.value
        for key in ((link.a, link.b, path_class), (link.b, link.a, path_class)):
            widths[key] = widths.get(key, 0.0) + width
    edges: dict[str, list[_Edge]] = {}
    for (a, b, path_class), width in widths.items():
        edges.setdefault(a, []).append(_Edge(b, path_class, None if math.isnan(width) else width))
    return edges


def _counts(topology: Topology) -> dict[tuple[str, LinkKind], dict[str, int]]:
    """Return the number of parallel links to each neighbour, by device and kind of link."""
    counts: dict[tuple[str, LinkKind], dict[str, int]] = {}
    for link in topology.links:
        for end, far in ((link.a, link.b), (link.b, link.a)):
            neighbours = counts.setdefault((end, link.kind), {})
            neighbours[far] = neighbours.get(far, 0) + link.count
    return counts


def _link_class(link: Link, a: DeviceKind, b: DeviceKind) -> PathClass:
    at_memory = {DeviceKind.CPU, DeviceKind.HOST} & {a, b}
    match link.kind:
        case LinkKind.NVLINK | LinkKind.XGMI:
            return PathClass.C2C if at_memory else PathClass.NVL
        case LinkKind.C2C:
            return PathClass.C2C
        case LinkKind.PCIE:
            if at_memory:
                return PathClass.PHB
            return PathClass.PXB if a is b is DeviceKind.PCIE_SWITCH else PathClass.PIX
        case LinkKind.SHM:
            return PathClass.PHB
        case LinkKind.UPI:
            return PathClass.SYS
        case LinkKind.INFINIBAND | LinkKind.ETHERNET:
            return PathClass.NET
