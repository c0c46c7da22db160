"""DOT, for Graphviz: one cluster a node, lines as thick as their rate."""

import math

from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology
from topo_ar.topology.writers.written import Written
from topo_ar.units import format_rate

FORMAT = "dot"
SUFFIXES: tuple[str, ...] = (".dot", ".gv")

_SHAPES = {DeviceKind.SWITCH: "box3d", DeviceKind.NVSWITCH: "box3d", DeviceKind.NIC: "component"}
_COLOURS = {
    LinkKind.NVLINK: "#009E73",
    LinkKind.XGMI: "#009E73",
    LinkKind.C2C: "#009E73",
    LinkKind.SHM: "#E69F00",
    LinkKind.INFINIBAND: "#0072B2",
    LinkKind.ETHERNET: "#0072B2",
}


def write_text(topology: Topology) -> Written:
    """Return `topology` in DOT; the rate of a link is the effective, else the nominal one."""
    ranks = {device: rank for rank, device in enumerate(topology.ranks)}
    by_node: dict[str | None, list[Device]] = {}
    for device in topology.devices:
        by_node.setdefault(device.node, []).append(device)
    lines = [f"graph {_quoted(topology.name)} {{", "  node [shape=box, fontsize=10];"]
    lines += [f"  {_vertex(device, ranks)}" for device in by_node.pop(None, [])]
    for index, (node, devices) in enumerate(by_node.items()):
        lines += [f"  subgraph cluster_{index} {{", f"    label={_quoted(str(node))};"]
        lines += [f"    {_vertex(device, ranks)}" for device in devices]
        lines.append("  }")
    lines += [f"  {_edge(link)}" for link in topology.links]
    left_out = (
        "DOT keeps names, kinds and one rate a link; sources, notes and latencies are left out"
    )
    return Written("\n".join([*lines, "}", ""]), (left_out,))


def _vertex(device: Device, ranks: dict[str, int]) -> str:
    label = device.id.rsplit("/", 1)[-1]
    if "name" in device.attributes:
        label += f"\n{device.attributes['name']}"
    if device.id in ranks:
        label += f"\nrank {ranks[device.id]}"
    shape = f", shape={_SHAPES[device.kind]}" if device.kind in _SHAPES else ""
    return f"{_quoted(device.id)} [label={_quoted(label)}{shape}];"


def _edge(link: Link) -> str:
    label = link.kind.value + (f" x{link.count}" if link.count > 1 else "")
    figure = link.effective or link.nominal
    style = "dotted"
    width = 1.0
    if figure is not None:
        label += f"\n{format_rate(figure.value)}"
        style = "solid"
        width = max(1.0, 1 + 1.5 * math.log10(figure.value / 1e9))
    return (
        f"{_quoted(link.a)} -- {_quoted(link.b)} [label={_quoted(label)}, fontsize=8, "
        f'style={style}, penwidth={width:.2f}, color="{_COLOURS.get(link.kind, "#808080")}"];'
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
