"""``topo-ar show``: what a topology file or a preset says, for a person or as JSON."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topo_ar.cli.topology_source import Nics, Nodes, RanksPerNode, TopologyName, load_topology
from topo_ar.units import format_rate, format_seconds

if TYPE_CHECKING:
    from topo_ar.topology.levels import NodeLevel, Rate
    from topo_ar.topology.model import Figure, Link, Topology
    from topo_ar.topology.paths import Paths

_MAX_NODES = 4


def show(
    topology: TopologyName,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    nic: Nics = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, nothing else.")
    ] = False,
) -> None:
    """Show devices, links, ranks, path classes, nearest NICs and what is not known.

    Example: topo-ar show dgx-h100 --nodes 2
    """
    from topo_ar.topology.presets import PRESETS
    from topo_ar.topology.readers import describe

    found = load_topology(topology, nodes, ranks_per_node, nic)
    name = "preset" if topology in PRESETS else describe(Path(topology)).format
    if as_json:
        import msgspec

        print(msgspec.json.encode(summarize(found, name)).decode())
    else:
        print_topology(found, name)


def summarize(topology: "Topology", name: str) -> dict[str, Any]:
    """Return the JSON object of ``topo-ar show``; bandwidths in bytes/s, latencies in seconds.

    Parameters
    ----------
    topology : Topology
        What to describe.
    name : str
        The format it was found in.
    """
    from topo_ar.topology.paths import Paths

    paths = Paths(topology)
    return {
        "format": name,
        "nodes": [_node_object(node) for node in _levels(topology)],
        "devices": topology.devices,
        "links": topology.links,
        "gpu_pairs": [
            {
                "a": a,
                "b": b,
                "path_class": path.path_class.name,
                "bandwidth": path.bandwidth,
                "devices": path.devices,
            }
            for gpus in _gpus_by_node(topology).values()
            for a, b in combinations(gpus, 2)
            for path in [paths.between(a, b)]
        ],
        "nearest_nics": [
            {
                "rank": rank,
                "device": device,
                "nics": nearest.nics,
                "path_class": nearest.path_class.name,
            }
            for rank, device in enumerate(topology.ranks)
            for nearest in [paths.nearest_nics(device)]
        ],
        "notes": topology.notes,
    }


def print_topology(topology: "Topology", name: str) -> None:
    """Print a topology for a person; of many nodes the first few in full."""
    from topo_ar.topology.paths import Paths

    print(f"{topology.name} ({name}): {len(topology.devices)} devices, {len(topology.links)} links")
    print("\nDevices")
    kinds = Counter(device.kind.value for device in topology.devices)
    _print_table([(str(count), kind) for kind, count in kinds.items()])
    print("\nLinks, one way")
    _print_table([("", "kind", "nominal", "effective", "latency", "source"), *_link_rows(topology)])
    paths = Paths(topology)
    levels = _levels(topology)
    for node in levels[:_MAX_NODES]:
        print(f"\n{node.name}: {len(node.ranks)} ranks, port of a rank {_rate(node.intra)}")
        for line, count in Counter(_rate(nic) for nic in node.nics).items():
            print(f"  {count} NICs, each {line}")
        _print_ranks(topology, node, paths)
    if len(levels) > _MAX_NODES:
        print(f"\n{len(levels) - _MAX_NODES} more nodes; --json lists all")
    for gpus in list(_gpus_by_node(topology).values())[:_MAX_NODES]:
        _print_matrix(gpus, paths)
    if topology.notes:
        print("\nNotes")
        for note in topology.notes:
            print(f"  - {note}")


def _levels(topology: "Topology") -> tuple["NodeLevel", ...]:
    from topo_ar.topology.levels import levels

    return levels(topology).nodes if topology.ranks else ()


def _gpus_by_node(topology: "Topology") -> dict[str | None, list[str]]:
    from topo_ar.topology.model import DeviceKind

    by_node: dict[str | None, list[str]] = {}
    order = {device: rank for rank, device in enumerate(topology.ranks)}
    gpus = [device for device in topology.devices if device.kind is DeviceKind.GPU]
    for gpu in sorted(gpus, key=lambda device: order.get(device.id, len(order))):
        by_node.setdefault(gpu.node, []).append(gpu.id)
    return {node: gpus for node, gpus in by_node.items() if len(gpus) > 1}


def _node_object(node: "NodeLevel") -> dict[str, Any]:
    return {
        "name": node.name,
        "ranks": node.ranks,
        "intra": _rate_object(node.intra),
        "nics": [_rate_object(nic) for nic in node.nics],
    }


def _rate_object(rate: "Rate") -> dict[str, Any] | None:
    """Return a rate as an object; a lone rank moves nothing inside its node and has none."""
    if math.isinf(rate.nominal):
        return None
    return {
        "nominal": rate.nominal,
        "payload": rate.payload,
        "latency": rate.latency,
        "source": rate.source.value,
    }


def _link_rows(topology: "Topology") -> Iterator[tuple[str, ...]]:
    alike: Counter[tuple[str, ...]] = Counter(_link_row(link) for link in topology.links)
    for row, count in alike.items():
        yield (str(count), *row)


def _link_row(link: "Link") -> tuple[str, ...]:
    lanes = f" x{link.count}" if link.count > 1 else ""
    figures = [figure for figure in (link.effective, link.nominal, link.latency) if figure]
    return (
        f"{link.kind.value}{lanes}",
        _figure(link.nominal),
        _figure(link.effective),
        "-" if link.latency is None else format_seconds(link.latency.value),
        figures[0].source.value if figures else "not known",
    )


def _figure(figure: "Figure | None") -> str:
    return "-" if figure is None else format_rate(figure.value)


def _rate(rate: "Rate") -> str:
    if math.isinf(rate.nominal):
        return "not needed"
    return (
        f"{format_rate(rate.nominal)} nominal, {format_rate(rate.payload)} payload "
        f"({rate.source.value})"
    )


def _print_ranks(topology: "Topology", node: "NodeLevel", paths: "Paths") -> None:
    names = {
        device.id: str(device.attributes.get("name", _short(device.id)))
        for device in topology.devices
    }
    numas = {device.id: device.numa for device in topology.devices}
    rows = [("rank", "device", "numa", "nearest NICs", "class")]
    for rank in node.ranks:
        device = topology.ranks[rank]
        nearest = paths.nearest_nics(device)
        nics = ", ".join(names[nic] for nic in nearest.nics) or "none"
        numa = "-" if numas[device] is None else str(numas[device])
        rows.append((str(rank), _short(device), numa, nics, nearest.path_class.name))
    _print_table(rows)


def _print_matrix(gpus: Sequence[str], paths: "Paths") -> None:
    """Print the class of each pair of GPUs; directly linked ones with the effective rate."""
    print(f"\nPaths in {gpus[0].partition('/')[0]}")
    rows = [("", *map(_short, gpus))]
    for a in gpus:
        cells = []
        for b in gpus:
            path = paths.between(a, b)
            rate = path.bandwidth
            shown = "" if a == b or rate is None else f" {rate / 1e9:.4g}"
            cells.append("-" if a == b else path.path_class.name + shown)
        rows.append((_short(a), *cells))
    _print_table(rows)
    print("  class and GB/s of the narrowest link")


def _short(device_id: str) -> str:
    return device_id.partition("/")[2] or device_id


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print(f"  {'  '.join(cells)}".rstrip())
