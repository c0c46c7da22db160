"""``topo-ar show``: what topology files or a preset say, for a person, as JSON or as a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.cli.topology_source import (
    FabricKind,
    Nics,
    Nodes,
    NodesPerLeaf,
    Oversubscription,
    RanksPerNode,
    load_several,
)
from topo_ar.cli.topology_table import print_topology as print_topology
from topo_ar.errors import ConfigError

if TYPE_CHECKING:
    from topo_ar.topology.model import Topology

_PICTURES = (".svg", ".png")


def show(
    topology: Annotated[
        list[str],
        typer.Argument(
            metavar="TOPOLOGY...",
            help="A preset, or files in any known format; several files are made one.",
        ),
    ],
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    nic: Nics = None,
    fabric: FabricKind = None,
    oversubscription: Oversubscription = None,
    nodes_per_leaf: NodesPerLeaf = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, nothing else.")
    ] = False,
    outputs: Annotated[
        list[Path] | None,
        typer.Option(
            "-o",
            "--output",
            help="Write .json, .xml (NCCL), .graphml, .dot, .svg or .png; may be given again.",
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw a picture; the same as -o FILE.svg.")
    ] = None,
) -> None:
    """Show devices, links, ranks, path classes, nearest NICs and what is not known.

    Path classes are given in the words of nvidia-smi and of NCCL. The keys of --json are listed in
    topo_ar.topology.summary.summarize.

    Example: topo-ar show dgx-h100 --nodes 2 -o dgx.svg

    Example: topo-ar show topo-m.txt nvlink-s.txt --json
    """
    found, name = load_several(
        topology, nodes, ranks_per_node, nic, fabric, oversubscription, nodes_per_leaf
    )
    paths = [*(outputs or ()), *((svg,) if svg else ())]
    for path in paths:
        _write(found, path, quiet=as_json)
    if as_json:
        import msgspec

        from topo_ar.topology.summary import summarize

        print(msgspec.json.encode(summarize(found, name)).decode())
    elif not paths:
        print_topology(found, name)


def _write(topology: "Topology", path: Path, *, quiet: bool) -> None:
    """Write a picture or a file; what its format cannot say goes to stderr."""
    left_out: tuple[str, ...] = ()
    if path.suffix.lower() in _PICTURES:
        import msgspec

        from topo_ar.figures import save_as, topology_graph

        save_as(topology_graph(msgspec.to_builtins(topology)), path)
    else:
        from topo_ar.topology.writers import SUFFIXES, write

        if path.suffix.lower() not in SUFFIXES:
            endings = ", ".join((*SUFFIXES, *_PICTURES))
            raise ConfigError(f"{path}: cannot tell what to write; endings are {endings}")
        left_out = write(topology, path)
    for sentence in left_out:
        typer.echo(f"{path.name}: {sentence}", err=True)
    if not quiet:
        print(f"wrote {path}")
