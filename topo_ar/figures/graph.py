"""The topology graph: one node in its real structure, a cluster folded to it, and the network."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from topo_ar.errors import ConfigError
from topo_ar.figures.cluster import Cluster, arrange
from topo_ar.figures.layout import Arc, Box, Line, Node
from topo_ar.figures.parts import FAST, Parts
from topo_ar.figures.style import GREY, Record, caption, new_figure, styled
from topo_ar.units import format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINKS = {
    "nvlink": "#009E73",
    "xgmi": "#009E73",
    "c2c": "#D55E00",
    "shm": "#E69F00",
    "pcie": "#909090",
    "upi": "#404040",
    "infiniband": "#0072B2",
    "ethernet": "#0072B2",
}
_BOXES = {
    "gpu": "#d9efe8",
    "cpu": "#fbeccf",
    "host": "#fbeccf",
    "nic": "#d6e8f4",
    "switch": "#d6e8f4",
    "nvswitch": "#bfe3d6",
}
_EDGES = {"switch": "#0072B2", "nvswitch": "#009E73", "gpu": "#009E73", "nic": "#0072B2"}
_BAR = "#ededed"
_TEXT = {"switch": 8.0, "nvswitch": 8.0, "host": 8.0, "cpu": 7.0, "pcie_switch": 6.0}
_MAX_ENTRIES = 14
_THIN, _THICK = 1.0, 4.5


@styled
def topology_graph(topology: Record) -> "Figure":
    """Return a drawing of a topology: CPUs, PCIe switches, GPUs and NICs of its nodes, the network.

    Nodes that are alike are drawn once, with how many there are, unless they are at most four and
    small. Switches of the network are drawn one by one where they are at most six, else as one box
    a tier with what it carries down and up. A PCIe switch with one device below is left out.
    NVLink and XGMI are the thicker the faster. Rates are for one direction; the legend gives
    nominal rates and, where it is another, the effective one.

    Parameters
    ----------
    topology : dict
        A Topology as JSON.

    Raises
    ------
    ConfigError
        If this is not a topology, or it has no node.
    """
    parts = Parts(topology)
    if not parts.members:
        raise ConfigError("the topology has no node to draw; is it the right file?")
    cluster = arrange(parts)
    entries = _legend_entries(parts, cluster)
    height = 0.72 * (cluster.high - cluster.low) + 0.17 * len(entries) + 1.2
    figure = new_figure(max(5.0, 0.62 * cluster.width + 0.4), height)
    axes = figure.subplots()
    axes.set_axis_off()
    thickness = _thickness(cluster)
    for node in cluster.nodes:
        _draw_node(axes, node, thickness)
    _draw_lines(axes, cluster.lines, thickness)
    for box in cluster.switches:
        _draw_box(axes, box)
    for x, y, text in cluster.labels:
        axes.text(x, y, text, va="center", fontsize=7.5, color=GREY)
    axes.set_xlim(-0.3, cluster.width + 0.3)
    axes.set_ylim(cluster.low - 0.05, cluster.high + 0.65)
    _legend(axes, entries, thickness)
    num_ranks = _count(len(topology.get("ranks", ())), "rank")
    num_nodes = _count(cluster.num_nodes, "node")
    figure.suptitle(f"{topology['name']}: {num_nodes}, {num_ranks}", fontsize=10)
    caption(figure, _sentences(parts, cluster))
    return figure


def _sentences(parts: Parts, cluster: Cluster) -> Iterable[str]:
    yield "Rates are nominal, for one direction, with their source."
    if any(device["kind"] == "pcie_switch" for device in parts.devices.values()):
        yield "PCIe switches with one device below are not drawn."
    if cluster.is_folded:
        yield f"Nodes that are alike are drawn once; there are {cluster.num_nodes}."
    if cluster.hidden:
        number = _count(sum(cluster.hidden), "node")
        yield f"{number} of {_count(len(cluster.hidden), 'other make')} not drawn."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class _Thickness:
    """How thick a link is drawn: in proportion to its rate, `fastest` being the thickest."""

    fastest: float
    thickest: float

    def of(self, rate: float | None) -> float:
        """Return points; thin where the rate is not known, thick where a line stands for many."""
        if rate is None:
            return _THIN
        share = 1.0 if math.isinf(rate) else rate / self.fastest
        return _THIN + (self.thickest - _THIN) * share


def _thickness(cluster: Cluster) -> _Thickness:
    drawn: list[Line | Arc] = [*cluster.lines]
    for node in cluster.nodes:
        drawn += [*node.lines, *node.arcs]
    rates = [line.rate for line in drawn if line.rate is not None and math.isfinite(line.rate)]
    # Where many links cross, thinner ones can still be told apart.
    crossing = max((len(node.arcs) for node in cluster.nodes), default=0)
    return _Thickness(max(rates, default=1.0), _THICK * min(1.0, math.sqrt(8 / max(8, crossing))))


def _draw_node(axes: "Axes", node: Node, thickness: _Thickness) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (node.left, 0.0),
            node.width,
            node.high,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="white",
            edgecolor=GREY,
            linewidth=0.9,
            zorder=0,
        )
    )
    middle = node.left + node.width / 2
    above: dict[str, Any] = {"ha": "center", "va": "bottom"}
    lift = 0.3 if node.subtitle else 0.08
    axes.text(middle, node.high + lift, node.title, fontweight="bold", **above)
    axes.text(middle, node.high + 0.06, node.subtitle, fontsize=7, color=GREY, **above)
    _draw_lines(axes, node.lines, thickness)
    for arc in node.arcs:
        _draw_arc(axes, arc, thickness.of(arc.rate))
    for box in node.boxes:
        _draw_box(axes, box)


def _draw_lines(axes: "Axes", lines: Iterable[Line], thickness: _Thickness) -> None:
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        axes.plot(
            xs,
            ys,
            color=_LINKS.get(line.kind, GREY),
            linewidth=thickness.of(line.rate),
            solid_capstyle="butt",
            zorder=1,
        )


def _draw_arc(axes: "Axes", arc: Arc, width: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    # A cubic curve reaches three quarters of the height of its control points.
    top = arc.y + arc.height / 0.75
    inward = 0.12 * (arc.right - arc.left)
    points = [
        (arc.left, arc.y),
        (arc.left + inward, top),
        (arc.right - inward, top),
        (arc.right, arc.y),
    ]
    axes.add_patch(
        PathPatch(
            Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]),
            facecolor="none",
            edgecolor=_LINKS.get(arc.kind, GREY),
            linewidth=width,
            capstyle="butt",
            zorder=1,
        )
    )


def _draw_box(axes: "Axes", box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (box.x - box.width / 2, box.y - box.height / 2),
            box.width,
            box.height,
            boxstyle="round,pad=0,rounding_size=0.07",
            facecolor=_BOXES.get(box.kind, _BAR),
            edgecolor=_EDGES.get(box.kind, GREY),
            linewidth=0.8,
            zorder=3,
        )
    )
    size = _TEXT.get(box.kind, 6.5)
    axes.text(
        box.x, box.y, box.text, ha="center", va="center", fontsize=size, linespacing=1.2, zorder=4
    )


def _legend_entries(parts: Parts, cluster: Cluster) -> list[tuple[str, float | None, str]]:
    """Return kind, rate and text for each make of link drawn; counts are of all there are."""
    drawn = {line.kind for line in cluster.lines}
    for node in cluster.nodes:
        drawn |= {line.kind for line in node.lines} | {arc.kind for arc in node.arcs}
    counts = Counter(_describe(link) for link in parts.links if link["kind"] in drawn)
    entries = [(kind, rate, f"{count} x {text}") for (kind, rate, text), count in counts.items()]
    if len(entries) > _MAX_ENTRIES:
        left = len(entries) - _MAX_ENTRIES
        entries = [*entries[:_MAX_ENTRIES], ("", None, f"{left} more makes of links")]
    return entries


def _legend(
    axes: "Axes", entries: list[tuple[str, float | None, str]], thickness: _Thickness
) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=_LINKS.get(kind, "white"),
            linewidth=thickness.of(rate if kind in FAST else None),
            label=text,
        )
        for kind, rate, text in entries
    ]
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        fontsize=7.5,
        borderaxespad=0.2,
    )


def _describe(link: dict[str, Any]) -> tuple[str, float | None, str]:
    nominal, effective = link.get("nominal"), link.get("effective")
    kind, count = link["kind"], link.get("count", 1)
    name = f"{kind} ({count} links)" if count > 1 else kind
    figure = nominal or effective
    if figure is None:
        return kind, None, f"{name}, rate not known"
    parts = [f"{name} {_rate(nominal)}" if nominal else name]
    if effective and (nominal is None or effective["value"] != nominal["value"]):
        parts.append(f"effective {_rate(effective)}")
    return kind, figure["value"], ", ".join(parts)


def _rate(figure: dict[str, Any]) -> str:
    return f"{format_rate(figure['value'])} ({figure['source']})"
