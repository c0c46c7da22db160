"""A PCIe tree that fits the path classes someone printed for pairs of devices.

The classes nest: pairs under one switch, under one root, one host bridge, one NUMA node. Where the
printed ones do not, the tree is never nearer than what is printed, and the pairs are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations

from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind


class SmiClass(IntEnum):
    """The words of ``nvidia-smi topo -m`` for a way over PCIe; smaller is nearer."""

    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5


Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A GPU or NIC: its id, NUMA node and CPUs, the last two None or empty where not known."""

    device: str
    numa: int | None = None
    cpus: str = ""


@dataclass(frozen=True, slots=True)
class Tree:
    """CPUs, switches and links, the host bridge of each leaf, and the pairs that do not fit.

    `farther` are pairs that the tree puts farther apart than printed; `unplaced` are leaves of
    which nothing on PCIe is known, so that they hang on nothing. `host_bridges` lacks those of
    which no class is printed.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    host_bridges: Mapping[str, str]
    farther: tuple[tuple[Pair, SmiClass], ...]
    unplaced: tuple[str, ...]


def infer_tree(node: str, leaves: Sequence[Leaf], printed: Mapping[Pair, SmiClass]) -> Tree:
    """Return the tree of the PCIe devices of one host.

    Parameters
    ----------
    node : str
        The host's name, which ids start with.
    leaves : sequence of Leaf
        GPUs and NICs.
    printed : mapping
        The class of each pair of positions in `leaves`, smaller position first. Pairs may be
        missing, such as those for which NVLink was printed.

    Notes
    -----
    Groups are joined from the nearest class up, two at a time, where at least one pair of theirs
    is printed and none is printed farther (complete linkage). Groups of which no pair is printed
    share a NUMA node where their NUMA number says so, or their CPUs do and neither has a number.
    """
    groups = _Groups(leaves, printed)
    builder = _Builder(node)
    levels = [groups.at_most(level) for level in list(SmiClass)[:-1]]
    by_numa = groups.of_one_place()
    known = {i for pair in printed for i in pair}
    unplaced = []
    bridges: dict[str, str] = {}
    for group in by_numa:
        inside = [leaves[i] for i in group]
        has_place = any(leaf.cpus or leaf.numa is not None for leaf in inside)
        if not has_place and not known & set(group):
            unplaced += [leaf.device for leaf in inside]
            continue
        cpu = builder.add_cpu(inside)
        for bridge in _inside(levels[2], group):
            name = f"{cpu}/bridge{len(set(bridges.values()))}"
            bridges |= {leaves[i].device: name for i in bridge if i in known}
            for root in _inside(levels[1], bridge):
                builder.add_root(cpu, [[leaves[i] for i in s] for s in _inside(levels[0], root)])
    for a, b in combinations(builder.cpus, 2):
        builder.links.append(Link(a, b, LinkKind.UPI))
    of_leaf = [{i: n for n, group in enumerate(groups) for i in group} for groups in levels]
    farther = tuple(
        (pair, found)
        for pair, level in printed.items()
        if (found := _level(pair, of_leaf)) != level
    )
    return Tree(tuple(builder.devices), tuple(builder.links), bridges, farther, tuple(unplaced))


def _inside(groups: Sequence[Sequence[int]], whole: Sequence[int]) -> list[list[int]]:
    """Return the groups whose members are in `whole`, which they never straddle."""
    members = set(whole)
    return [list(group) for group in groups if group[0] in members]


def _level(pair: Pair, of_leaf: Sequence[Mapping[int, int]]) -> SmiClass:
    """Return the nearest class whose groups, given by leaf, hold both of the pair."""
    together = (
        level
        for level, group in zip(SmiClass, of_leaf, strict=False)
        if group[pair[0]] == group[pair[1]]
    )
    return next(together, SmiClass.SYS)


class _Groups:
    """Positions joined more and more; `_worst` holds the farthest class printed between two."""

    def __init__(self, leaves: Sequence[Leaf], printed: Mapping[Pair, SmiClass]) -> None:
        self._leaves = leaves
        self._members = {i: [i] for i in range(len(leaves))}
        self._worst: dict[int, dict[int, int]] = {i: {} for i in self._members}
        for (a, b), level in printed.items():
            self._worst[a][b] = self._worst[b][a] = level

    def at_most(self, level: SmiClass) -> list[list[int]]:
        """Join what `level` joins; return all groups, each in order, by their first member."""
        for a in list(self._members):
            while a in self._members:
                near = (b for b, worst in self._worst[a].items() if worst <= level)
                b = next(near, None)
                if b is None:
                    break
                self._join(min(a, b), max(a, b))
        return self._listed()

    def of_one_place(self) -> list[list[int]]:
        """Join groups of which nothing is printed but which NUMA node or CPUs show together."""
        for a, b in combinations(list(self._members), 2):
            if a in self._members and b in self._members and b not in self._worst[a]:
                ours, theirs = self._places(a), self._places(b)
                if ours & theirs and None not in ours | theirs:
                    self._join(a, b)
        return self._listed()

    def _places(self, group: int) -> set[int | str | None]:
        """Return the NUMA numbers of a group, its CPUs without one, or None where neither."""
        leaves = [self._leaves[i] for i in self._members[group]]
        numas = {leaf.numa for leaf in leaves if leaf.numa is not None}
        cpus = {leaf.cpus for leaf in leaves if leaf.cpus}
        return {*numas} or {*cpus} or {None}

    def _join(self, a: int, b: int) -> None:
        self._members[a] += self._members.pop(b)
        for other, worst in self._worst.pop(b).items():
            del self._worst[other][b]
            if other != a:
                joint = max(worst, self._worst[a].get(other, 0))
                self._worst[a][other] = self._worst[other][a] = joint

    def _listed(self) -> list[list[int]]:
        return sorted(sorted(group) for group in self._members.values())


class _Builder:
    def __init__(self, node: str) -> None:
        self.node = node
        self.devices: list[Device] = []
        self.links: list[Link] = []
        self.cpus: list[str] = []

    def add_cpu(self, leaves: Sequence[Leaf]) -> str:
        numas = {leaf.numa for leaf in leaves if leaf.numa is not None}
        numa = min(numas) if len(numas) == 1 else None
        device = f"{self.node}/numa{numa}"
        if numa is None or device in self.cpus:
            device = f"{self.node}/cpu{len(self.cpus)}"
        self.cpus.append(device)
        cpus = {leaf.cpus for leaf in leaves if leaf.cpus}
        attributes: dict[str, str | int | float | bool] = {"inferred": True}
        if len(cpus) == 1:
            attributes["cpus"] = cpus.pop()
        self.devices.append(Device(device, DeviceKind.CPU, self.node, numa, attributes))
        return device

    def add_root(self, cpu: str, groups: Sequence[Sequence[Leaf]]) -> None:
        """Hang what shares a PCIe root on the CPU: under one switch, or two rows of switches."""
        parent = cpu
        if len(groups) > 1:
            parent = self._add_switch(cpu)
        for group in groups:
            above = parent
            if len(groups) > 1 or len(group) > 1:
                above = self._add_switch(parent)
            self.links += [Link(leaf.device, above, LinkKind.PCIE) for leaf in group]

    def _add_switch(self, parent: str) -> str:
        count = sum(device.kind is DeviceKind.PCIE_SWITCH for device in self.devices)
        device = f"{self.node}/switch{count}"
        above = next(device for device in self.devices if device.id == parent)
        self.devices.append(
            Device(device, DeviceKind.PCIE_SWITCH, self.node, above.numa, {"inferred": True})
        )
        self.links.append(Link(device, parent, LinkKind.PCIE))
        return device
