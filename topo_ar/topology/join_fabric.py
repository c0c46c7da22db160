"""Many machines joined through a description of the network between them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from topo_ar.errors import TopologyError
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    Topology,
    validate,
)
from topo_ar.topology.ports import NETWORK_KINDS, carries_data
from topo_ar.topology.wording import some

# What a description of a machine says of the network before a fabric takes its place.
_REPLACED = "the network between the nodes is taken to be"


def join_fabric(machines: Mapping[str, Topology], fabric: Topology) -> Topology:
    """Return one topology of machines whose NICs hang on the switches that a fabric names.

    Parameters
    ----------
    machines : mapping
        The description of each host, by its name. A name may be a pattern such as ``*`` or
        ``dgx-*``: one description then stands for all hosts of the fabric that it fits and that
        have no description of their own, except those whose name the fabric does not know.
    fabric : Topology
        Switches, hosts and perhaps their NICs, as `ibnetdiscover` or Slurm's files give them.

    Returns
    -------
    Topology
        Ranks go host by host in the fabric's order. Where the fabric names NICs, those of a machine
        are matched by GUID, then name, then order; NICs that it lacks get the attribute ``data``
        false. Hosts without a description are left out, and so are machines that are no hosts of
        the fabric; the notes list both.

    Raises
    ------
    TopologyError
        If no machine is a host of the fabric, or a description is of several hosts.
    """
    hosts = _hosts(fabric)
    chosen, unused = _choose(machines, hosts)
    if not chosen:
        raise TopologyError(
            f"no host of {fabric.name!r} ({some(list(hosts))}) is among the machines "
            f"({some(list(machines))}); names must be equal, or give a pattern such as '*'"
        )
    draft = _Draft()
    draft.devices += [device for device in fabric.devices if device.kind is DeviceKind.SWITCH]
    switches = {device.id for device in draft.devices}
    between = [link for link in fabric.links if {link.a, link.b} <= switches]
    draft.links += between
    templates: dict[int, _Template] = {}
    for host, machine in chosen.items():
        if id(machine) not in templates:
            templates[id(machine)] = _Template.of(machine)
        draft.add(host, templates[id(machine)], hosts[host])
    left_out = [host for host in hosts if host not in chosen]
    notes = [
        *(
            ["rates between switches are not known; there the network is taken to be non-blocking"]
            if any(link.nominal is None for link in between)
            else []
        ),
        *_counted(left_out, f"hosts of {fabric.name} have no description and are left out"),
        *_counted(unused, f"machines are no hosts of {fabric.name} and are left out"),
        *(f"{what}: {some(where)}" for what, where in draft.doubts.items()),
        *(f"{fabric.name}: {note}" for note in fabric.notes),
        *(
            f"{topology.name}: {note}"
            for topology in {id(t): t for t in machines.values()}.values()
            for note in topology.notes
            if not note.startswith(_REPLACED)
        ),
    ]
    return validate(
        Topology(
            f"{len(chosen)} hosts on {fabric.name}",
            tuple(draft.devices),
            tuple(draft.links),
            tuple(draft.ranks),
            tuple(notes),
        )
    )


@dataclass(slots=True)
class _Host:
    """A host as the fabric has it: its NICs, and the links of each NIC, or of itself, to switches.

    `links` have the switch as their far end `b`.
    """

    is_named: bool = True
    nics: list[Device] = field(default_factory=list)
    links: dict[str, list[Link]] = field(default_factory=dict)
    id: str = ""


def _hosts(fabric: Topology) -> dict[str, _Host]:
    hosts: dict[str, _Host] = {}
    owner: dict[str, _Host] = {}
    switches = set[str]()
    for device in fabric.devices:
        if device.kind is DeviceKind.SWITCH:
            switches.add(device.id)
        elif device.node is not None and device.kind in (DeviceKind.HOST, DeviceKind.NIC):
            host = hosts.setdefault(device.node, _Host())
            owner[device.id] = host
            if device.kind is DeviceKind.NIC:
                host.nics.append(device)
            else:
                host.id = device.id
                host.is_named = device.attributes.get("named", True) is not False
    for link in fabric.links:
        for near, far in ((link.a, link.b), (link.b, link.a)):
            if near in owner and far in switches:
                turned = link if link.a == near else _with_ends(link, near, far)
                owner[near].links.setdefault(near, []).append(turned)
    return hosts


def _choose(
    machines: Mapping[str, Topology], hosts: Mapping[str, _Host]
) -> tuple[dict[str, Topology], list[str]]:
    """Return the machine of each host that has one, and the machines that are no host's."""
    patterns = [name for name in machines if set(name) & set("*?[")]
    given = {_short(name): name for name in machines if name not in patterns}
    chosen: dict[str, Topology] = {}
    used = set[str]()
    for host, what in hosts.items():
        name = host if host in machines else given.get(_short(host))
        if name is None and what.is_named:
            name = next((pattern for pattern in patterns if fnmatchcase(host, pattern)), None)
        if name is not None:
            chosen[host] = machines[name]
            used.add(name)
    return chosen, [name for name in machines if name not in used and name not in patterns]


def _short(name: str) -> str:
    """Return the name without its domain, in lower case."""
    return name.partition(".")[0].lower()


@dataclass(frozen=True, slots=True)
class _Template:
    """A machine with ids that lack the host's name, ready to be put down many times."""

    devices: tuple[tuple[str, Device], ...]
    links: tuple[tuple[str, str, Link], ...]
    ranks: tuple[str, ...]
    nics: tuple[tuple[str, Device], ...]
    ports: Mapping[str, Link]

    @staticmethod
    def of(machine: Topology) -> "_Template":
        """Return the template of a machine; what it takes for its network is left away."""
        names = {device.node for device in machine.devices if device.node is not None}
        if len(names) > 1:
            raise TopologyError(
                f"{machine.name!r} describes {len(names)} nodes; give one description a host"
            )
        own = f"{names.pop()}/" if names else ""
        outside = {d.id for d in machine.devices if d.kind is DeviceKind.SWITCH and d.node is None}
        inside = [(d.id.removeprefix(own), d) for d in machine.devices if d.id not in outside]
        ports: dict[str, Link] = {}
        links = []
        for link in machine.links:
            if link.kind in NETWORK_KINDS and {link.a, link.b} & outside:
                near = link.a if link.b in outside else link.b
                ports.setdefault(near.removeprefix(own), link)
            elif not {link.a, link.b} & outside:
                links.append((link.a.removeprefix(own), link.b.removeprefix(own), link))
        return _Template(
            devices=tuple(inside),
            links=tuple(links),
            ranks=tuple(rank.removeprefix(own) for rank in machine.ranks),
            nics=tuple(
                (name, d) for name, d in inside if d.kind is DeviceKind.NIC and carries_data(d)
            ),
            ports=ports,
        )


@dataclass(slots=True)
class _Draft:
    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    doubts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, template: _Template, host: _Host) -> None:
        """Put a machine down under a host's name, its NICs on the switches of the fabric."""
        cables = self._cables(name, template, host)
        for local, device in template.devices:
            attributes = device.attributes
            if local in cables:
                attributes = attributes | cables[local].attributes
            elif device.kind is DeviceKind.NIC and carries_data(device):
                attributes = attributes | {"data": False}
            self.devices.append(
                Device(f"{name}/{local}", device.kind, name, device.numa, attributes)
            )
        self.links += [
            _with_ends(link, f"{name}/{a}", f"{name}/{b}") for a, b, link in template.links
        ]
        for local, cable in cables.items():
            port = template.ports.get(local)
            self.links += [self._port(f"{name}/{local}", link, port) for link in cable.links]
        self.ranks += [f"{name}/{rank}" for rank in template.ranks]

    def _cables(self, name: str, template: _Template, host: _Host) -> dict[str, "_Cable"]:
        """Return for each NIC of the machine the fabric's links it has."""
        if not host.nics:
            links = host.links.get(host.id, [])
            if not links:
                self._doubt("hosts of the fabric hang on no switch", name)
            # A file without NICs says where the host hangs; each of its NICs has a cable there.
            return {local: _Cable({}, links) for local, _ in template.nics if links}
        pairs = self._pairs(name, template, host)
        if len(pairs) < len(template.nics):
            missing = len(template.nics) - len(pairs)
            self._doubt(f"{missing} NICs of a host are not in the fabric and carry no data", name)
        if len(pairs) < len(host.nics):
            more = len(host.nics) - len(pairs)
            self._doubt(f"{more} NICs of the fabric are not in the description of a host", name)
        cables = {}
        for local, nic in pairs.items():
            found = {k: v for k, v in nic.attributes.items() if k in ("guid", "system_guid")}
            cables[local] = _Cable(found, host.links.get(nic.id, []))
        return cables

    def _pairs(self, name: str, template: _Template, host: _Host) -> dict[str, Device]:
        pairs: dict[str, Device] = {}
        mine, theirs = dict(template.nics), {nic.id: nic for nic in host.nics}
        for key in ("guid", "name"):
            known = {n.attributes[key]: i for i, n in theirs.items() if key in n.attributes}
            for local, nic in list(mine.items()):
                far = known.get(nic.attributes.get(key, ""))
                if far in theirs:
                    pairs[local] = theirs.pop(far)
                    del mine[local]
        if mine and theirs:
            self._doubt("NICs are matched to the fabric's in order, not by GUID or name", name)
            order = sorted(theirs.values(), key=lambda nic: _natural(nic.id))
            pairs |= dict(zip(mine, order, strict=False))
        return pairs

    def _port(self, nic: str, link: Link, port: Link | None) -> Link:
        """Return a NIC's link with what both know; the fabric knows what rate is active."""
        if port is None:
            return _with_ends(link, nic, link.b)
        nominal, effective = link.nominal, link.effective
        if nominal is None:
            nominal, effective = port.nominal, port.effective
        elif port.nominal is None or _agree(nominal, port.nominal):
            effective = effective or port.effective
        else:
            self._doubt(
                f"a port is {nominal.value * 8e-9:g} Gbit/s in the fabric, "
                f"{port.nominal.value * 8e-9:g} in the description; the fabric's is taken",
                nic,
            )
        kind = link.kind if link.nominal is not None else port.kind
        return Link(nic, link.b, kind, nominal, effective, link.latency or port.latency, link.count)

    def _doubt(self, what: str, where: str) -> None:
        self.doubts.setdefault(what, []).append(where)


@dataclass(frozen=True, slots=True)
class _Cable:
    attributes: dict[str, str | int | float | bool]
    links: Sequence[Link]


def _with_ends(link: Link, a: str, b: str) -> Link:
    return Link(a, b, link.kind, link.nominal, link.effective, link.latency, link.count)


def _agree(one: Figure, other: Figure) -> bool:
    return abs(one.value - other.value) <= 0.01 * max(one.value, other.value)


def _natural(text: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", text)
    ]


def _counted(names: Sequence[str], what: str) -> list[str]:
    return [f"{len(names)} {what}: {some(names)}"] if names else []
