"""``topo-ar plan``: the best all-reduce for a topology and a size, with its bound and reason."""

from pathlib import Path
from typing import Annotated

import typer

from topo_ar.cli.topology_source import Nics, Nodes, RanksPerNode, TopologyName, load_topology
from topo_ar.errors import ConfigError
from topo_ar.planning.plan import Family
from topo_ar.units import parse_size


def plan(
    topology: TopologyName,
    sizes: Annotated[
        str, typer.Option("--size", "-s", help="Buffer sizes, such as 25MB or 64K,25MB,1G.")
    ],
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    nic: Nics = None,
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
