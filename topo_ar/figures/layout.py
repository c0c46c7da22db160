"""Where the parts of a topology go in its drawing; nothing here draws."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from topo_ar.errors import ConfigError
from topo_ar.figures.style import Record
from topo_ar.units import format_rate

MAX_NODES = 4
# Heights of the drawing's rows, from the bottom up.
HEIGHTS = {
    "spine": -1.45,
    "leaf": -0.65,
    "node_low": 0.0,
    "nic": 0.55,
    "memory_low": 1.2,
    "memory_high": 1.55,
    "device": 2.2,
    "switch_low": 2.95,
    "switch_high": 3.3,
}
_GAP = 0.6


@dataclass(frozen=True, slots=True)
class Line:
    """A link from one point to another."""

    kind: str
    xs: tuple[float, float]
    ys: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A device or a switch around a point."""

    x: float
    y: float
    kind: str
    text: str
    width: float = 0.84


@dataclass(slots=True)
class Node:
    """One node of the drawing; `bar` is what its devices share: low, high and its text."""

    title: str
    left: float
    width: float
    bar: tuple[float, float, str] | None = None
    devices: list[Box] = field(default_factory=list)
    links: list[Line] = field(default_factory=list)
    arcs: list[Line] = field(default_factory=list)


@dataclass(slots=True)
class Cluster:
    """All that is drawn, and its extent; `high` is the top of the nodes.

    `num_nodes` counts the nodes that there are, drawn or not.
    """

    nodes: list[Node]
    switches: list[Box]
    links: list[Line]
    width: float
    low: float
    high: float
    num_nodes: int
    is_folded: bool


class _Parts:
    """A topology by parts: devices by id and node, links by device, ranks by device."""

    def __init__(self, topology: Record) -> None:
        try:
            self.devices = {device["id"]: device for device in topology["devices"]}
            self.neighbours: dict[str, list[tuple[str, dict[str, Any]]]] = {
                name: [] for name in self.devices
            }
            for link in topology["links"]:
                self.neighbours[link["a"]].append((link["b"], link))
                self.neighbours[link["b"]].append((link["a"], link))
            self.ranks: dict[str, list[int]] = {}
            for rank, name in enumerate(topology.get("ranks", ())):
                self.ranks.setdefault(name, []).append(rank)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is not a topology in JSON: {error!r}") from error
        names = (device.get("node") for device in self.devices.values())
        self.nodes = [name for name in dict.fromkeys(names) if name is not None]

    def of(self, node: str, *kinds: str) -> list[str]:
        """Return the devices of a node that are of one of `kinds`."""
        return [
            name
            for name, device in self.devices.items()
            if device.get("node") == node and device["kind"] in kinds
        ]

    def make(self, node: str) -> tuple[object, ...]:
        """Return what equal nodes have in common: kinds of devices, kinds and rates of links."""
        members = [name for name in self.devices if self.devices[name].get("node") == node]
        kinds = sorted(self.devices[name]["kind"] for name in members)
        links = sorted(_link_make(link) for name in members for _, link in self.neighbours[name])
        return (
            tuple(kinds),
            tuple(links),
            tuple(len(self.ranks.get(name, ())) for name in members),
        )

    def nearest_nics(self, device: str, node: str) -> list[str]:
        """Return the NICs of the node that are the fewest steps over PCIe and sockets away."""
        steps = {device: 0}
        queue = deque([device])
        while queue:
            here = queue.popleft()
            for there, link in self.neighbours[here]:
                inside = self.devices[there].get("node") == node
                passable = self.devices[there]["kind"] != "gpu" and link["kind"] != "nvlink"
                if inside and passable and there not in steps:
                    steps[there] = steps[here] + 1
                    queue.append(there)
        nics = [nic for nic in self.of(node, "nic") if nic in steps]
        fewest = min((steps[nic] for nic in nics), default=0)
        return [nic for nic in nics if steps[nic] == fewest]


def arrange(topology: Record) -> Cluster:
    """Return the drawing of a topology, in units of about one device's width.

    Raises
    ------
    ConfigError
        If `topology` is not the JSON form of a Topology.
    """
    parts = _Parts(topology)
    makes: dict[tuple[object, ...], list[str]] = {}
    for name in parts.nodes:
        makes.setdefault(parts.make(name), []).append(name)
    is_folded = len(parts.nodes) > MAX_NODES
    groups = list(makes.values())[:MAX_NODES] if is_folded else [[name] for name in parts.nodes]
    nodes: list[Node] = []
    spots: dict[str, tuple[float, float]] = {}
    left = 0.0
    for names in groups:
        node, places = _arrange_node(parts, names, left)
        nodes.append(node)
        spots |= places
        left += node.width + _GAP
    width = max(left - _GAP, 1.0)
    switches, links = _arrange_switches(parts, spots, width)
    low = min([HEIGHTS["node_low"], *(switch.y - 0.25 for switch in switches)])
    tall = any(node.arcs or (node.bar and node.bar[1] == HEIGHTS["switch_high"]) for node in nodes)
    high = HEIGHTS["switch_high" if tall else "device"] + (0.25 if tall else 0.5)
    return Cluster(nodes, switches, links, width, low, high, len(parts.nodes), is_folded)


def _arrange_node(
    parts: _Parts, names: list[str], left: float
) -> tuple[Node, dict[str, tuple[float, float]]]:
    """Place the devices of the first of some equal nodes; return it and where its NICs are."""
    name = names[0]
    gpus = parts.of(name, "gpu")
    devices = gpus or [d for d in parts.of(name, "cpu") if d in parts.ranks]
    devices.sort(key=lambda device: parts.ranks.get(device, [len(parts.devices)]))
    nics = _ordered_nics(parts, name, devices)
    width = max(2.2, max(len(devices), len(nics)) + 0.3)
    title = name if len(names) == 1 else f"{name} (1 of {len(names)} equal nodes)"
    if len(names) > 1:
        width = max(width, 0.13 * len(title) + 0.4)
    node = Node(title, left, width)
    spots = _row(devices, left, width, HEIGHTS["device"]) | _row(nics, left, width, HEIGHTS["nic"])
    for device in devices:
        node.devices.append(
            Box(*spots[device], parts.devices[device]["kind"], _text(parts, device))
        )
    for nic in nics:
        node.devices.append(Box(*spots[nic], "nic", _nic_text(parts, nic)))
    _join(parts, name, node, devices, spots)
    return node, {nic: spots[nic] for nic in nics}


def _ordered_nics(parts: _Parts, node: str, devices: list[str]) -> list[str]:
    """Return the NICs of a node such that each is below the devices it is nearest to."""
    below: dict[str, list[int]] = {nic: [] for nic in parts.of(node, "nic")}
    for place, device in enumerate(devices):
        for nic in parts.nearest_nics(device, node):
            below[nic].append(place)
    return sorted(below, key=lambda nic: sum(below[nic]) / len(below[nic]) if below[nic] else 1e9)


def _join(
    parts: _Parts,
    name: str,
    node: Node,
    devices: list[str],
    spots: dict[str, tuple[float, float]],
) -> None:
    """Add the links inside a node: to its shared bar, between its devices, and to its NICs."""
    hubs = parts.of(name, "nvswitch")
    if hubs:
        label = "NVSwitch" if len(hubs) == 1 else f"{len(hubs)} NVSwitches"
        node.bar = (HEIGHTS["switch_low"], HEIGHTS["switch_high"], label)
    elif parts.of(name, "host"):
        hubs = parts.of(name, "host")
        node.bar = (HEIGHTS["memory_low"], HEIGHTS["memory_high"], "host memory")
    through_memory = node.bar is not None and node.bar[2] == "host memory"
    for device in devices:
        x, y = spots[device]
        for there, link in parts.neighbours[device]:
            if there in hubs and node.bar is not None:
                edge = node.bar[1] if through_memory else node.bar[0]
                side = y - 0.3 if through_memory else y + 0.3
                node.links.append(Line(link["kind"], (x, x), (side, edge)))
            elif there in spots and device < there and there in devices:
                left, right = sorted((x, spots[there][0]))
                node.arcs.append(Line(link["kind"], (left, right), (y + 0.3, y + 0.3)))
        if not through_memory:
            for nic in parts.nearest_nics(device, name):
                at = spots[nic]
                node.links.append(Line("pcie", (x, at[0]), (y - 0.3, at[1] + 0.3)))
    if through_memory and node.bar is not None:
        for nic in parts.of(name, "nic"):
            x, y = spots[nic]
            node.links.append(Line("pcie", (x, x), (node.bar[0], y + 0.3)))


def _arrange_switches(
    parts: _Parts, spots: dict[str, tuple[float, float]], width: float
) -> tuple[list[Box], list[Line]]:
    """Place the switches that the drawn NICs reach: leaves below the nodes, a spine below them."""
    leaves: dict[str, list[float]] = {}
    links = []
    for nic, (x, _) in spots.items():
        for there, _link in parts.neighbours[nic]:
            if parts.devices[there]["kind"] == "switch":
                leaves.setdefault(there, []).append(x)
    boxes = {name: _switch(parts, name, xs, HEIGHTS["leaf"]) for name, xs in leaves.items()}
    spines: dict[str, list[float]] = {}
    for name in leaves:
        for there, _link in parts.neighbours[name]:
            if parts.devices[there]["kind"] == "switch" and there not in leaves:
                spines.setdefault(there, []).append(boxes[name].x)
    boxes |= {name: _switch(parts, name, xs, HEIGHTS["spine"]) for name, xs in spines.items()}
    for nic, (x, y) in spots.items():
        for there, link in parts.neighbours[nic]:
            if there in boxes:
                box = boxes[there]
                reach = box.width / 2 - 0.1
                end = min(max(x, box.x - reach), box.x + reach)
                links.append(Line(link["kind"], (x, end), (y - 0.3, box.y + 0.2)))
    for name in leaves:
        for there, link in parts.neighbours[name]:
            if there in spines:
                low, high = boxes[there], boxes[name]
                links.append(Line(link["kind"], (high.x, low.x), (high.y - 0.2, low.y + 0.2)))
    return list(boxes.values()), links


def _switch(parts: _Parts, name: str, xs: list[float], y: float) -> Box:
    width = max(1.6, max(xs) - min(xs) + 0.6)
    text = name
    uplinks = [
        link["nominal"]["value"]
        for there, link in parts.neighbours[name]
        if parts.devices[there]["kind"] == "switch" and link.get("nominal")
    ]
    if y == HEIGHTS["leaf"] and uplinks:
        text += f", uplink {format_rate(sum(uplinks))}"
        width = max(width, 0.12 * len(text) + 0.3)
    return Box((max(xs) + min(xs)) / 2, y, "switch", text, width)


def _row(names: list[str], left: float, width: float, y: float) -> dict[str, tuple[float, float]]:
    step = width / max(len(names), 1)
    return {name: (left + step * (index + 0.5), y) for index, name in enumerate(names)}


def _text(parts: _Parts, device: str) -> str:
    ranks = parts.ranks.get(device)
    name = device.rsplit("/", 1)[-1]
    if not ranks:
        return name
    return f"{name}\nrank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"


def _nic_text(parts: _Parts, nic: str) -> str:
    name = nic.rsplit("/", 1)[-1]
    figures = [
        link["nominal"]["value"]
        for there, link in parts.neighbours[nic]
        if parts.devices[there]["kind"] == "switch" and link.get("nominal")
    ]
    return f"{name}\n{format_rate(sum(figures))}" if figures else name


def _link_make(link: dict[str, Any]) -> tuple[str, float, float, int]:
    rates = [(link.get(key) or {}).get("value", -1.0) for key in ("nominal", "effective")]
    return (link["kind"], rates[0], rates[1], link.get("count", 1))
