"""``topo-ar plan``: the best all-reduce for a topology and a size, with its bound and reason.

With ``--json`` each plan is one object with at least these keys: ``algorithm``, ``chunks`` (bytes
of each, in order), ``codec``, ``shards`` (integer weights: ``nodes``, and ``ranks`` of each node),
``predicted_seconds``, ``bound_seconds`` (nothing is faster), ``gap`` (predicted / bound - 1),
``bottleneck``, ``reason`` and ``runner_up`` (``algorithm``, ``seconds``, ``num_chunks``, or null).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.cli.topology_source import Nics, Nodes, RanksPerNode, TopologyName, load_topology
from topo_ar.errors import ConfigError
from topo_ar.planning.plan import Family
from topo_ar.units import parse_size

if TYPE_CHECKING:
    from topo_ar.planning.calibration import Calibration
    from topo_ar.topology.levels import Levels

_ALGORITHMS = ", ".join(Family)


def plan(
    topology: TopologyName,
    sizes: Annotated[
        str,
        typer.Option("--size", "--sizes", "-s", help="Buffer sizes, such as 25MB or 64K,25MB,1G."),
    ],
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    nic: Nics = None,
    family: Annotated[
        str | None,
        typer.Option(
            "--family", metavar="ALGORITHM", help=f"Insist on this algorithm: {_ALGORITHMS}."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Predict from the measured times in this file of `topo-ar bench --json`.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan (of one size) as JSON.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print each plan as one line of JSON, nothing else; keys: algorithm, chunks, "
            "codec, shards, predicted_seconds, bound_seconds, gap, bottleneck, reason, runner_up "
            "and others.",
        ),
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
    insisted = None if family is None else _family(family)
    found = load_topology(topology, nodes, ranks_per_node, nic)
    both, digest = levels(found), topology_hash(found)
    measured = None if calibration is None else _calibration(calibration, both)
    plans = [
        make_plan(
            both,
            n,
            topology_hash=digest,
            family=insisted,
            runtime=runtime_of(found),
            calibration=measured,
            advice=True,
        )
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


def _family(name: str) -> Family:
    try:
        return Family(name)
    except ValueError:
        raise ConfigError(f"{name!r} is no algorithm; known are {_ALGORITHMS}") from None


def _calibration(path: Path, levels: "Levels") -> "Calibration":
    from topo_ar.planning.calibration import calibration_from_records
    from topo_ar.telemetry.records import read_records

    try:
        return calibration_from_records(read_records(path), levels.world_size, len(levels.nodes))
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if str(path) in text else f"{path}: {text}") from None
