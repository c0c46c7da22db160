"""What differs between two topologies, or between the nodes of one.

Names, addresses and the order of devices do not count; how many there are, how they are linked, at
which rate, on which NUMA node, and in which path class, does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Device, DeviceKind, Link, Topology
from topo_ar.topology.shapes import alike_nodes
from topo_ar.topology.tiers import switch_tiers
from topo_ar.topology.ways import Ways
from topo_ar.units import format_rate

_Value = TypeVar("_Value", str, int | None)
_WORDS = {"cpu": "CPU", "gpu": "GPU", "nic": "NIC", "nvswitch": "NVSwitch"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same.

    Attributes
    ----------
    nodes : tuple of str
        The nodes, on the second side, that differ in this; empty where it is not about a node.
    what : str
        ``nodes``, ``devices``, ``links``, ``rates``, ``numa``, ``paths``, ``nearest_nics``,
        ``ranks`` or ``network``.
    items : tuple of str
        Which device kind, links, GPUs, pairs or switch tier; GPUs are numbered as ranks are.
    a, b
        The value on either side; None where it is missing.
    says : str
        A sentence for a person.
    """

    nodes: tuple[str, ...]
    what: str
    items: tuple[str, ...]
    a: Any
    b: Any
    says: str


def compare(a: Topology, b: Topology) -> tuple[Difference, ...]:
    """Return what differs between two topologies, seen from `a`.

    Nodes are matched by name where both have it, the others in order.
    """
    sides = _Sides(a, b)
    names_a, names_b = list(sides.first.members), list(sides.second.members)
    common = [name for name in names_a if name in sides.second.members]
    rest_a = [name for name in names_a if name not in sides.second.members]
    rest_b = [name for name in names_b if name not in sides.first.members]
    matched = [*((name, name) for name in common), *zip(rest_a, rest_b, strict=False)]
    found = []
    if len(names_a) != len(names_b):
        says = f"{len(names_a)} nodes in {a.name}, {len(names_b)} in {b.name}"
        left = rest_b[len(rest_a) :] or rest_a[len(rest_b) :]
        if left:
            says += f"; without a partner: {_listed(left)}"
        found.append(Difference((), "nodes", ("count",), len(names_a), len(names_b), says))
    found += sides.of_nodes(matched, a.name, b.name)
    found += _ranks(a, b, dict(matched))
    found += _network(a, b)
    return tuple(found)


def compare_nodes(topology: Topology, a: str, b: str) -> tuple[Difference, ...]:
    """Return what differs between two nodes of one topology, seen from `a`.

    Raises
    ------
    TopologyError
        If one of them is no node.
    """
    sides = _Sides(topology, topology)
    for name in (a, b):
        if name not in sides.first.members:
            raise TopologyError(
                f"{topology.name!r} has no node {name!r}; its nodes are "
                f"{_listed(list(sides.first.members)) or 'none'}"
            )
    return tuple(sides.of_nodes([(a, b)], a, b))


def odd_nodes(topology: Topology) -> tuple[tuple[str, ...], tuple[Difference, ...]]:
    """Return the nodes of the most common make, and what differs on each other make.

    Raises
    ------
    TopologyError
        If there is no node.
    """
    groups = sorted(alike_nodes(topology), key=lambda group: -len(group.nodes))
    if not groups:
        raise TopologyError(f"{topology.name!r} has no node, so there is nothing to compare")
    usual, *others = groups
    sides = _Sides(topology, topology)
    pairs = [(usual.nodes[0], node) for group in others for node in group.nodes]
    found = sides.of_nodes(pairs, usual.nodes[0], "")
    odd = {node for difference in found for node in difference.nodes}
    alike = tuple(node for node in sides.first.members if node not in odd)
    return alike, tuple(found)


@dataclass(frozen=True, slots=True)
class _Profile:
    """What counts of a node. Keys are in the words of the messages."""

    devices: Counter[str]
    links: Counter[str]
    rates: Mapping[str, Counter[str]]
    numa: Mapping[str, int | None]
    paths: Mapping[str, str]
    nearest: Mapping[str, str]


class _Side:
    """One topology and the profile of each make of its nodes."""

    def __init__(self, topology: Topology) -> None:
        self.members: dict[str, list[Device]] = {}
        for device in topology.devices:
            if device.node is not None:
                self.members.setdefault(device.node, []).append(device)
        groups = alike_nodes(topology)
        self.make = {node: group.nodes[0] for group in groups for node in group.nodes}
        self._ways = Ways(topology, [group.nodes[0] for group in groups])
        wanted = {device.id for group in groups for device in group.devices[0]}
        self._links: dict[str, list[Link]] = {}
        nodes = {device.id: device.node for device in topology.devices}
        for link in topology.links:
            for node in {nodes[end] for end in (link.a, link.b) if end in wanted}:
                self._links.setdefault(node or "", []).append(link)
        self._known: dict[str, _Profile] = {}

    def profile(self, make: str) -> _Profile:
        """Return the profile of the node that stands for its make."""
        if make not in self._known:
            self._known[make] = self._profile(make)
        return self._known[make]

    def _profile(self, node: str) -> _Profile:
        devices = self.members[node]
        links = self._links.get(node, [])
        rates: dict[str, Counter[str]] = {}
        for link in links:
            rates.setdefault(_link_name(link), Counter())[_rates(link)] += 1
        gpus = [d.id for d in devices if d.kind is DeviceKind.GPU]
        pairs = self._ways.gpu_pairs(devices)
        ordered = dict.fromkeys([*(end for p in pairs for end in (p["a"], p["b"])), *gpus])
        number = {gpu: f"gpu{i}" for i, gpu in enumerate(ordered)}
        nearest = self._ways.nearest_nics(devices)
        places = {device: number.get(device, f"place {i}") for i, device in enumerate(nearest)}
        return _Profile(
            Counter(_WORDS.get(d.kind, d.kind.replace("_", " ")) for d in devices),
            Counter(_link_name(link) for link in links),
            rates,
            {number[d.id]: d.numa for d in devices if d.id in number},
            {
                f"{number[p['a']]} - {number[p['b']]}": _way(p["nvidia_class"], p["path_class"])
                for p in pairs
            },
            {
                places[device]: f"{_count(len(found['nics']), 'NIC')} at {found['path_class']}"
                if found["nics"]
                else "no NIC"
                for device, found in nearest.items()
            },
        )


class _Sides:
    """Two topologies whose nodes are compared make by make."""

    def __init__(self, a: Topology, b: Topology) -> None:
        self.first = _Side(a)
        self.second = self.first if b is a else _Side(b)

    def of_nodes(
        self, pairs: Sequence[tuple[str, str]], a_name: str, b_name: str
    ) -> list[Difference]:
        """Return the differences of pairs of nodes; equal ones are said once for all nodes."""
        makes: dict[tuple[str, str], list[str]] = {}
        for a, b in pairs:
            makes.setdefault((self.first.make[a], self.second.make[b]), []).append(b)
        found = []
        for (a, b), nodes in makes.items():
            one, other = self.first.profile(a), self.second.profile(b)
            each = nodes[0] if len(nodes) == 1 else f"each of {len(nodes)} nodes"
            found += [
                Difference(tuple(nodes), what, items, x, y, says)
                for what, items, x, y, says in _between(one, other, a_name, b_name or each)
            ]
        return found


_Found = tuple[str, tuple[str, ...], Any, Any, str]


def _between(a: _Profile, b: _Profile, a_name: str, b_name: str) -> Iterator[_Found]:
    for kind in a.devices | b.devices:
        x, y = a.devices[kind], b.devices[kind]
        if x != y:
            says = f"{b_name} has {_more(y - x, kind)} than {a_name}: {y}, not {x}"
            yield "devices", (kind,), x, y, says
    for name in a.links | b.links:
        x, y = a.links[name], b.links[name]
        if x != y:
            says = f"{b_name} has {_count(y, f'{name} link')}, {a_name} has {x}"
            yield "links", (name,), x, y, says
        elif a.rates[name] != b.rates[name]:
            ours, theirs = a.rates[name] - b.rates[name], b.rates[name] - a.rates[name]
            says = f"{name}: {_tally(theirs)} in {b_name}, {_tally(ours)} in {a_name}"
            yield "rates", (name,), dict(ours), dict(theirs), says
    yield from _changes("numa", "NUMA node of", a.numa, b.numa, (a_name, b_name))
    yield from _changes("paths", "way", a.paths, b.paths, (a_name, b_name))
    yield from _changes("nearest_nics", "nearest NICs of", a.nearest, b.nearest, (a_name, b_name))


def _changes(
    what: str,
    words: str,
    ours: Mapping[str, _Value],
    theirs: Mapping[str, _Value],
    names: tuple[str, str],
) -> Iterator[_Found]:
    """Yield each change of a value once, with all that it happened to."""
    # Where one side has fewer, that is said before, and equal numbers are not the same devices.
    if ours.keys() != theirs.keys():
        return
    changes: dict[tuple[_Value, _Value], list[str]] = {}
    for item, x in ours.items():
        if x != theirs[item]:
            changes.setdefault((x, theirs[item]), []).append(item)
    for (x, y), items in changes.items():
        here, there = ("unknown" if value is None else value for value in (x, y))
        says = f"{words} {_listed(items)}: {there} in {names[1]}, {here} in {names[0]}"
        yield what, tuple(items), x, y, says


def _ranks(a: Topology, b: Topology, partner: Mapping[str, str]) -> Iterator[Difference]:
    if len(a.ranks) != len(b.ranks):
        says = f"{len(a.ranks)} ranks in {a.name}, {len(b.ranks)} in {b.name}"
        yield Difference((), "ranks", ("count",), len(a.ranks), len(b.ranks), says)
        return
    nodes = {device.id: device.node for device in (*a.devices, *b.devices)}
    for rank, (x, y) in enumerate(zip(a.ranks, b.ranks, strict=True)):
        here, there = nodes[x], nodes[y]
        if here is not None and partner.get(here) != there:
            says = f"rank {rank} is on {there} in {b.name}, on {here} in {a.name}"
            yield Difference((), "ranks", (f"rank {rank}",), here, there, says)


def _network(a: Topology, b: Topology) -> Iterator[Difference]:
    tiers_a, tiers_b = switch_tiers(a), switch_tiers(b)
    for number in range(max(len(tiers_a), len(tiers_b))):
        x, y = (len(t[number]) if number < len(t) else 0 for t in (tiers_a, tiers_b))
        if x != y:
            says = f"tier {number + 1} of the network: {y} switches in {b.name}, {x} in {a.name}"
            yield Difference((), "network", (f"switches of tier {number + 1}",), x, y, says)
    links_a, links_b = _trunks(a, tiers_a), _trunks(b, tiers_b)
    for name in links_a | links_b:
        x, y = links_a[name], links_b[name]
        if x != y:
            says = f"{name}: {y} in {b.name}, {x} in {a.name}"
            yield Difference((), "network", (name,), x, y, says)


def _trunks(topology: Topology, tiers: Sequence[Sequence[str]]) -> Counter[str]:
    """Return how many links there are between tiers, by tiers and rates."""
    tier = {switch: number + 1 for number, names in enumerate(tiers) for switch in names}
    return Counter(
        f"{_link_name(link)} {_rates(link)} between tiers {low} and {high}"
        for link in topology.links
        if link.a in tier and link.b in tier
        for low, high in [sorted((tier[link.a], tier[link.b]))]
    )


def _link_name(link: Link) -> str:
    return link.kind.value + (f" x{link.count}" if link.count > 1 else "")


def _rates(link: Link) -> str:
    rates = [
        f"{format_rate(figure.value)} {name}"
        for figure, name in ((link.nominal, "nominal"), (link.effective, "effective"))
        if figure
    ]
    return ", ".join(rates) or "rate not known"


def _way(nvidia: str | None, nccl: str | None) -> str:
    return f"{nvidia or '-'} (NCCL {nccl or '-'})"


def _tally(counts: Counter[str]) -> str:
    return "; ".join(f"{number} at {what}" for what, number in counts.items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _more(number: int, kind: str) -> str:
    size = abs(number)
    plural = kind if size == 1 else f"{kind}es" if kind.endswith("ch") else f"{kind}s"
    return f"{'one' if size == 1 else size} {plural} {'more' if number > 0 else 'less'}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
