"""``topo-ar plan``: the best all-reduce for a topology and a size, with its bound and reason."""

from pathlib import Path
from typing import Annotated

import typer

from topo_ar.errors import ConfigError
from topo_ar.planning.plan import Family
from topo_ar.topology.model import Topology
from topo_ar.units import parse_rate, parse_size


def plan(
    topology: Annotated[
        str, typer.Argument(help="A topology file (JSON or NCCL XML) or a preset.")
    ],
    sizes: Annotated[
        str, typer.Option("--size", "-s", help="Buffer sizes, such as 25MB or 64K,25MB,1G.")
    ],
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Nodes of a preset (default 1).")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", help="Ranks on each node of a preset.")
    ] = None,
    nic: Annotated[
        str | None, typer.Option("--nic", help="NICs of each node of a preset: 1gbit,1gbit.")
    ] = None,
    family: Annotated[
        Family | None, typer.Option("--family", help="Insist on this algorithm.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan (of one size) as JSON.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each plan as one line of JSON, nothing else.")
    ] = False,
) -> None:
    """Plan all-reduces: every candidate's predicted time, what nothing can beat, the choice.

    Example: topo-ar plan cpu-host --nodes 2 -s 64K,25MB
    """
    from topo_ar.planning.explain import explain
    from topo_ar.planning.planner import plan as make_plan
    from topo_ar.planning.runtime import runtime_of
    from topo_ar.topology.levels import levels
    from topo_ar.topology.model import topology_hash

    counts = [parse_size(size) for size in sizes.split(",")]
    if output is not None and len(counts) > 1:
        raise ConfigError(f"{output} can hold one plan, but {len(counts)} sizes were given")
    found = load_topology(topology, nodes, ranks_per_node, nic)
    both, digest = levels(found), topology_hash(found)
    plans = [
        make_plan(both, n, topology_hash=digest, family=family, runtime=runtime_of(found))
        for n in counts
    ]
    if output is not None:
        try:
            output.write_bytes(plans[0].to_json() + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror}") from None
    for position, made in enumerate(plans):
        if as_json:
            print(made.to_json().decode())
        else:
            print(("\n" if position else "") + explain(made))


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
    from topo_ar.topology.readers import read

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
    return read(Path(name))
