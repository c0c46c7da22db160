"""The topology graph: what each node holds, and which links join it to the others."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from topo_ar.errors import ConfigError
from topo_ar.figures.layout import HEIGHTS, Cluster, Node, arrange
from topo_ar.figures.style import GREY, Record, caption, new_figure, styled
from topo_ar.units import format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINKS = {
    "nvlink": "#009E73",
    "xgmi": "#009E73",
    "c2c": "#009E73",
    "shm": "#E69F00",
    "pcie": "#909090",
    "upi": "#606060",
    "infiniband": "#0072B2",
    "ethernet": "#0072B2",
}
_BOXES = {"gpu": "#d9efe8", "cpu": "#fbeccf", "nic": "#d6e8f4", "switch": "#d6e8f4"}
_BAR = "#f1f1f1"


@styled
def topology_graph(topology: Record) -> "Figure":
    """Return a drawing of a topology: nodes as boxes, their ranks, NICs and the switches.

    PCIe switches and sockets are not drawn: a line from a rank's device to a NIC means that no
    other NIC is nearer. Of more than four nodes, one of each make is drawn, with how many there
    are. Rates are for one direction; the legend gives nominal rates and, where it is another, the
    effective one.

    Parameters
    ----------
    topology : dict
        A Topology as JSON.

    Raises
    ------
    ConfigError
        If this is not a topology, or it has no node.
    """
    cluster = arrange(topology)
    if not cluster.nodes:
        raise ConfigError("the topology has no node to draw; is it the right file?")
    entries = _legend_entries(topology, cluster)
    height = 0.72 * (cluster.high - cluster.low) + 0.19 * len(entries) + 1.3
    figure = new_figure(max(4.8, 0.62 * cluster.width + 0.4), height)
    axes = figure.subplots()
    axes.set_axis_off()
    for node in cluster.nodes:
        _draw_node(axes, node, cluster.high)
    _draw_switches(axes, cluster)
    axes.set_xlim(-0.3, cluster.width + 0.3)
    axes.set_ylim(cluster.low - 0.05, cluster.high + 0.4)
    _legend(axes, entries)
    num_ranks = _count(len(topology.get("ranks", ())), "rank")
    num_nodes = _count(cluster.num_nodes, "node")
    figure.suptitle(f"{topology['name']}: {num_nodes}, {num_ranks}", fontsize=10)
    caption(
        figure,
        [
            "Rates are nominal, for one direction, with their source.",
            "Between ranks and their nearest NICs, PCIe switches and sockets are not drawn."
            if any(device["kind"] == "pcie_switch" for device in topology["devices"])
            else "",
            f"One node of each make is drawn; there are {cluster.num_nodes}."
            if cluster.is_folded
            else "",
        ],
    )
    return figure


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _draw_node(axes: "Axes", node: Node, top: float) -> None:
    _box(axes, node.left, HEIGHTS["node_low"], node.width, top, "white", GREY)
    axes.text(
        node.left + node.width / 2,
        top + 0.08,
        node.title,
        ha="center",
        va="bottom",
        fontweight="bold",
    )
    if node.bar is not None:
        low, high, text = node.bar
        _box(axes, node.left + 0.1, low, node.width - 0.2, high, _BAR, GREY)
        axes.text(
            node.left + node.width / 2, (low + high) / 2, text, ha="center", va="center", fontsize=8
        )
    for link in node.links:
        axes.plot(link.xs, link.ys, color=_LINKS.get(link.kind, GREY), linewidth=1.3, zorder=1)
    for arc in node.arcs:
        _arc(axes, arc.xs, arc.ys, _LINKS.get(arc.kind, GREY))
    for device in node.devices:
        _device(axes, device.x, device.y, device.kind, device.text)


def _draw_switches(axes: "Axes", cluster: Cluster) -> None:
    for link in cluster.links:
        axes.plot(link.xs, link.ys, color=_LINKS.get(link.kind, GREY), linewidth=1.6, zorder=1)
    for switch in cluster.switches:
        half = switch.width / 2
        _box(
            axes,
            switch.x - half,
            switch.y - 0.2,
            switch.width,
            switch.y + 0.2,
            "#d6e8f4",
            "#0072B2",
        )
        axes.text(switch.x, switch.y, switch.text, ha="center", va="center", fontsize=8)


def _device(axes: "Axes", x: float, y: float, kind: str, text: str) -> None:
    _box(axes, x - 0.42, y - 0.3, 0.84, y + 0.3, _BOXES.get(kind, _BAR), GREY)
    axes.text(x, y, text, ha="center", va="center", fontsize=6.5, linespacing=1.25, zorder=4)


def _box(
    axes: "Axes", left: float, low: float, width: float, high: float, face: str, edge: str
) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch(
            (left, low),
            width,
            high - low,
            boxstyle=shape,
            facecolor=face,
            edgecolor=edge,
            linewidth=0.9,
            zorder=0 if face == "white" else 3,
        )
    )


def _arc(axes: "Axes", xs: tuple[float, float], ys: tuple[float, float], shade: str) -> None:
    from matplotlib.patches import FancyArrowPatch

    bend = -0.45 / max(1.0, abs(xs[1] - xs[0])) ** 0.6
    axes.add_patch(
        FancyArrowPatch(
            (xs[0], ys[0]),
            (xs[1], ys[1]),
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-",
            color=shade,
            linewidth=1.1,
            zorder=1,
        )
    )


def _legend_entries(topology: Record, cluster: Cluster) -> list[tuple[str, str]]:
    """Return kind and text for each make of link that is drawn; counts are of all there are."""
    lines = [line for node in cluster.nodes for line in (*node.links, *node.arcs)]
    drawn = {line.kind for line in (*lines, *cluster.links)}
    counts = Counter(_describe(link) for link in topology["links"] if link["kind"] in drawn)
    return [(kind, f"{count} x {text}") for (kind, text), count in counts.items()]


def _legend(axes: "Axes", entries: list[tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_LINKS.get(kind, GREY), label=text) for kind, text in entries]
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        fontsize=7.5,
        borderaxespad=0.2,
    )


def _describe(link: dict[str, Any]) -> tuple[str, str]:
    nominal, effective = link.get("nominal"), link.get("effective")
    if nominal is None and effective is None:
        return link["kind"], f"{link['kind']}, rate not known"
    parts = [f"{link['kind']} {_rate(nominal)}" if nominal else link["kind"]]
    if effective and (nominal is None or effective["value"] != nominal["value"]):
        parts.append(f"effective {_rate(effective)}")
    return link["kind"], ", ".join(parts)


def _rate(figure: dict[str, Any]) -> str:
    return f"{format_rate(figure['value'])} ({figure['source']})"
