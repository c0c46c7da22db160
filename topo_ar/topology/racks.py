"""Racks: the nodes behind one leaf switch, or behind the leaf switches of one rail group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topo_ar.topology.model import DeviceKind, Link, Topology
from topo_ar.topology.ports import (
    NETWORK_KINDS,
    NETWORK_SECONDS,
    Rate,
    nominal_of,
    payload_of,
)


@dataclass(frozen=True, slots=True)
class Rack:
    """Nodes behind one leaf switch: their positions in ``Levels.nodes``, and all its uplinks.

    Where the NICs of a node hang on several leaf switches (rails), those count as one. `uplink` is
    what all links of the leaf to the rest of the fabric carry together, in one direction.
    """

    name: str
    nodes: tuple[int, ...]
    uplink: Rate


def find_racks(
    nics: Sequence[Sequence[str]], topology: Topology, links: Mapping[str, Sequence[Link]]
) -> tuple[Rack, ...]:
    """Return the racks of nodes that have these NICs, in the order of their first node.

    Empty where there are fewer than two, a node hangs on no switch, or the rate of an uplink is
    not known.
    """
    switches = {d.id for d in topology.devices if d.kind is DeviceKind.SWITCH}
    leaves = [list(dict.fromkeys(_switches_of(each, switches, links))) for each in nics]
    if len(switches) < 2 or not all(leaves):
        return ()
    rack_of: dict[str, int] = {}
    members: dict[int, list[str]] = {}
    for own in leaves:
        joined = {rack_of[leaf] for leaf in own if leaf in rack_of}
        number = min(joined, default=len(rack_of))
        gathered = list(own)
        for other in sorted(joined):
            gathered += members.pop(other)
        members[number] = list(dict.fromkeys(gathered))
        rack_of |= dict.fromkeys(members[number], number)
    nodes: dict[int, list[int]] = {}
    for index, own in enumerate(leaves):
        nodes.setdefault(rack_of[own[0]], []).append(index)
    uplinks = {number: _uplink(members[number], switches, links) for number in nodes}
    return tuple(
        Rack(_name(members[number]), tuple(inside), uplink)
        for number, inside in nodes.items()
        if len(nodes) > 1 and all(uplinks.values()) and (uplink := uplinks[number]) is not None
    )


def _switches_of(
    nics: Sequence[str], switches: set[str], links: Mapping[str, Sequence[Link]]
) -> list[str]:
    return [
        far
        for nic in nics
        for link in links.get(nic, ())
        if link.kind in NETWORK_KINDS and (far := link.b if link.a == nic else link.a) in switches
    ]


def _uplink(
    leaves: Sequence[str], switches: set[str], links: Mapping[str, Sequence[Link]]
) -> Rate | None:
    own = set(leaves)
    up = [
        link
        for leaf in leaves
        for link in links.get(leaf, ())
        if (far := link.b if link.a == leaf else link.a) in switches and far not in own
    ]
    payloads = [figure for link in up if (figure := payload_of(link))]
    nominals = [figure for link in up if (figure := nominal_of(link))]
    if not up or len(payloads) < len(up):
        return None
    seconds = [link.latency.value for link in up if link.latency is not None]
    return Rate(
        nominal=sum(figure.value for figure in nominals),
        payload=sum(figure.value for figure in payloads),
        latency=2 * max(seconds) if seconds else NETWORK_SECONDS,
        source=payloads[0].source,
    )


def _name(leaves: Sequence[str]) -> str:
    return leaves[0] if len(leaves) == 1 else f"{leaves[0]} to {leaves[-1]}"
