"""``topo-ar diff``: what differs between topologies, nodes of one, or sets of results."""

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
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B]",
            help="One or two topologies (files in any known format, or presets), or two sets of "
            "results (folders with records, or .jsonl files).",
        ),
    ],
    nodes: Annotated[
        tuple[str, str] | None,
        typer.Option("--nodes", help="Compare these two nodes of one topology."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON only: one object; of results a line for each row."),
    ] = False,
) -> None:
    """Say what differs between two topologies, between nodes, or between two sets of results.

    Topologies: devices, links, rates, NUMA nodes, path classes, nearest NICs, network. Of one
    topology, each node is compared with the most common make of node. The exit code is 0 where
    nothing differs, 1 where something does, 2 for bad input.

    Results: for each row in both sets, the ratio of medians, B over A, with a 95 % interval from
    the raw samples. A row is unchanged where its interval holds 1; of many unchanged rows one in
    twenty falls outside by chance, and an interval knows nothing of how runs differ. The exit code
    is 0 where nothing is slower, 1 where something is, 2 for bad input or nothing to compare.

    Example: topo-ar diff yesterday.xml today.xml

    Example: topo-ar diff cluster.json --nodes node3 node17

    Example: topo-ar diff results-before results-after
    """
    if len(names) > 2:
        raise ConfigError(
            f"diff compares one or two topologies, or two sets of results, not {len(names)}"
        )
    if _are_results(names):
        if nodes is not None:
            raise ConfigError("--nodes compares two nodes of one topology; leave it out")
        from topo_ar.cli.diff_results import diff_results

        raise typer.Exit(diff_results(names, as_json=as_json))
    diff_topologies(names, nodes, as_json=as_json)


def _are_results(names: Sequence[str]) -> bool:
    """Return whether sets of results are meant, and not topologies.

    Raises
    ------
    ConfigError
        If one of each is named.
    """
    from topo_ar.telemetry.result_sets import is_result_set
    from topo_ar.topology.presets import PRESETS

    results = [name for name in names if name not in PRESETS and is_result_set(name)]
    others = [name for name in names if name not in results]
    if results and others:
        raise ConfigError(
            f"{results[0]} is a set of results and {others[0]} is not (it is no folder and does "
            "not end in .jsonl); compare two of one kind"
        )
    return bool(results)


def diff_topologies(
    topologies: Sequence[str], nodes: tuple[str, str] | None, *, as_json: bool
) -> None:
    """Print what differs between topologies or nodes; ends with 1 where something does."""
    from topo_ar.topology.diff import compare, compare_nodes, odd_nodes

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
