"""``topo-ar plan``: the best all-reduce for a topology and a size, with its bound and reason.

With ``--json`` each plan is one object with at least these keys: ``algorithm``, ``chunks`` (bytes
of each, in order), ``codec``, ``shards`` (integer weights: ``nodes``, and ``ranks`` of each node),
``predicted_seconds``, ``bound_seconds`` (nothing is faster), ``gap`` (predicted / bound - 1),
``bottleneck``, ``reason`` and ``runner_up`` (``algorithm``, ``seconds``, ``num_chunks``, or null).
With a model in place of sizes a whole training step is planned: see `plan_training`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.cli.plan_training import (
    BackwardSeconds,
    Params,
    TraceFile,
    Training,
    plan_step,
    step_json,
    step_text,
)
from topo_ar.cli.topology_source import (
    FabricKind,
    Nics,
    Nodes,
    NodesPerLeaf,
    Oversubscription,
    RanksPerNode,
    TopologyName,
    load_topology,
)
from topo_ar.errors import ConfigError
from topo_ar.planning.plan import Family
from topo_ar.units import parse_size

if TYPE_CHECKING:
    from topo_ar.planning.calibration import Calibration
    from topo_ar.planning.topology_bound import TopologyBound
    from topo_ar.topology.levels import Levels
    from topo_ar.topology.model import Topology

_ALGORITHMS = ", ".join(Family)
_BOUNDS = {
    "all_reduce_lp": "the exact optimum of the whole topology, by linear program",
    "all_reduce_lp_symmetric": (
        "the exact optimum of the whole topology, by linear program over what may change places"
    ),
    "all_reduce_cut": (
        "proven for the ports of ranks and nodes; the topology is too large for the exact optimum"
    ),
}

_NVLS = ", its NVSwitches multicasting and adding"


def plan(
    topology: TopologyName,
    sizes: Annotated[
        str | None,
        typer.Option("--size", "--sizes", "-s", help="Buffer sizes, such as 25MB or 64K,25MB,1G."),
    ] = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    nic: Nics = None,
    fabric: FabricKind = None,
    oversubscription: Oversubscription = None,
    nodes_per_leaf: NodesPerLeaf = None,
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
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Choose also among algorithms that this version plans but does not run."
        ),
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Compare with the exact optimum of the whole topology (a linear program; needs "
            "scipy, and about a second for 32 ranks).",
        ),
    ] = False,
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
    model: Annotated[
        str | None,
        typer.Option(
            help="Plan the training step of this model: a published one, such as resnet50 or "
            "bert-large, or a file with a line name,shape for each parameter."
        ),
    ] = None,
    params: Params = None,
    trace: TraceFile = None,
    backward_seconds: BackwardSeconds = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Accuracy: exact (default), lossy:0.05 (bound of the relative error), or codecs "
            "such as bf16,powersgd:4."
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd, momentum, adam or adamw (default), or with fp32 copies -master."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of parameters and gradients; float32 by default.")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of a rank's device, such as 80GB.")
    ] = None,
    measure_codecs: Annotated[
        bool,
        typer.Option(
            "--measure-codecs",
            help="Measure here what the codecs of the policy cost a CPU core (under a second; "
            "needs torch), in place of the assumed costs.",
        ),
    ] = False,
) -> None:
    """Plan all-reduces: every candidate's predicted time, what nothing can beat, the choice.

    With a model: the training step, its buckets, algorithms and codecs, and a replica's memory.

    Examples: topo-ar plan cpu-host --nodes 2 -s 64K,25MB

    topo-ar plan dgx-a100 --nodes 4 --model bert-large --device-memory 80GB
    """
    training = Training(
        params,
        model,
        trace,
        optimizer,
        dtype,
        device_memory,
        policy,
        backward_seconds,
        measure_codecs,
    )
    if training.given:
        if exact or (sizes, family, calibration) != (None, None, None):
            raise ConfigError(
                "the options describe a training step, whose sizes and algorithms are planned; "
                "leave out --size, --family, --calibration and --exact"
            )
        _plan_step(
            load_topology(
                topology, nodes, ranks_per_node, nic, fabric, oversubscription, nodes_per_leaf
            ),
            training,
            output,
            as_json,
        )
        return
    if sizes is None:
        raise ConfigError("give buffer sizes with --size, or a training step with --model")
    from topo_ar.planning.explain import explain
    from topo_ar.planning.level_bounds import Bound
    from topo_ar.planning.nccl_machine import nccl_machine_of
    from topo_ar.planning.planner import plan as make_plan
    from topo_ar.planning.runtime import runtime_of
    from topo_ar.topology.levels import levels
    from topo_ar.topology.model import topology_hash

    counts = [parse_size(size) for size in sizes.split(",")]
    if output is not None and len(counts) > 1:
        raise ConfigError(f"{output} can hold one plan, but {len(counts)} sizes were given")
    insisted = None if family is None else _family(family)
    found = load_topology(
        topology, nodes, ranks_per_node, nic, fabric, oversubscription, nodes_per_leaf
    )
    _say_what_is_missing(found)
    both, digest, runtime = levels(found), topology_hash(found), runtime_of(found)
    measured = None if calibration is None else _calibration(calibration, both)
    nccl = nccl_machine_of(found, both)
    nvls = nccl is not None and nccl.nvls
    bound = _topology_bound(found, nvls) if exact and both.world_size > 1 else None
    plans = [
        make_plan(
            both,
            n,
            topology_hash=digest,
            family=insisted,
            runtime=runtime,
            families=None if every else runtime.families,
            calibration=measured,
            bound=Bound(bound.seconds(n), bound.bottleneck) if bound else None,
            bound_kind=_BOUNDS[bound.kind] + (_NVLS if nvls else "") if bound else "",
            advice=True,
            nccl=nccl,
        )
        for n in counts
    ]
    if output is not None:
        _write(output, plans[0].to_json())
    for position, made in enumerate(plans):
        if as_json:
            print(made.to_json().decode())
        else:
            print(("\n" if position else "") + explain(made))


def _say_what_is_missing(topology: "Topology") -> None:
    """Say on stderr that a description leaves out what the plan would depend on."""
    from topo_ar.topology.wording import some

    devices = {device.id: device for device in topology.devices}
    silent = [r for r in topology.ranks if devices[r].attributes.get("links_known") is False]
    if silent:
        print(
            f"topo-ar: note: {topology.name} does not describe NVLink of {some(silent)}, so the "
            "plan counts PCIe alone; add what does (topo-ar show THIS MORE -o both.json)",
            file=sys.stderr,
        )


def _plan_step(
    topology: "Topology", training: Training, output: Path | None, as_json: bool
) -> None:
    _say_what_is_missing(topology)
    made, memory = plan_step(topology, training)
    if output is not None:
        _write(output, step_json(made, memory))
    print(step_json(made, memory).decode() if as_json else step_text(made, memory, training))


def _write(path: Path, text: bytes) -> None:
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _topology_bound(topology: "Topology", nvls: bool) -> "TopologyBound":
    from topo_ar.planning.topology_bound import topology_bound

    switches = ("nvswitch",) if nvls else ()
    return topology_bound(topology, multicast=switches, reducing=switches)


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
