"""The two levels a planner thinks in: ranks inside a node, nodes joined by their NICs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source, Topology

NETWORK_KINDS = frozenset({LinkKind.INFINIBAND, LinkKind.ETHERNET})

_FAST = frozenset({LinkKind.NVLINK, LinkKind.XGMI})
_SLOW = frozenset({LinkKind.PCIE, LinkKind.C2C, LinkKind.SHM})
_RELAYS = frozenset(
    {DeviceKind.NVSWITCH, DeviceKind.SWITCH, DeviceKind.HOST, DeviceKind.PCIE_SWITCH}
)

# Seconds a message needs where no link says: the hardware latencies of NCCL 2.30.7's tuning table
# (ring, Simple: NVLink 3.4, PCI 5.7, network 14 us); shared memory between processes is a guess.
_MESSAGE_SECONDS = {
    LinkKind.NVLINK: 3.4e-6,
    LinkKind.XGMI: 3.4e-6,
    LinkKind.C2C: 3.4e-6,
    LinkKind.PCIE: 5.7e-6,
    LinkKind.SHM: 20e-6,
}
_NETWORK_SECONDS = 14e-6


@dataclass(frozen=True, slots=True)
class Rate:
    """What one port carries: bytes/s in one direction, and the latency in seconds.

    `payload` is the effective rate; it equals `nominal` where nothing better is known, and the
    other way round. `latency` is that of a whole message from one port to another: both links of
    a way over a switch. `source` is that of `payload`.
    """

    nominal: float
    payload: float
    latency: float
    source: Source


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
        One rank's port inside the node; where there are islands, what it gets across them.
    nics : tuple of Rate
        The data NICs.
    rank_nics : tuple of tuple of int
        For each rank, the positions in `nics` of those nearest to it; empty where every rank may
        use every NIC alike.
    islands : tuple of tuple of int
        Global ranks that NVLink or XGMI, or a socket, joins more closely than the whole node; each
        rank once. Empty where the node is one island.
    island : Rate or None
        One rank's port inside its island; None where there are no islands.
    """

    name: str
    ranks: tuple[int, ...]
    intra: Rate
    nics: tuple[Rate, ...]
    rank_nics: tuple[tuple[int, ...], ...] = ()
    islands: tuple[tuple[int, ...], ...] = ()
    island: Rate | None = None


@dataclass(frozen=True, slots=True)
class Rack:
    """Nodes behind one leaf switch: their positions in ``Levels.nodes``, and all its uplinks.

    `uplink` is what all links of the leaf switch to the rest of the fabric carry together, in one
    direction.
    """

    name: str
    nodes: tuple[int, ...]
    uplink: Rate


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
    """Return the two levels of `topology`: nodes ordered by their lowest rank.

    The port of a rank inside its node is the sum of its NVLink or XGMI links; the link to the
    PCIe tree, to the CPU or to shared memory where it has none. A node is as fast as its slowest
    port. Where NVLink or XGMI do not join all ranks of a node (two hives, one bridged pair), the
    nominal rate stays that of the port, and the payload is what the PCIe tree carries.
    The rate of a NIC is the smaller of its cable and its PCIe link; NICs with the attribute
    ``data`` false are left out. Time and memory grow linearly with devices and links.

    Raises
    ------
    TopologyError
        If there are no ranks, a rank belongs to no node, or a rank's port or (with several nodes)
        a NIC has no known rate; the message names the device.
    """
    if not topology.ranks:
        raise TopologyError(
            f"topology {topology.name!r} has no ranks, so there are no levels; "
            "list the device of each rank under `ranks`"
        )
    devices = {device.id: device for device in topology.devices}
    links = links_by_device(topology.links)
    ranks_of: dict[str, list[int]] = {}
    for rank, device_id in enumerate(topology.ranks):
        node = devices[device_id].node
        if node is None:
            raise TopologyError(f"rank {rank} sits on {device_id!r}, which belongs to no node")
        ranks_of.setdefault(node, []).append(rank)
    nics_of: dict[str, list[Rate]] = {node: [] for node in ranks_of}
    for device in topology.devices:
        if device.kind is DeviceKind.NIC and device.node in nics_of and carries_data(device):
            rate = _nic_rate(device, links, devices)
            if rate is not None:
                nics_of[device.node].append(rate)
            elif len(ranks_of) > 1:
                raise TopologyError(
                    f"NIC {device.id!r} has no link with a known rate; "
                    "give its link to the network a nominal bandwidth"
                )
    nodes = (
        NodeLevel(
            name=node,
            ranks=tuple(ranks),
            intra=_intra_rate([devices[topology.ranks[rank]] for rank in ranks], links, devices),
            nics=tuple(nics_of[node]),
        )
        for node, ranks in ranks_of.items()
    )
    return Levels(tuple(nodes))


def links_by_device(links: Iterable[Link]) -> dict[str, list[Link]]:
    """Return the links that end at each device."""
    by_device: dict[str, list[Link]] = {}
    for link in links:
        by_device.setdefault(link.a, []).append(link)
        by_device.setdefault(link.b, []).append(link)
    return by_device


def port_links(links: Iterable[Link]) -> list[Link]:
    """Return those of a rank's links that make its port inside the node: the fast ones, if any."""
    links = list(links)
    return [link for link in links if link.kind in _FAST] or [
        link for link in links if link.kind in _SLOW
    ]


def relays(device: Device, link: Link) -> bool:
    """Return whether a message over `link` goes on at `device`, so that it crosses two links."""
    if device.kind is DeviceKind.CPU:
        # A CPU forwards for PCIe; over shared memory it is itself a rank.
        return link.kind is not LinkKind.SHM
    return device.kind in _RELAYS


def carries_data(nic: Device) -> bool:
    """Return whether `nic` is for the ranks' traffic; the attribute ``data`` false says no."""
    return nic.attributes.get("data", True) is not False


def _intra_rate(
    ranks: Sequence[Device], links: Mapping[str, Sequence[Link]], devices: Mapping[str, Device]
) -> Rate:
    fast = [_port(rank, links, _FAST, devices) for rank in ranks]
    slow = [_port(rank, links, _SLOW, devices) for rank in ranks]
    ports = [a or b for a, b in zip(fast, slow, strict=True)]
    known = [port for port in ports if port is not None]
    if len(known) < len(ranks):
        if len(ranks) == 1:
            # A lone rank moves nothing inside its node.
            return Rate(float("inf"), float("inf"), 0.0, Source.ASSUMED)
        rank = ranks[ports.index(None)]
        raise TopologyError(
            f"{rank.id!r} holds a rank but no link with a known rate; "
            "give one of its links a nominal bandwidth"
        )
    nominal = min(port.nominal for port in known)
    slowest = min(known, key=lambda port: port.payload)
    if any(fast) and not _joined([rank.id for rank in ranks], links):
        slowest = min((port for port in slow if port), key=lambda p: p.payload, default=slowest)
    latency = max(port.latency for port in known)
    return Rate(nominal, min(slowest.payload, nominal), latency, slowest.source)


def _joined(ranks: Sequence[str], links: Mapping[str, Sequence[Link]]) -> bool:
    """Return whether NVLink or XGMI alone lead from the first rank to every other."""
    seen = {ranks[0]}
    pending = [ranks[0]]
    while pending:
        here = pending.pop()
        for link in links.get(here, ()):
            there = link.b if link.a == here else link.a
            if link.kind in _FAST and there not in seen:
                seen.add(there)
                pending.append(there)
    return seen.issuperset(ranks)


def _port(
    device: Device,
    links: Mapping[str, Sequence[Link]],
    kinds: frozenset[LinkKind],
    devices: Mapping[str, Device],
) -> Rate | None:
    """Return the sum of the links of these kinds, or None where no rate is known."""
    chosen = [link for link in links.get(device.id, ()) if link.kind in kinds]
    ways = [_way_up(device.id, link, links, devices) for link in chosen]
    payloads = [figure for way in ways if (figure := _narrowest(map(_payload, way)))]
    nominals = [figure for way in ways if (figure := _narrowest(map(_nominal, way)))]
    if not payloads:
        return None
    return Rate(
        nominal=sum(figure.value for figure in nominals),
        payload=sum(figure.value for figure in payloads),
        latency=max(_message_seconds(device.id, link, devices) for link in chosen),
        source=payloads[0].source,
    )


def _way_up(
    device_id: str,
    link: Link,
    links: Mapping[str, Sequence[Link]],
    devices: Mapping[str, Device],
) -> list[Link]:
    """Return the PCIe links everything through `link` must take: on through lone bridges."""
    way = [link]
    here = device_id
    while way[-1].kind is LinkKind.PCIE:
        here = way[-1].b if way[-1].a == here else way[-1].a
        at_bridge = links[here] if devices[here].kind is DeviceKind.PCIE_SWITCH else ()
        onward = [other for other in at_bridge if other is not way[-1]]
        if len(onward) != 1 or onward[0] in way:
            break
        way += onward
    return way


def _narrowest(figures: Iterable[Figure | None]) -> Figure | None:
    known = [figure for figure in figures if figure is not None]
    return min(known, key=lambda figure: figure.value, default=None)


def _payload(link: Link) -> Figure | None:
    return link.effective or link.nominal


def _nominal(link: Link) -> Figure | None:
    return link.nominal or link.effective


def _message_seconds(device_id: str, link: Link, devices: Mapping[str, Device]) -> float:
    """Return the seconds of a message: once over a direct link, twice where it ends in a relay."""
    if link.latency is None:
        return _MESSAGE_SECONDS.get(link.kind, _NETWORK_SECONDS)
    far = devices[link.b if link.a == device_id else link.a]
    return link.latency.value * (2 if relays(far, link) else 1)


def _nic_rate(
    nic: Device, links: Mapping[str, Sequence[Link]], devices: Mapping[str, Device]
) -> Rate | None:
    """Return the smaller of cable and PCIe; the latency is the cable's."""
    cable = _port(nic, links, NETWORK_KINDS, devices)
    bus = _port(nic, links, frozenset({LinkKind.PCIE, LinkKind.C2C}), devices)
    sides = [side for side in (cable, bus) if side is not None]
    if not sides:
        return None
    slower = min(sides, key=lambda side: side.payload)
    return Rate(
        nominal=min(side.nominal for side in sides),
        payload=slower.payload,
        latency=cable.latency if cable else _NETWORK_SECONDS,
        source=slower.source,
    )
