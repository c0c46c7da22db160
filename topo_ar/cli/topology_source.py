"""The topology that a verb works on: a file, or a preset with its options."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from topo_ar.errors import ConfigError
from topo_ar.topology.model import Topology
from topo_ar.units import parse_rate

TopologyName = Annotated[
    str, typer.Argument(help="A topology file in any known format, or a preset.")
]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Nodes of a preset (default 1).")]
RanksPerNode = Annotated[
    int | None, typer.Option("--ranks-per-node", help="Ranks on each node of a preset.")
]
Nics = Annotated[
    str | None, typer.Option("--nic", help="NICs of each node of a preset: 1gbit,1gbit.")
]
FabricKind = Annotated[
    str | None,
    typer.Option(
        "--fabric",
        help="Network of a preset: non-blocking (default), rail-optimised or leaf-spine.",
    ),
]
Oversubscription = Annotated[
    float | None,
    typer.Option(
        "--oversubscription",
        help="What the NICs of a leaf switch carry over what its uplinks carry (default 1).",
    ),
]
NodesPerLeaf = Annotated[
    int | None,
    typer.Option(
        "--nodes-per-leaf", help="Nodes that share leaf switches (default: as fill 32 ports)."
    ),
]


def load_topology(
    name: str,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    nic: str | None = None,
    fabric: str | None = None,
    oversubscription: float | None = None,
    nodes_per_leaf: int | None = None,
) -> Topology:
    """Return the topology in the file `name`, or the preset of that name.

    Raises
    ------
    ConfigError
        If there is neither, or a preset's option is given for a file.
    TopologyError
        If the file cannot be read or is no sound topology.
    """
    from topo_ar.topology.presets import FABRICS, PRESETS, preset

    if name in PRESETS:
        rates = None if nic is None else [parse_rate(rate) for rate in nic.split(",")]
        return preset(
            name,
            1 if nodes is None else nodes,
            ranks_per_node,
            rates,
            fabric=FABRICS[0] if fabric is None else fabric,
            oversubscription=oversubscription,
            nodes_per_leaf=nodes_per_leaf,
        )
    _require_file(name, nodes, ranks_per_node, nic, fabric, oversubscription, nodes_per_leaf)
    from topo_ar.topology.readers import read

    return read(Path(name))


def _require_file(name: str, *options: object) -> None:
    """Raise where `name` is no file, or `options` of a preset are given for it."""
    from topo_ar.topology.presets import PRESETS

    # Path.exists raises for a name that is too long or in a folder one may not enter.
    if not os.path.exists(name):
        raise ConfigError(
            f"{name!r} is neither a file nor a preset; presets are {', '.join(PRESETS)}"
        )
    if any(option is not None for option in options):
        raise ConfigError(
            f"--nodes, --ranks-per-node, --nic, --fabric, --oversubscription and --nodes-per-leaf "
            f"shape a preset, but {name} is a file; leave them out"
        )


def load_several(
    names: Sequence[str],
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    nic: str | None = None,
    fabric: str | None = None,
    oversubscription: float | None = None,
    nodes_per_leaf: int | None = None,
) -> tuple[Topology, str]:
    """Return the one topology that `names` describe, and the formats they were found in.

    One name is a file or a preset, several are files. Each file is read once, so a pipe will do.

    Raises
    ------
    ConfigError
        If one is no file, or a preset's option is given for a file.
    TopologyError
        If a file cannot be read, or the files do not fit each other.
    """
    from topo_ar.topology.merge import combine
    from topo_ar.topology.presets import PRESETS
    from topo_ar.topology.readers import describe

    options = (nodes, ranks_per_node, nic, fabric, oversubscription, nodes_per_leaf)
    if len(names) == 1 and names[0] in PRESETS:
        return load_topology(names[0], *options), "preset"
    for name in names:
        if name in PRESETS:
            raise ConfigError(f"{name} is a preset; it stands alone, only files are made one")
        _require_file(name, *options)
    found = [describe(Path(name)) for name in names]
    return combine(found), " + ".join(dict.fromkeys(each.format for each in found))
