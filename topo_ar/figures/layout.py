"""Where the parts of one node go in its drawing; nothing here draws.

Rows from the top: NVSwitches or the links between GPUs, GPUs, PCIe switches, CPUs, NICs. A column
is one unit wide. What a switch above the CPUs shares between GPUs and NICs is reached from it
straight down, past its CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from topo_ar.figures.branch import Branch, depth, shape, split, width_of
from topo_ar.figures.parts import FAST, NETWORK, Parts, rate_of
from topo_ar.units import format_rate

MAX_COLUMNS = 26
DEVICE = (0.84, 0.6)
_BAR = 0.24
_CPU = (0.8, 0.42)
_NAME_LENGTH = 9


@dataclass(frozen=True, slots=True)
class Box:
    """A box around a point."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A link along points; `rate` in bytes/s where it is known and drawn as thickness."""

    kind: str
    points: tuple[tuple[float, float], ...]
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Arc:
    """A link between two devices of a row, over those between them."""

    kind: str
    left: float
    right: float
    y: float
    height: float
    rate: float | None = None


@dataclass(slots=True)
class Rows:
    """The heights of the rows; the lowest row of a node is at 0."""

    nic: float
    cpu: float
    switches_below: tuple[float, ...]
    switches_above: tuple[float, ...]
    top: float
    links: float
    high: float


@dataclass(slots=True)
class Node:
    """One node of the drawing. `ports` are where its NICs are, or what else has a cable."""

    title: str
    subtitle: str
    left: float
    width: float
    high: float
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    arcs: list[Arc] = field(default_factory=list)
    ports: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Tie:
    """Where a device or switch is joined to what it hangs on."""

    x: float
    y: float
    kind: str
    rate: float | None = None


@dataclass(slots=True)
class _Group:
    """A CPU with its columns. `shared` groups have switches above that lead to NICs below."""

    root: Branch
    above: Branch
    below: Branch
    left: float
    width: float
    shared: bool


def rows_of(parts: Parts, nodes: Sequence[str]) -> Rows:
    """Return rows that have room for each of `nodes`."""
    up = down = 0
    nics = tops = False
    arcs = hubs = 0
    for node in nodes:
        for root in parts.trees(node):
            above, below = split(root)
            up, down = max(up, depth(above)), max(down, depth(below))
            nics, tops = nics or root.has_nic, tops or root.has_top
        gpus = set(parts.of(node, "gpu"))
        if any(far in gpus for gpu in gpus for far, _ in parts.neighbours[gpu]):
            arcs = max(arcs, len(gpus))
        hubs = max(hubs, len(parts.of(node, "nvswitch")))
    nic = 0.55
    cpu = nic + 0.95 + 0.55 * down if nics else 0.55
    above_cpu = tuple(cpu + 0.85 + 0.62 * level for level in range(up))
    below_cpu = tuple(cpu - 0.75 - 0.55 * level for level in range(down))
    top = above_cpu[-1] + 0.8 if up else cpu + 1.05
    links = top + DEVICE[1] / 2
    room = 0.95 if hubs else min(2.0, 0.5 + 0.12 * arcs) if arcs else 0.25
    high = links + room if tops else cpu + 0.4
    return Rows(nic, cpu, below_cpu, above_cpu, top, links, high)


def columns_of(parts: Parts, node: str) -> float:
    """Return how many columns a node takes."""
    groups, _ = _fold(_groups(parts, node, 0.0))
    return sum(group.width for group in groups) or 1.0


def arrange_node(parts: Parts, names: Sequence[str], left: float, rows: Rows) -> Node:
    """Return the drawing of the first of some equal nodes; its left edge is at `left`."""
    node, title, subtitle = names[0], names[0], ""
    if len(names) > 1:
        title, subtitle = f"{len(names)} x this node", f"{node}, ..., {names[-1]}"
    groups, left_out = _fold(_groups(parts, node, left + 0.15))
    subtitle = "; ".join(filter(None, (subtitle, left_out)))
    inner = sum(group.width for group in groups) or 1.0
    words = max(0.135 * len(title), 0.095 * len(subtitle))
    width = max(inner + 0.3, words + 0.2, 1.8)
    shift = (width - 0.3 - inner) / 2
    for group in groups:
        group.left += shift
    drawn = Node(title, subtitle, left, width, rows.high + 0.1)
    builder = _Builder(parts, drawn, rows)
    for group in groups:
        builder.add_group(group)
    builder.join_cpus(groups)
    builder.join_gpus(node)
    return drawn


def _groups(parts: Parts, node: str, left: float) -> list[_Group]:
    groups = []
    for root in parts.trees(node):
        above, below = split(root)
        shared = above.has_nic
        wide, low = width_of(above), width_of(below)
        width = max(1.0, wide + low if shared else max(wide, low))
        if shared and width < 2:
            width = 2.0
        groups.append(_Group(root, above, below, left, width, shared))
        left += width
    return groups


def _fold(groups: list[_Group]) -> tuple[list[_Group], str]:
    """Return the first of many CPUs that carry the same, and a sentence on the others."""
    width = sum(group.width for group in groups)
    makes = {shape(group.root) for group in groups}
    if width <= MAX_COLUMNS or len(makes) > 1:
        return groups, ""
    kept = max(1, int(MAX_COLUMNS / 2 / groups[0].width))
    return groups[:kept], f"{len(groups)} CPUs that carry the same; {kept} drawn"


class _Builder:
    def __init__(self, parts: Parts, node: Node, rows: Rows) -> None:
        self.parts = parts
        self.node = node
        self.rows = rows
        self.spots: dict[str, tuple[float, float]] = {}
        self.tied: set[str] = set()

    def add_group(self, group: _Group) -> None:
        """Place a CPU and all that hangs on it."""
        rows = self.rows
        wide = width_of(group.above)
        # What is above alone stands in the middle over what is below alone.
        offset = 0.0 if group.shared else (group.width - wide) / 2
        name = group.root.name
        is_memory = name is not None and self.parts.devices[name]["kind"] == "host"
        ups = self._place(group.above, group.left + offset, 0, top=True)
        x = self._cpu_x(group)
        low = width_of(group.below)
        offset = wide if group.shared else (group.width - low) / 2
        downs = self._place(group.below, group.left + offset, 0, top=False)
        if name is None:
            return
        size = (group.width - 0.2, _CPU[1]) if is_memory else _CPU
        self.node.boxes.append(
            Box(x, rows.cpu, *size, "host" if is_memory else "cpu", self._cpu_text(name))
        )
        self.spots[name] = (x, rows.cpu)
        reach = size[0] / 2 if is_memory else 0.0
        self._bus(x, reach, rows.cpu + _CPU[1] / 2, 0.22, ups)
        self._bus(x, reach, rows.cpu - _CPU[1] / 2, -0.22, downs)
        if any(
            self.parts.devices[far]["kind"] == "switch" for far, _ in self.parts.neighbours[name]
        ):
            self.node.ports[name] = (x, rows.cpu - _CPU[1] / 2)

    def _cpu_x(self, group: _Group) -> float:
        """Return a place for a CPU clear of the lines to NICs that it does not carry."""
        nics = [self.spots[name][0] for name in group.above.all_nics() if group.shared]
        middle = group.left + group.width / 2
        steps = (middle + side * step / 20 for step in range(40) for side in (1, -1))
        clear = (x for x in steps if all(abs(x - nic) >= 0.49 for nic in nics))
        return next(clear, middle)

    def _cpu_text(self, name: str) -> str:
        device = self.parts.devices[name]
        if device["kind"] == "host":
            return "host memory" if self._has_shm(name) else "host"
        numa = device.get("numa")
        return name.rsplit("/", 1)[-1] if numa is None else f"NUMA {numa}"

    def _has_shm(self, name: str) -> bool:
        return any(link["kind"] == "shm" for _, link in self.parts.neighbours[name])

    def _place(self, branch: Branch, left: float, level: int, *, top: bool) -> list[_Tie]:
        """Place all below a branch; return where its children are tied."""
        ties: list[_Tie] = []
        own = Branch(None, branch.tops, branch.nics)
        parts = [own, *branch.branches] if own.tops or own.nics else branch.branches
        for part in sorted(parts, key=lambda part: self.parts.order(part.first())):
            if part is own:
                ties += self._leaves(own, left)
            else:
                tie = self._switch(part, left, level, top=top)
                ties += [tie] if part.is_tied else []
            left += width_of(part)
        return ties

    def _leaves(self, own: Branch, left: float) -> list[_Tie]:
        rows, ties = self.rows, []
        width = max(len(own.tops), len(own.nics))
        for names, y, side in ((own.tops, rows.top, -1), (own.nics, rows.nic, 1)):
            start = left + (width - len(names)) / 2 + 0.5
            for index, name in enumerate(sorted(names, key=self.parts.order)):
                x = start + index
                self._device(name, x, y)
                ties.append(self._tie(name, x, y + side * DEVICE[1] / 2))
        return ties

    def _tie(self, name: str, x: float, y: float) -> _Tie:
        """Return how a device hangs on a CPU or switch: over PCIe, memory, or its own link."""
        kinds = {link["kind"]: link for _, link in self.parts.neighbours[name]}
        if "pcie" in kinds or "shm" in kinds or "c2c" not in kinds:
            return _Tie(x, y, "shm" if "shm" in kinds else "pcie")
        self.tied.add(name)
        return _Tie(x, y, "c2c", rate_of(kinds["c2c"]))

    def _switch(self, branch: Branch, left: float, level: int, *, top: bool) -> _Tie:
        """Draw a switch as a bar over its columns; return where it is tied to what is above it."""
        width = width_of(branch)
        heights = self.rows.switches_above if top else self.rows.switches_below
        y = heights[level]
        ties = self._place(branch, left, level + 1, top=top)
        for tie in ties:
            edge = y + _BAR / 2 if tie.y > y else y - _BAR / 2
            self.node.lines.append(Line(tie.kind, ((tie.x, edge), (tie.x, tie.y))))
        x = left + width / 2
        text = "PCIe switch" if width >= 1.5 else "PCIe"
        self.node.boxes.append(Box(x, y, width - 0.16, _BAR, "pcie_switch", text))
        straight_down = [tie.x for tie in ties if tie.y < y]
        if top and any(abs(at - x) < 0.1 for at in straight_down):
            x += 0.25
        return _Tie(x, y - _BAR / 2 if top else y + _BAR / 2, "pcie")

    def _bus(self, x: float, reach: float, y: float, rise: float, ties: list[_Tie]) -> None:
        """Tie children to a CPU over one horizontal line, or straight where they stand over it."""
        for tie in ties:
            if abs(tie.x - x) <= max(reach - 0.05, 0.02):
                points: tuple[tuple[float, float], ...] = ((tie.x, y), (tie.x, tie.y))
            else:
                points = ((x, y), (x, y + rise), (tie.x, y + rise), (tie.x, tie.y))
            self.node.lines.append(Line(tie.kind, points, tie.rate))

    def _device(self, name: str, x: float, y: float) -> None:
        device = self.parts.devices[name]
        self.spots[name] = (x, y)
        text = _nic_text(self.parts, name) if device["kind"] == "nic" else _text(self.parts, name)
        self.node.boxes.append(Box(x, y, *DEVICE, device["kind"], text))
        if any(
            self.parts.devices[far]["kind"] == "switch" for far, _ in self.parts.neighbours[name]
        ):
            self.node.ports[name] = (x, y - DEVICE[1] / 2)

    def join_cpus(self, groups: Sequence[_Group]) -> None:
        """Draw one line through all CPUs where the topology joins them."""
        names = [group.root.name for group in groups if group.root.name in self.spots]
        kinds = {
            link["kind"]
            for name in names
            for far, link in self.parts.neighbours[name or ""]
            if far in names
        }
        places = [self.spots[name] for name in names if name is not None]
        for kind in kinds:
            self.node.lines.append(Line(kind, (places[0], places[-1])))

    def join_gpus(self, node: str) -> None:
        """Draw NVLink, XGMI and C2C: to a bar of NVSwitches, as arcs, or down to the CPU."""
        rows = self.rows
        hubs = set(self.parts.of(node, "nvswitch"))
        gpus = [name for name in self.parts.of(node, "gpu") if name in self.spots]
        if hubs and gpus:
            xs = [self.spots[gpu][0] for gpu in gpus]
            text = "NVSwitch" if len(hubs) == 1 else f"{len(hubs)} NVSwitches"
            middle = (min(xs) + max(xs)) / 2
            width = max(xs) - min(xs) + DEVICE[0]
            self.node.boxes.append(Box(middle, rows.links + 0.6, width, 0.35, "nvswitch", text))
        widest = self._widest_link(gpus)
        room = rows.high - rows.links - 0.12
        for gpu in gpus:
            x, y = self.spots[gpu]
            to_hub = [link for far, link in self.parts.neighbours[gpu] if far in hubs]
            if to_hub:
                rate = _sum([rate_of(link) for link in to_hub])
                points = ((x, rows.links), (x, rows.links + 0.425))
                self.node.lines.append(Line(to_hub[0]["kind"], points, rate))
            for far, link in self.parts.neighbours[gpu]:
                if link["kind"] not in FAST or far in hubs or far not in self.spots:
                    continue
                at = self.spots[far]
                if self.parts.devices[far]["kind"] != "gpu":
                    if gpu in self.tied:
                        continue
                    points = ((x - 0.2, y - DEVICE[1] / 2), (at[0] - 0.1, at[1] + _CPU[1] / 2))
                    self.node.lines.append(Line(link["kind"], points, rate_of(link)))
                elif x < at[0]:
                    height = room * (0.25 + 0.75 * (at[0] - x) / widest)
                    ends = (self._foot(gpu, far, gpus), self._foot(far, gpu, gpus))
                    arc = Arc(link["kind"], *ends, rows.links, height, rate_of(link))
                    self.node.arcs.append(arc)

    def _foot(self, gpu: str, far: str, gpus: Sequence[str]) -> float:
        """Return where on its upper edge a GPU's link to `far` begins: in the order of far ends."""
        linked = {name for name, _ in self.parts.neighbours[gpu] if name in gpus}
        ends = sorted(linked, key=lambda name: self.spots[name][0])
        step = min(0.16, 0.7 / len(ends))
        return self.spots[gpu][0] + (ends.index(far) - (len(ends) - 1) / 2) * step

    def _widest_link(self, gpus: Sequence[str]) -> float:
        """Return how far apart two GPUs are at most that a link joins directly."""
        apart = [
            abs(self.spots[gpu][0] - self.spots[far][0])
            for gpu in gpus
            for far, _ in self.parts.neighbours[gpu]
            if far in gpus
        ]
        return max(apart, default=1.0)


def _sum(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None


def _text(parts: Parts, device: str) -> str:
    ranks = parts.ranks.get(device)
    name = device.rsplit("/", 1)[-1]
    name = name if len(name) <= _NAME_LENGTH + 1 else name[-7:]
    if not ranks:
        return name
    return f"{name}\nrank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"


def _nic_text(parts: Parts, nic: str) -> str:
    name = str(parts.devices[nic].get("attributes", {}).get("name", ""))
    if not 0 < len(name) <= _NAME_LENGTH:
        name = nic.rsplit("/", 1)[-1]
    name = name if len(name) <= _NAME_LENGTH else "NIC"
    links = [link for _, link in parts.neighbours[nic] if link["kind"] in NETWORK]
    rate = _sum([rate_of(link) for link in links]) if links else None
    number = len(parts.folded.get(nic, ()))
    if number > 1:
        name = f"{number} NICs at" if rate else f"{number} NICs"
    if parts.devices[nic].get("attributes", {}).get("data") is False:
        return f"{name}\nnot used"
    return f"{name}\n{format_rate(rate)}" if rate else name
