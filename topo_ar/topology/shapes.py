"""Which nodes of a topology are alike, so that what holds for one is said or searched once."""

from collections.abc import Mapping
from dataclasses import dataclass

from topo_ar.topology.model import Device, Figure, Link, Topology

# What tells two devices of a kind apart without being their name, number or address.
_TELLING = ("class", "vendor", "device", "sm", "gcn", "arch", "data", "gdr", "links_known")


@dataclass(frozen=True, slots=True)
class Alike:
    """Nodes with equal devices and links, device by device in order.

    Attributes
    ----------
    nodes : tuple of str
        Their names, in order of the topology.
    devices : tuple of tuple of Device
        The devices of each node; those at one position correspond.
    """

    nodes: tuple[str, ...]
    devices: tuple[tuple[Device, ...], ...]


def alike_nodes(topology: Topology) -> tuple[Alike, ...]:
    """Return the nodes of `topology` in groups, by their first node; linear in its size.

    Alike means: equal kinds of devices in equal order, on equal NUMA nodes, of equal make, with
    ranks or not, and equal links between them and out of the node (whereto does not count).
    """
    members: dict[str, list[Device]] = {}
    for device in topology.devices:
        if device.node is not None:
            members.setdefault(device.node, []).append(device)
    place = {device.id: i for devices in members.values() for i, device in enumerate(devices)}
    node_of = {device.id: device.node for device in topology.devices}
    links: dict[str, list[object]] = {node: [] for node in members}
    for link in topology.links:
        a, b = node_of[link.a], node_of[link.b]
        make = link_make(link)
        if a is not None and a == b:
            links[a].append((*sorted((place[link.a], place[link.b])), make))
            continue
        for node, end in ((a, link.a), (b, link.b)):
            if node is not None:
                links[node].append((place[end], -1, make))
    ranks = set(topology.ranks)
    groups: dict[object, list[str]] = {}
    for node, devices in members.items():
        makes = tuple((device_make(device), device.id in ranks) for device in devices)
        groups.setdefault((makes, tuple(sorted(links[node], key=repr))), []).append(node)
    return tuple(
        Alike(tuple(nodes), tuple(tuple(members[node]) for node in nodes))
        for nodes in groups.values()
    )


def device_make(device: Device) -> tuple[object, ...]:
    """Return what devices of one make have in common: kind, NUMA node and telling attributes."""
    host_bridge = device.attributes.get("host_bridge")
    told = tuple((name, device.attributes.get(name)) for name in _TELLING)
    bridge = None if host_bridge is None else str(host_bridge).rsplit("/", 1)[-1]
    return (device.kind.value, device.numa, bridge, told)


def link_make(link: Link) -> tuple[object, ...]:
    """Return what links of one make have in common: kind, number and rates."""
    return (link.kind.value, link.count, _value(link.nominal), _value(link.effective))


def _value(figure: Figure | None) -> float | None:
    return None if figure is None else figure.value


def translation(group: Alike, position: int) -> Mapping[str, str]:
    """Return for each device id of the group's first node that of the node at `position`."""
    first, other = group.devices[0], group.devices[position]
    return {a.id: b.id for a, b in zip(first, other, strict=True)}
