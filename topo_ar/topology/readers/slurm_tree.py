"""What Slurm's topology files describe, whatever they are written in: switches, blocks, hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology, validate
from topo_ar.topology.wording import some

_NETWORK = "what the network is and how fast is not in the file; its links are entered as Ethernet"


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch, or a block of nodes: the line it is in, switches below it and nodes on it."""

    name: str
    line: int
    switches: Sequence[str] = ()
    nodes: Sequence[str] = ()


def tree(switches: Sequence[Switch], name: str, notes: Sequence[str] = ()) -> Topology:
    """Return a tree of switches with a host for each node; `name` is the file.

    Raises
    ------
    TopologyError
        If a switch is described twice or is above itself; the message names file and line.
    """
    known = _by_name(switches, name, "switch")
    said = [*notes, _NETWORK]
    missing: dict[str, int] = {}
    parents: dict[str, list[str]] = {}
    for switch in switches:
        for child in dict.fromkeys(switch.switches):
            parents.setdefault(child, []).append(switch.name)
            if child not in known:
                missing.setdefault(child, switch.line)
    _refuse_cycles(known, name)
    by_line: dict[int, list[str]] = {}
    for child, line in missing.items():
        by_line.setdefault(line, []).append(child)
    said += [
        f"line {line}: named but not described, so what hangs there is unknown: {some(children)}"
        for line, children in by_line.items()
    ]
    if several := [child for child, above in parents.items() if len(above) > 1]:
        said.append(f"switches below several others: {some(several)}")
    roots = [switch.name for switch in switches if switch.name not in parents]
    if len(roots) > 1:
        said.append(f"what joins the top switches {some(roots)} is not in the file")
    links = [
        Link(switch.name, child, LinkKind.ETHERNET)
        for switch in switches
        for child in dict.fromkeys(switch.switches)
    ]
    devices = [Device(child, DeviceKind.SWITCH) for child in (*known, *missing)]
    return _with_hosts(switches, devices, links, said, name)


def blocks(
    switches: Sequence[Switch], sizes: Sequence[int], name: str, notes: Sequence[str] = ()
) -> Topology:
    """Return a switch for each block, with a host for each node; `name` is the file.

    Raises
    ------
    TopologyError
        If a block is described twice; the message names file and line.
    """
    _by_name(switches, name, "block")
    said = [*notes, _NETWORK, "what joins the blocks, and what is inside one, is not in the file"]
    if sizes:
        said.append(f"Slurm places jobs in blocks of {' or '.join(map(str, sizes))} nodes")
        by_size: dict[int, list[str]] = {}
        for block in switches:
            by_size.setdefault(len(block.nodes), []).append(block.name)
        said += [
            f"{size} nodes in {some(names)}, but the smallest block size is {sizes[0]}"
            for size, names in by_size.items()
            if size != sizes[0]
        ]
    devices = [
        Device(block.name, DeviceKind.SWITCH, attributes={"slurm_block": True})
        for block in switches
    ]
    return _with_hosts(switches, devices, [], said, name)


def _by_name(switches: Sequence[Switch], name: str, what: str) -> dict[str, Switch]:
    known: dict[str, Switch] = {}
    for switch in switches:
        if switch.name in known:
            raise TopologyError(
                f"{name}:{switch.line}: {what} {switch.name} is described in line "
                f"{known[switch.name].line} already; each has one line"
            )
        known[switch.name] = switch
    return known


def _refuse_cycles(known: Mapping[str, Switch], name: str) -> None:
    """Walk down from every switch; a switch that is met below itself is an error."""
    done = set[str]()
    for start in known:
        way: dict[str, int] = {}
        pending = [(start, False)]
        while pending:
            here, is_left = pending.pop()
            if is_left:
                del way[here]
                done.add(here)
            elif here in way:
                round_trip = [*list(way)[list(way).index(here) :], here]
                raise TopologyError(
                    f"{name}:{known[here].line}: switch {here} is above itself: "
                    f"{' > '.join(round_trip[:20])}; a tree has no such way"
                )
            elif here in known and here not in done:
                way[here] = len(way)
                pending.append((here, True))
                pending += [(child, False) for child in known[here].switches]


def _with_hosts(
    switches: Sequence[Switch],
    devices: list[Device],
    links: list[Link],
    notes: list[str],
    name: str,
) -> Topology:
    places: dict[str, list[str]] = {}
    for switch in switches:
        for node in switch.nodes:
            places.setdefault(node, []).append(switch.name)
    for node, above in places.items():
        host = f"{node}/host"
        devices.append(Device(host, DeviceKind.HOST, node))
        links += [Link(host, switch, LinkKind.ETHERNET) for switch in dict.fromkeys(above)]
    several = [node for node, above in places.items() if len(above) > 1]
    if several:
        notes.append(f"nodes in several places: {some(several)}")
    notes.append("what is inside the nodes is not in the file, so there are no ranks")
    return validate(Topology(name, tuple(devices), tuple(links), (), tuple(notes)))
