"""Descriptions of single hosts joined into the topology of a job."""

from collections.abc import Mapping, Sequence

import msgspec

from topo_ar.errors import TopologyError
from topo_ar.topology.join_fabric import join_fabric
from topo_ar.topology.merge_machine import merge_machine
from topo_ar.topology.model import Device, DeviceKind, Topology, validate
from topo_ar.topology.names import FABRIC
from topo_ar.topology.readers import Description


def combine(descriptions: Sequence[Description]) -> Topology:
    """Return the one topology that several descriptions make.

    Descriptions of one machine are merged. With a fabric among them, machines are joined through
    it: those with a host's name are that host, and a single machine without one stands for all
    hosts of the fabric.

    Raises
    ------
    TopologyError
        If there are none, several fabrics, or they do not fit each other.
    """
    fabrics = [description for description in descriptions if is_fabric(description.topology)]
    machines = [description for description in descriptions if description not in fabrics]
    if len(descriptions) == 1:
        return descriptions[0].topology
    if not fabrics:
        return merge_machine(machines)
    if len(fabrics) > 1 or not machines:
        raise TopologyError(
            f"{', '.join(fabric.topology.name for fabric in fabrics)} each describe a whole "
            "network; give one of them, and descriptions of its machines"
        )
    fabric = fabrics[0].topology
    by_node: dict[str, list[Description]] = {}
    for machine in machines:
        node = next((d.node for d in machine.topology.devices if d.node is not None), "")
        by_node.setdefault(node, []).append(machine)
    merged = {node: merge_machine(together) for node, together in by_node.items()}
    hosts = {device.node for device in fabric.devices}
    if len(merged) == 1 and not merged.keys() & hosts:
        merged = dict.fromkeys("*", *merged.values())
    return join_fabric(merged, fabric)


def is_fabric(topology: Topology) -> bool:
    """Return whether `topology` describes a network and nothing inside the hosts on it."""
    outside = (DeviceKind.SWITCH, DeviceKind.HOST, DeviceKind.NIC)
    return not topology.ranks and all(device.kind in outside for device in topology.devices)


def merge_hosts(hosts: Sequence[Topology], groups: Sequence[Sequence[int]]) -> Topology:
    """Return one cluster topology of several hosts, ranks placed, ids prefixed by their node.

    Parameters
    ----------
    hosts : sequence of Topology
        One description a host, each of a single node.
    groups : sequence of sequence of int
        The global ranks of each host, in the order of `hosts`; the first takes the first place for
        a rank that its host has, and so on. Together they are 0 to n - 1.

    Notes
    -----
    The hosts become ``node0``, ``node1``, ... The switch a host's NICs lead to is taken to be one
    and the same for all hosts, and non-blocking.

    Raises
    ------
    TopologyError
        If hosts and groups do not fit each other.
    """
    if len(hosts) != len(groups) or not hosts:
        raise TopologyError(
            f"{len(hosts)} hosts and {len(groups)} groups of ranks do not fit; one group a host"
        )
    ranks = sorted(rank for group in groups for rank in group)
    if ranks != list(range(len(ranks))):
        raise TopologyError(
            f"the groups hold ranks {ranks}; each of 0 to {len(ranks) - 1} must be there once"
        )
    devices = [Device(FABRIC, DeviceKind.SWITCH)]
    links = []
    places = dict[int, str]()
    notes: dict[str, list[str]] = {}
    for index, (host, group) in enumerate(zip(hosts, groups, strict=True)):
        node = f"node{index}"
        ids = _new_ids(host, node)
        devices += [
            msgspec.structs.replace(device, id=ids[device.id], node=node)
            for device in host.devices
            if ids[device.id] != FABRIC
        ]
        links += [
            msgspec.structs.replace(link, a=ids[link.a], b=ids[link.b])
            for link in host.links
            if ids[link.a] != ids[link.b]
        ]
        places |= _place(host, node, group, ids)
        for note in host.notes:
            notes.setdefault(note, []).append(node)
    return validate(
        Topology(
            name=f"{len(hosts)} hosts",
            devices=tuple(devices),
            links=tuple(links),
            ranks=tuple(places[rank] for rank in ranks),
            notes=(
                *_joined(notes, len(hosts)),
                "the network between the nodes is taken to be one non-blocking switch",
            ),
        )
    )


def _new_ids(host: Topology, node: str) -> dict[str, str]:
    """Return the id each device of a host gets in the cluster; switches outside it become one."""
    names = {device.node for device in host.devices if device.node is not None}
    if len(names) > 1:
        raise TopologyError(
            f"{host.name!r} describes {len(names)} nodes ({', '.join(sorted(names))}); "
            "give one description a host"
        )
    own = f"{names.pop()}/" if names else ""
    return {
        device.id: FABRIC
        if device.kind is DeviceKind.SWITCH and device.node is None
        else f"{node}/{device.id.removeprefix(own)}"
        for device in host.devices
    }


def _place(
    host: Topology, node: str, group: Sequence[int], ids: Mapping[str, str]
) -> dict[int, str]:
    if len(host.ranks) < len(group):
        raise TopologyError(
            f"{node} runs {len(group)} ranks but its description has places for "
            f"{len(host.ranks)}; probe it with that many ranks"
        )
    return {rank: ids[place] for rank, place in zip(group, host.ranks, strict=False)}


def _joined(notes: Mapping[str, Sequence[str]], num_hosts: int) -> list[str]:
    return [
        f"all nodes: {note}" if len(nodes) == num_hosts > 1 else f"{', '.join(nodes)}: {note}"
        for note, nodes in notes.items()
    ]
