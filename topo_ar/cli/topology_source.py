"""The topology that a verb works on: a file, or a preset with its options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from topo_ar.errors import ConfigError
from topo_ar.topology.model import Topology
from topo_ar.units import parse_rate

TopologyName = Annotated[
    str, typer.Argument(help="A topology file (JSON or NCCL XML) or a preset.")
]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Nodes of a preset (default 1).")]
RanksPerNode = Annotated[
    int | None, typer.Option("--ranks-per-node", help="Ranks on each node of a preset.")
]
Nics = Annotated[
    str | None, typer.Option("--nic", help="NICs of each node of a preset: 1gbit,1gbit.")
]


def load_topology(
    name: str, nodes: int | None = None, ranks_per_node: int | None = None, nic: str | None = None
) -> Topology:
    """Return the topology in the file `name`, or the preset of that name.

    Raises
    ------
    ConfigError
        If there is neither, or a preset's option is given for a file.
    TopologyError
        If the file cannot be read or is no sound topology.
    """
    from topo_ar.topology.presets import PRESETS, preset

    if name in PRESETS:
        rates = None if nic is None else [parse_rate(rate) for rate in nic.split(",")]
        return preset(name, 1 if nodes is None else nodes, ranks_per_node, rates)
    if not Path(name).exists():
        raise ConfigError(
            f"{name!r} is neither a file nor a preset; presets are {', '.join(PRESETS)}"
        )
    if nodes is not None or ranks_per_node is not None or nic is not None:
        raise ConfigError(
            f"--nodes, --ranks-per-node and --nic shape a preset, but {name} is a file; "
            "leave them out"
        )
    from topo_ar.topology.readers import read

    return read(Path(name))


def load_several(
    names: Sequence[str],
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    nic: str | None = None,
) -> tuple[Topology, str]:
    """Return the one topology that `names` describe, and the formats they were found in.

    One name is a file or a preset, several are files.

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

    if len(names) == 1 and names[0] in PRESETS:
        return load_topology(names[0], nodes, ranks_per_node, nic), "preset"
    for name in names:
        if name in PRESETS:
            raise ConfigError(f"{name} is a preset; it stands alone, only files are made one")
        if len(names) == 1 or not Path(name).exists():
            load_topology(name, nodes, ranks_per_node, nic)
    found = [describe(Path(name)) for name in names]
    return combine(found), " + ".join(dict.fromkeys(each.format for each in found))
