"""The levels a planner thinks in: ranks of an island, of a node, nodes of a rack, racks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topo_ar.errors import TopologyError
from topo_ar.topology.islands import hives, sockets
from topo_ar.topology.model import Device, DeviceKind, Link, Source, Topology
from topo_ar.topology.nearest import NearestPlaces
from topo_ar.topology.ports import (
    FAST_KINDS,
    SLOW_KINDS,
    carries_data,
    links_by_device,
    nic_rate,
    port_rate,
)
from topo_ar.topology.ports import Rate as Rate
from topo_ar.topology.racks import Rack as Rack
from topo_ar.topology.racks import find_racks


@dataclass(frozen=True, slots=True)
class NodeLevel:
    """One node: its global ranks in local-rank order, one rank's port inside it, and its NICs.

    Attributes
    ----------
    name : str
        The node's name in the topology.
    ranks : tuple of int
        Global ranks in local-rank order.
    intra : Rate
        One rank's port inside the node. Where there are islands, its payload is what a rank gets
        across them while all others cross as well; the nominal rate stays that of the whole port.
    nics : tuple of Rate
        The data NICs.
    rank_nics : tuple of tuple of int
        For each rank, the positions in `nics` of those nearest to it; empty where every rank may
        use every NIC alike.
    islands : tuple of tuple of int
        Global ranks that NVLink or XGMI, or a socket, joins more closely than the whole node; each
        rank once. Sockets count where what joins them carries less than one rank's port. Empty
        where the node is one island.
    island : Rate or None
        One rank's port inside its island; None where there are no islands.
    nic_names : tuple of str
        What the NICs in `nics` are called on the node; empty where it was not said.
    """

    name: str
    ranks: tuple[int, ...]
    intra: Rate
    nics: tuple[Rate, ...]
    rank_nics: tuple[tuple[int, ...], ...] = ()
    islands: tuple[tuple[int, ...], ...] = ()
    island: Rate | None = None
    nic_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Levels:
    """All nodes of a job, ordered by their lowest rank. Together they hold each rank once.

    `racks` hold each node once, or are empty where the network between the nodes is one
    non-blocking switch as far as is known.
    """

    nodes: tuple[NodeLevel, ...]
    racks: tuple[Rack, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks over all nodes."""
        return sum(len(node.ranks) for node in self.nodes)


def levels(topology: Topology) -> Levels:
    """Return the levels of `topology`: nodes ordered by their lowest rank.

    The port of a rank inside its node is the sum of its NVLink or XGMI links; the link to the
    PCIe tree, to the CPU or to shared memory where it has none. A node is as fast as its slowest
    port. The rate of a NIC is the smaller of its cable and its PCIe link; NICs with the attribute
    ``data`` false are left out. Time and memory grow linearly with devices and links, as long as
    the nodes are of few shapes.

    Raises
    ------
    TopologyError
        If there are no ranks, a rank belongs to no node, or a rank's port or (with several nodes)
        a NIC has no known rate; the message names the device.
    """
    if not topology.ranks:
        raise TopologyError(
            f"topology {topology.name!r} has no ranks, so there are no levels; "
            "list the device of each rank under `ranks`, or join it with descriptions of its "
            "machines (topo-ar show THIS MACHINE -o job.json)"
        )
    devices = {device.id: device for device in topology.devices}
    links = links_by_device(topology.links)
    ranks_of: dict[str, list[int]] = {}
    for rank, device_id in enumerate(topology.ranks):
        node = devices[device_id].node
        if node is None:
            raise TopologyError(f"rank {rank} sits on {device_id!r}, which belongs to no node")
        ranks_of.setdefault(node, []).append(rank)
    members: dict[str, list[Device]] = {node: [] for node in ranks_of}
    for device in topology.devices:
        if device.node in members:
            members[device.node].append(device)
    nics_of = {
        node: _nics(inside, links, devices, needed=len(ranks_of) > 1)
        for node, inside in members.items()
    }
    nearest = NearestPlaces(links)
    nodes = []
    for node, ranks in ranks_of.items():
        places = [topology.ranks[rank] for rank in ranks]
        nics = nics_of[node]
        inside = _inside(places, links, devices)
        nodes.append(
            NodeLevel(
                name=node,
                ranks=tuple(ranks),
                intra=inside.intra,
                nics=tuple(nics.values()),
                rank_nics=nearest.of(members[node], places, list(nics)),
                islands=tuple(tuple(ranks[i] for i in island) for island in inside.islands),
                island=inside.island,
                nic_names=tuple(
                    str(devices[nic].attributes.get("name", nic.removeprefix(f"{node}/")))
                    for nic in nics
                ),
            )
        )
    racks = find_racks([list(nics) for nics in nics_of.values()], topology, links)
    return Levels(tuple(nodes), racks)


def _nics(
    members: Sequence[Device],
    links: Mapping[str, Sequence[Link]],
    devices: Mapping[str, Device],
    *,
    needed: bool,
) -> dict[str, Rate]:
    rates = {}
    for device in members:
        if device.kind is not DeviceKind.NIC or not carries_data(device):
            continue
        rate = nic_rate(device, links, devices)
        if rate is not None:
            rates[device.id] = rate
        elif needed:
            raise TopologyError(
                f"NIC {device.id!r} has no link with a known rate; "
                "give its link to the network a nominal bandwidth"
            )
    return rates


@dataclass(frozen=True, slots=True)
class _Inside:
    """A node's ports; `islands` are positions among its ranks."""

    intra: Rate
    islands: Sequence[Sequence[int]] = ()
    island: Rate | None = None


def _inside(
    ranks: Sequence[str], links: Mapping[str, Sequence[Link]], devices: Mapping[str, Device]
) -> _Inside:
    fast = [port_rate(devices[rank], links, FAST_KINDS, devices) for rank in ranks]
    slow = [port_rate(devices[rank], links, SLOW_KINDS, devices) for rank in ranks]
    known = [port for pair in zip(fast, slow, strict=True) if (port := pair[0] or pair[1])]
    if len(known) < len(ranks):
        if len(ranks) == 1:
            # A lone rank moves nothing inside its node.
            return _Inside(Rate(float("inf"), float("inf"), 0.0, Source.ASSUMED))
        rank = next(r for r, f, s in zip(ranks, fast, slow, strict=True) if f is s is None)
        raise TopologyError(
            f"{rank!r} holds a rank but no link with a known rate; give one of its links a nominal "
            "bandwidth, or add what tells it, such as NCCL's topology dump, lstopo's XML or "
            "`nvidia-smi nvlink -s` (topo-ar show THIS MORE -o both.json)"
        )
    port = _slowest(known)
    if any(fast):
        groups = hives(ranks, links)
        if len(groups) == 1:
            return _Inside(port)
        across = _slowest([port for port in slow if port] or known)
        inner = [fast[i] for group in groups if len(group) > 1 for i in group]
    else:
        groups, leaving = sockets(ranks, links, devices)
        if not any(rate < port.payload for rate in leaving):
            return _Inside(port)
        share = min(rate / len(group) for rate, group in zip(leaving, groups, strict=True))
        across = replace(port, payload=min(share, port.payload))
        inner = [slow[i] for group in groups if len(group) > 1 for i in group]
    intra = replace(port, payload=min(across.payload, port.nominal), source=across.source)
    bonds = [rate for rate in inner if rate is not None]
    return _Inside(intra, groups, _slowest(bonds)) if bonds else _Inside(intra)


def _slowest(ports: Sequence[Rate]) -> Rate:
    """Return the least rates and the largest latency of `ports`; the source is the slowest's."""
    slowest = min(ports, key=lambda port: port.payload)
    nominal = min(port.nominal for port in ports)
    return Rate(
        nominal=nominal,
        payload=min(slowest.payload, nominal),
        latency=max(port.latency for port in ports),
        source=slowest.source,
    )
