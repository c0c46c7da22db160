"""``topo-ar diff``: what differs between two topologies, or between the nodes of one."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.cli.table import counted, print_folded, print_item
from topo_ar.cli.topology_source import load_several
from topo_ar.errors import ConfigError

if TYPE_CHECKING:
    from topo_ar.topology.diff import Difference
    from topo_ar.topology.model import Topology

_DIFFERENT = 1
_MAX_NODES = 8
_MAX_OF_A_KIND = 8


def diff(
    topologies: Annotated[
        list[str],
        typer.Argument(
            metavar="TOPOLOGY [OTHER]",
            help="One or two topologies: files in any known format, or presets.",
        ),
    ],
    nodes: Annotated[
        tuple[str, str] | None,
        typer.Option("--nodes", help="Compare these two nodes of one topology."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, nothing else.")
    ] = False,
) -> None:
    """Say what differs: devices, links, rates, NUMA nodes, path classes, nearest NICs, network.

    Of one topology, each node is compared with the most common make of node. The exit code is 0
    where nothing differs, 1 where something does, 2 for bad input.

    Example: topo-ar diff yesterday.xml today.xml

    Example: topo-ar diff cluster.json --nodes node3 node17
    """
    from topo_ar.topology.diff import compare, compare_nodes, odd_nodes

    if len(topologies) > 2:
        raise ConfigError(f"diff compares one or two topologies, not {len(topologies)}")
    if nodes is not None and len(topologies) == 2:
        raise ConfigError("--nodes compares two nodes of one topology; name one, or leave it out")
    first, _ = load_several(topologies[:1])
    if len(topologies) == 2:
        second, _ = load_several(topologies[1:])
        sides = _labels(topologies[0], topologies[1])
        found = compare(_named(first, sides[0]), _named(second, sides[1]))
        heading = f"{sides[0]} and {sides[1]}"
    elif nodes is not None:
        sides = nodes
        found = compare_nodes(first, *nodes)
        heading = f"{nodes[0]} and {nodes[1]} of {topologies[0]}"
    else:
        usual, found = odd_nodes(first)
        sides = (usual[0], "other nodes")
        total = len({device.node for device in first.devices if device.node is not None})
        heading = f"{len(usual)} of {total} nodes of {topologies[0]} are like {usual[0]}"
    if as_json:
        _print_json(sides, found)
    else:
        _print(heading, found)
    if found:
        raise typer.Exit(_DIFFERENT)


def _named(topology: "Topology", name: str) -> "Topology":
    import msgspec

    return msgspec.structs.replace(topology, name=name)


def _labels(a: str, b: str) -> tuple[str, str]:
    """Return the names of the files without their folders, where that tells them apart."""
    short = (Path(a).name, Path(b).name)
    return short if short[0] != short[1] else (a, b)


def _print_json(sides: tuple[str, str], found: Sequence["Difference"]) -> None:
    import msgspec

    said = {"equal": not found, "a": sides[0], "b": sides[1], "differences": found}
    print(msgspec.json.encode(said).decode())


def _print(heading: str, found: Sequence["Difference"]) -> None:
    if not found:
        print_folded(f"{heading}: no difference", 0)
        return
    print_folded(f"{heading}: {len(found)} {'difference' if len(found) == 1 else 'differences'}", 0)
    by_nodes: dict[tuple[str, ...], list[Difference]] = {}
    for difference in found:
        by_nodes.setdefault(difference.nodes, []).append(difference)
    for nodes, differences in by_nodes.items():
        if len(by_nodes) > 1 and nodes:
            print_folded(
                counted(len(nodes), "node")
                + f": {', '.join(nodes[:_MAX_NODES])}"
                + (", ..." if len(nodes) > _MAX_NODES else ""),
                0,
            )
        _print_some(differences)


def _print_some(differences: Sequence["Difference"]) -> None:
    """Print each thing that differs; of many of one kind the first few."""
    printed = Counter[str]()
    for difference in differences:
        printed[difference.what] += 1
        if printed[difference.what] <= _MAX_OF_A_KIND:
            print_item(difference.says)
    for what, number in printed.items():
        if number > _MAX_OF_A_KIND:
            print(f"    {number - _MAX_OF_A_KIND} more in {what}; --json lists all")
