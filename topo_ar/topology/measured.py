"""A topology made of measurements alone, and what they say against one that was declared."""

from collections.abc import Iterator, Sequence
from statistics import median

from topo_ar.topology.clustering import nic_rates, slow_hosts
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    LinkKind,
    Source,
    Topology,
    validate,
)
from topo_ar.topology.names import FABRIC
from topo_ar.topology.pair_times import Measurement, PairTimes, Table
from topo_ar.units import format_rate

_LOOPBACK = "one TCP flow between two ranks of the host; shared memory carries more"
_FLOW = "best TCP flow of the host, the slower direction"
_ROUND_TRIP = "a quarter of the shortest median round trip"
_UPLINK = "what left the rack while all its hosts sent"
_DEVIATION = 0.15


def measured_topology(measurement: Measurement) -> Topology:
    """Return the topology of a job as it was measured: every figure's source is ``measured``.

    Hosts become ``node0``, ``node1`` in the order of their lowest rank, each with one NIC that
    stands for whatever its flows take. Racks hang on a switch ``spine`` by their uplinks; without
    racks one switch joins the hosts.
    """
    devices: list[Device] = []
    links: list[Link] = []
    places: dict[int, str] = {}
    several = len(measurement.groups) > 1
    leaf_of = {
        host: f"leaf{rack}" for rack, hosts in enumerate(measurement.racks) for host in hosts
    }
    if several:
        devices += _switches(measurement)
        links += _uplinks(measurement)
    for host, ranks in enumerate(measurement.groups):
        node = f"node{host}"
        devices.append(Device(f"{node}/host", DeviceKind.HOST, node))
        for index, rank in enumerate(ranks):
            places[rank] = f"{node}/cpu{index}"
            devices.append(Device(places[rank], DeviceKind.CPU, node))
            links.append(_inside(places[rank], node, ranks, measurement.ranks))
        if several:
            devices.append(Device(f"{node}/nic0", DeviceKind.NIC, node))
            links.append(Link(f"{node}/nic0", f"{node}/host", LinkKind.PCIE))
            links.append(_cable(host, leaf_of.get(host, FABRIC), measurement.hosts))
    return validate(
        Topology(
            name=f"{len(measurement.groups)} hosts, measured",
            devices=tuple(devices),
            links=tuple(links),
            ranks=tuple(places[rank] for rank in sorted(places)),
            notes=(*findings(measurement), *measurement.notes),
        )
    )


def findings(measurement: Measurement) -> tuple[str, ...]:
    """Return in sentences the levels that were found, and hosts that are slower than others."""
    groups, racks = measurement.groups, measurement.racks
    sentences = []
    for rack, hosts in enumerate(racks):
        uplink = measurement.uplinks[rack]
        sentences.append(
            f"{_nodes(hosts)} share a rack, whose uplink carries "
            + (f"{format_rate(uplink)}" if uplink else "an unknown rate")
        )
    for host, rate, usual in slow_hosts(measurement.hosts):
        sentences.append(
            f"node{host} ({_ranks(groups[host])}): its NIC carries {format_rate(rate)}, "
            f"{rate / usual:.2g} of the {format_rate(usual)} that is usual here; look at its link "
            "speed, cable and whatever shapes it"
        )
    for host, (out, into) in enumerate(nic_rates(measurement.hosts)):
        if out and into and max(out, into) > (1 + _DEVIATION) * min(out, into):
            sentences.append(
                f"node{host} ({_ranks(groups[host])}): sends {format_rate(out)} and receives "
                f"{format_rate(into)}; the slower counts"
            )
    return tuple(sentences)


def disagreements(measurement: Measurement, declared: Topology) -> tuple[str, ...]:
    """Return in sentences where a declared topology is not what was measured.

    Compared are which ranks share a host, which hosts share a rack, and the payload rates of NICs
    and uplinks, which may differ by 15 %. A flow takes one NIC, so with several the fastest counts.

    Raises
    ------
    TopologyError
        If `declared` has no levels.
    """
    found = levels(declared)
    size = sum(map(len, measurement.groups))
    if found.world_size != size:
        return (f"{size} ranks were measured but {declared.name!r} has {found.world_size}",)
    return (
        *_other_hosts(measurement, found),
        *_other_racks(measurement, found),
        *_other_rates(measurement, found),
    )


def _switches(measurement: Measurement) -> list[Device]:
    names = [f"leaf{rack}" for rack in range(len(measurement.racks))]
    return [Device(name, DeviceKind.SWITCH) for name in ([*names, "spine"] if names else [FABRIC])]


def _uplinks(measurement: Measurement) -> list[Link]:
    return [
        Link(
            f"leaf{rack}",
            "spine",
            LinkKind.ETHERNET,
            effective=_figure(measurement.uplinks[rack], _UPLINK),
        )
        for rack in range(len(measurement.racks))
    ]


def _inside(place: str, node: str, ranks: Sequence[int], times: PairTimes) -> Link:
    """Return a rank's link to its host's memory; a message crosses two of them."""
    latency = _median(times.latency, ranks)
    return Link(
        place,
        f"{node}/host",
        LinkKind.SHM,
        effective=_figure(_median(times.rate, ranks), _LOOPBACK),
        latency=_figure(None if latency is None else latency / 2, _LOOPBACK),
    )


def _cable(host: int, switch: str, hosts: PairTimes) -> Link:
    known = [rate for rate in nic_rates(hosts)[host] if rate is not None]
    latencies = [
        value for b, value in enumerate(hosts.latency[host]) if value is not None and b != host
    ]
    return Link(
        f"node{host}/nic0",
        switch,
        LinkKind.ETHERNET,
        effective=_figure(min(known, default=None), _FLOW),
        latency=_figure(min(latencies) / 2 if latencies else None, _ROUND_TRIP),
    )


def _figure(value: float | None, note: str) -> Figure | None:
    return None if value is None else Figure(value, Source.MEASURED, note)


def _median(table: Table, members: Sequence[int]) -> float | None:
    values = [v for a in members for b in members if a != b and (v := table[a][b]) is not None]
    return median(values) if values else None


def _other_hosts(measurement: Measurement, declared: Levels) -> Iterator[str]:
    node_of = {rank: node.name for node in declared.nodes for rank in node.ranks}
    for group in measurement.groups:
        names = list(dict.fromkeys(node_of[rank] for rank in group))
        if len(names) > 1:
            yield (
                f"{_ranks(group)} were measured to share a host, and are declared on "
                f"{' and '.join(names)}"
            )
    for node in declared.nodes:
        parts = [[r for r in group if r in node.ranks] for group in measurement.groups]
        parts = [part for part in parts if part]
        if len(parts) > 1:
            yield (
                f"{node.name} is declared with {_ranks(node.ranks)}, which were measured on "
                f"{len(parts)} hosts: {' and '.join(_ranks(part) for part in parts)}"
            )


def _other_racks(measurement: Measurement, declared: Levels) -> Iterator[str]:
    rack_of = {host: rack for rack, hosts in enumerate(measurement.racks) for host in hosts}
    if not declared.racks or not rack_of:
        return
    host_of = {rank: host for host, group in enumerate(measurement.groups) for rank in group}
    for rack in declared.racks:
        nodes = [declared.nodes[node] for node in rack.nodes]
        inside = [rack_of[host_of[node.ranks[0]]] for node in nodes]
        usual = max(inside, key=inside.count)
        for node, measured in zip(nodes, inside, strict=True):
            if measured != usual:
                beside = [
                    _ranks(measurement.groups[host])
                    for host in measurement.racks[measured]
                    if node.ranks[0] not in measurement.groups[host]
                ]
                yield (
                    f"{node.name} ({_ranks(node.ranks)}) is declared in rack {rack.name}, and was "
                    f"measured in a rack with {' and '.join(beside) or 'no other'}"
                )


def _other_rates(measurement: Measurement, declared: Levels) -> Iterator[str]:
    by_ranks = {node.ranks: node for node in declared.nodes}
    for host, (out, into) in enumerate(nic_rates(measurement.hosts)):
        node = by_ranks.get(measurement.groups[host])
        if node is None or not node.nics or out is None or into is None:
            continue
        payload, rate = max(nic.payload for nic in node.nics), min(out, into)
        if abs(rate - payload) > _DEVIATION * payload:
            yield (
                f"{node.name} ({_ranks(node.ranks)}): its NIC is declared with "
                f"{format_rate(payload)} of payload, and was measured to carry {format_rate(rate)}"
            )


def _nodes(hosts: Sequence[int]) -> str:
    return ", ".join(f"node{host}" for host in hosts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
