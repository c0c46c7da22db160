"""Descriptions of single hosts joined into the topology of a job."""

from collections.abc import Mapping, Sequence

import msgspec

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Device, DeviceKind, Topology, validate
from topo_ar.topology.readers import Description

FABRIC = "fabric"


def combine(descriptions: Sequence[Description]) -> Topology:
    """Return the one topology that several descriptions make.

    Descriptions of one machine are merged. Where one of them is a fabric, the machines are joined
    through it.

    Raises
    ------
    TopologyError
        If there are none, or they do not fit each other.
    """
    if len(descriptions) != 1:
        raise TopologyError(
            f"{len(descriptions)} descriptions cannot be made one; give one for now"
        )
    return descriptions[0].topology


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
