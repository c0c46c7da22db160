"""Where nodes and switches go: equal nodes folded to one, tiers of many switches to a box."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from topo_ar.figures.layout import MAX_COLUMNS, Box, Line, Node, arrange_node, columns_of, rows_of
from topo_ar.figures.parts import Parts, rate_of
from topo_ar.units import format_rate

MAX_NODES = 4
_MAX_SWITCHES = 6
_GAP = 0.6
_TIER_STEP = 1.0
_TIER_HEIGHT = 0.42
_TIERS = ("leaf", "spine", "core")


@dataclass(slots=True)
class Cluster:
    """All that is drawn, and its extent.

    `num_nodes` counts the nodes that there are, drawn or not; `labels` are x, y and text beside
    lines; `hidden` are the makes of node that are not drawn, each with its number of nodes.
    """

    nodes: list[Node]
    num_nodes: int
    is_folded: bool
    hidden: list[int]
    width: float
    high: float
    low: float = 0.0
    switches: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    labels: list[tuple[float, float, str]] = field(default_factory=list)


def arrange(parts: Parts) -> Cluster:
    """Return the drawing of a topology, in columns of about one device's width."""
    names = list(parts.members)
    alone = [[name] for name in names]
    fits = len(names) <= MAX_NODES and sum(columns_of(parts, n) for n in names) <= MAX_COLUMNS
    makes = alone if fits else parts.makes()
    shown: list[list[str]] = []
    columns = 0.0
    for make in makes[:MAX_NODES]:
        columns += columns_of(parts, make[0])
        if shown and columns > MAX_COLUMNS:
            break
        shown.append(make)
    nodes, width = _in_a_row(parts, shown, 0.0)
    fabric = _Fabric(parts)
    if fabric.least_width > width:
        nodes, _ = _in_a_row(parts, shown, (fabric.least_width - width) / 2)
    cluster = Cluster(
        nodes=nodes,
        num_nodes=len(names),
        is_folded=len(shown) < len(names),
        hidden=[len(make) for make in makes[len(shown) :]],
        width=max(width, fabric.least_width),
        high=max((node.high for node in nodes), default=0.0),
    )
    fabric.add_to(cluster)
    return cluster


def _in_a_row(
    parts: Parts, shown: Sequence[Sequence[str]], left: float
) -> tuple[list[Node], float]:
    """Return the nodes side by side, and how wide they are together."""
    rows = rows_of(parts, [make[0] for make in shown])
    nodes: list[Node] = []
    start = left
    for make in shown:
        nodes.append(arrange_node(parts, make, left, rows))
        left += nodes[-1].width + _GAP
    return nodes, left - _GAP - start


class _Fabric:
    """The switches below the nodes: each for itself where they are few, else one box a tier."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tiers = _tiers(parts)
        self._tier_of = {name: i for i, tier in enumerate(self._tiers) for name in tier}
        self._words = [self._whole_text(number) for number in range(len(self._tiers))]
        self.least_width = max((0.125 * len(text) + 0.6 for text in self._words), default=0.0)

    def add_to(self, cluster: Cluster) -> None:
        """Place switches, cables and what is written beside them."""
        self._cluster = cluster
        if not self._tiers:
            return
        few = sum(map(len, self._tiers)) <= _MAX_SWITCHES
        apart = few and not self._cluster.is_folded
        boxes: dict[str, Box] = {}
        for number, tier in enumerate(self._tiers):
            y = -0.85 - number * _TIER_STEP
            if apart:
                boxes |= self._single(tier, y, boxes)
            else:
                box = self._whole(number, y)
                boxes |= dict.fromkeys(tier, box)
        drawn = list(dict.fromkeys(boxes.values()))
        self._cluster.switches += drawn
        self._cluster.low = min(box.y for box in drawn) - 0.4
        self._cables(boxes)
        if apart:
            self._uplinks(boxes)
        else:
            self._trunks(drawn)

    def _single(self, tier: Sequence[str], y: float, below: Mapping[str, Box]) -> dict[str, Box]:
        """Place each switch of a tier under what it joins, or side by side where they overlap."""
        spots = {name: port for node in self._cluster.nodes for name, port in node.ports.items()}
        spots |= {name: (box.x, box.y) for name, box in below.items()}
        reach = {
            name: [spots[far][0] for far, _ in self._parts.neighbours[name] if far in spots]
            or [self._cluster.width / 2]
            for name in tier
        }
        texts = {name: self._text(name) for name in tier}
        order = sorted(tier, key=lambda name: sum(reach[name]) / len(reach[name]))
        edges = [
            (min(reach[n]) - 0.35, max(reach[n]) + 0.35, 0.125 * len(texts[n]) + 0.4) for n in order
        ]
        wide = [(min(a, (a + b - w) / 2), max(b, (a + b + w) / 2)) for a, b, w in edges]
        if any(a[1] + 0.1 > b[0] for a, b in pairwise(wide)):
            step = max(self._cluster.width / len(order), *(w + 0.2 for _, _, w in edges))
            wide = [(i * step + 0.1, (i + 1) * step - 0.1) for i in range(len(order))]
            self._cluster.width = max(self._cluster.width, step * len(order))
        return {
            name: Box((a + b) / 2, y, b - a, _TIER_HEIGHT, "switch", texts[name])
            for name, (a, b) in zip(order, wide, strict=True)
        }

    def _text(self, name: str) -> str:
        tier = self._tier_of[name]
        rates = [
            rate_of(link)
            for far, link in self._parts.neighbours[name]
            if self._tier_of.get(far, -1) > tier
        ]
        known = [rate for rate in rates if rate is not None]
        return f"{name}, uplink {format_rate(sum(known))}" if known else name

    def _whole(self, number: int, y: float) -> Box:
        width = self._cluster.width
        return Box(width / 2, y, width, _TIER_HEIGHT, "switch", self._words[number])

    def _whole_text(self, number: int) -> str:
        tier = self._tiers[number]
        kind = _TIERS[number] if len(self._tiers) > 1 and number < len(_TIERS) else ""
        text = tier[0] if len(tier) == 1 else f"{len(tier)} {kind} switches".replace("  ", " ")
        if len(tier) == 1 and kind and kind not in tier[0].lower():
            text += f" ({kind})"
        if number == 0 and (rails := self._rails()) > 1:
            text += f", {rails} rails"
        return text + self._capacity(number)

    def _rails(self) -> int:
        """Return to how many switches the NICs of the first node lead."""
        first = next(iter(self._parts.members.values()), [])
        leaves = (far for name in first for far, _ in self._parts.neighbours[name])
        return len({leaf for leaf in leaves if self._tier_of.get(leaf) == 0})

    def _capacity(self, number: int) -> str:
        """Return what a tier carries down and up, where both are known."""
        down, up = (self._between(number, other)[1] for other in (number - 1, number + 1))
        if not down or not up:
            return ""
        ratio = f", {down / up:.3g} to 1" if down > 1.01 * up else ""
        return f"; down {format_rate(down)}, up {format_rate(up)}{ratio}"

    def _between(self, a: int, b: int) -> tuple[int, float, Counter[str]]:
        """Return links, rate and kinds between two tiers; -1 are the nodes."""
        count, total, kinds = 0, 0.0, Counter[str]()
        for link in self._parts.links:
            tiers = {self._tier_of.get(link["a"], -1), self._tier_of.get(link["b"], -1)}
            if tiers == {a, b}:
                count += link.get("count", 1)
                total += rate_of(link) or 0.0
                kinds[link["kind"]] += 1
        return count, total, kinds

    def _cables(self, boxes: Mapping[str, Box]) -> None:
        for node in self._cluster.nodes:
            for port, (x, y) in node.ports.items():
                for box, link in self._switches(port, boxes):
                    reach = box.width / 2 - 0.1
                    end = min(max(x, box.x - reach), box.x + reach)
                    points = ((x, y), (end, box.y + _TIER_HEIGHT / 2))
                    self._cluster.lines.append(Line(link["kind"], points))

    def _switches(self, port: str, boxes: Mapping[str, Box]) -> list[tuple[Box, dict[str, Any]]]:
        found = {boxes[far]: link for far, link in self._parts.neighbours[port] if far in boxes}
        return list(found.items())

    def _uplinks(self, boxes: Mapping[str, Box]) -> None:
        for link in self._parts.links:
            if link["a"] in boxes and link["b"] in boxes:
                low, high = sorted((boxes[link["a"]], boxes[link["b"]]), key=lambda box: box.y)
                if low.y == high.y:
                    continue
                reach = low.width / 2 - 0.1
                end = min(max(high.x, low.x - reach), low.x + reach)
                points = (
                    (high.x, high.y - _TIER_HEIGHT / 2),
                    (end, low.y + _TIER_HEIGHT / 2),
                )
                self._cluster.lines.append(Line(link["kind"], points, rate_of(link)))

    def _trunks(self, boxes: Sequence[Box]) -> None:
        """Join the boxes of neighbouring tiers by one thick line with what it stands for."""
        for number, (upper, lower) in enumerate(pairwise(boxes)):
            count, total, kinds = self._between(number, number + 1)
            if not count:
                continue
            x = min(upper.x, lower.x)
            ends = (upper.y - _TIER_HEIGHT / 2, lower.y + _TIER_HEIGHT / 2)
            kind = kinds.most_common(1)[0][0]
            self._cluster.lines.append(Line(kind, ((x, ends[0]), (x, ends[1])), float("inf")))
            text = f"{count} link{'s' if count > 1 else ''}"
            text += f", {format_rate(total)}" if total else ""
            self._cluster.labels.append((x + 0.15, sum(ends) / 2, text))


def _tiers(parts: Parts) -> list[list[str]]:
    """Return the switches by their distance from the nodes; those that reach none come last."""
    switches = {name for name, device in parts.devices.items() if device["kind"] == "switch"}
    tier = [
        name
        for name in parts.devices
        if name in switches and any(far not in switches for far, _ in parts.neighbours[name])
    ]
    seen = set(tier)
    tiers = []
    while tier:
        tiers.append(tier)
        above = dict.fromkeys(far for name in tier for far, _ in parts.neighbours[name])
        tier = [name for name in above if name in switches and name not in seen]
        seen.update(tier)
    alone = [name for name in parts.devices if name in switches and name not in seen]
    return [*tiers, alone] if alone else tiers
