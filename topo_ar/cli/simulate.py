"""``topo-ar simulate``: all-reduces or a training step on a topology, with contention.

With ``--json`` each result is one object. An all-reduce has the keys of a row of `topo-ar bench`
and ``links``; a step those of a measured training (``seconds``, ``exposed_seconds``, ...),
``communication_ratio``, ``nbytes_inside``, ``nbytes_between``, ``buckets`` and ``links``. Both say
``simulated``.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.cli.plan_training import BackwardSeconds, Params, TraceFile, Training
from topo_ar.cli.simulate_step import (
    StepOptions,
    print_step,
    simulate_steps,
    write_step_trace,
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
from topo_ar.units import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from topo_ar.telemetry.records import Record
    from topo_ar.topology.model import Topology

_ALGORITHMS = ", ".join(Family)


def simulate(
    topology: TopologyName,
    sizes: Annotated[
        str | None,
        typer.Option("--size", "--sizes", "-s", help="All-reduce sizes: 25MB or 64K,25MB,1G."),
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
            "--family", metavar="ALGORITHM", help=f"For --size, insist on one: {_ALGORITHMS}."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Simulate a training step of this model (as for `topo-ar plan`)."),
    ] = None,
    params: Params = None,
    trace: TraceFile = None,
    dtype: Annotated[str | None, typer.Option(help="Of gradients; float32 by default.")] = None,
    mode: Annotated[
        str, typer.Option(help="Plans of the buckets: auto, hierarchical or flat.")
    ] = "auto",
    bucket_cap: Annotated[
        float | None,
        typer.Option(help="DDP's bucket_cap_mb; by default the trace's buckets, or torch's cap."),
    ] = None,
    codec: Annotated[
        str, typer.Option(help="Compress between nodes: bf16, int8, powersgd:4, topk:0.01, ...")
    ] = "none",
    forward_seconds: Annotated[
        float | None, typer.Option(help="Length of forward; by default half of backward.")
    ] = None,
    backward_seconds: BackwardSeconds = None,
    optimizer_seconds: Annotated[float, typer.Option(help="Length of the optimizer's step.")] = 0.0,
    copy_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes a second at which a bucket is copied in and out, such as 10GB.",
        ),
    ] = None,
    straggler: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK:FACTOR", help="A rank that computes FACTOR times as long."),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of computing over its mean, such as 0.03.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps to simulate, for jitter.")] = 1,
    tensor: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS:SIZE:COUNT",
            help="Tensor-parallel groups of consecutive ranks, and COUNT all-reduces a step.",
        ),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="STAGES:SIZE:COUNT", help="Pipeline stages, and COUNT sends a step of each."
        ),
    ] = None,
    sharded: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE:COUNT",
            help="Sharded parameters: COUNT all-gathers a step in the data-parallel groups.",
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A TOML price list (currency, node_hour, accelerator_hour, sent_gigabyte): also "
            "say what a step costs.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Append the records to this .jsonl file.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            help="Write the step for ui.perfetto.dev, beside the measured one of --trace."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each result as one line of JSON, nothing else.")
    ] = False,
) -> None:
    """Simulate all-reduces or a training step: flows share links max-min fairly.

    Examples: topo-ar simulate cpu-host --nodes 2 -s 64K,25MB

    topo-ar simulate dgx-h100 --nodes 128 --model bert-large --backward-seconds 0.2 --jitter 0.03
    """
    training = Training(
        params=params, model=model, trace=trace, dtype=dtype, backward_seconds=backward_seconds
    )
    options = StepOptions(
        mode=mode,
        bucket_cap=bucket_cap,
        codec=codec,
        forward_seconds=forward_seconds,
        optimizer_seconds=optimizer_seconds,
        copy_bandwidth=copy_bandwidth,
        stragglers=tuple(straggler or ()),
        jitter=jitter,
        seed=seed,
        steps=steps,
        tensor=tensor,
        pipeline=pipeline,
        sharded=sharded,
        prices=prices,
    )
    if (sizes is None) == (not training.given):
        raise ConfigError(
            "give all-reduce sizes with --size, or a training step with --model, --params or "
            "--trace; one of both"
        )
    if sizes is not None and (options != StepOptions() or perfetto is not None):
        raise ConfigError(
            "--size is for all-reduces alone; of the options only --family goes with it"
        )
    if training.given and family is not None:
        raise ConfigError("--family is for all-reduces alone; for a step choose with --mode")
    found = load_topology(
        topology, nodes, ranks_per_node, nic, fabric, oversubscription, nodes_per_leaf
    )
    if sizes is None:
        result = simulate_steps(found, training, options)
        rows = [result.record]
        if perfetto is not None:
            write_step_trace(result, perfetto)
        if not as_json:
            print_step(result, options)
    else:
        rows = [_all_reduce(found, parse_size(size), family) for size in sizes.split(",")]
        if not as_json:
            _print_sizes(found, rows)
    _keep(rows, output, as_json=as_json)


def _all_reduce(topology: "Topology", nbytes: int, family: str | None) -> "Record":
    from topo_ar.planning.lowering import lower
    from topo_ar.planning.nccl_machine import nccl_machine_of
    from topo_ar.planning.planner import plan
    from topo_ar.planning.runtime import runtime_of
    from topo_ar.simulation.collective import collective_record
    from topo_ar.simulation.collective import simulate as run
    from topo_ar.topology.levels import levels
    from topo_ar.topology.model import topology_hash

    if family is not None and family not in set(Family):
        raise ConfigError(f"{family!r} is no algorithm; known are {_ALGORITHMS}")
    if nbytes == 0 or nbytes % 4:
        raise ConfigError(f"{nbytes} bytes are not whole fp32 elements; give a multiple of 4")
    known, runtime = levels(topology), runtime_of(topology)
    made = plan(
        known,
        nbytes,
        topology_hash=topology_hash(topology),
        family=None if family is None else Family(family),
        runtime=runtime,
        families=None if family else runtime.families,
        nccl=nccl_machine_of(topology, known),
    )
    found = run(lower(made, nbytes // 4, 4), topology, runtime=runtime)
    return collective_record(found, made, len(known.nodes))


def _print_sizes(topology: "Topology", rows: "list[Record]") -> None:
    from topo_ar.cli.table import print_table

    print(f"{topology.name}: {rows[0]['world_size']} ranks on {rows[0]['hosts']} nodes, simulated")
    head = ["size", "algorithm", "simulated", "predicted", "wire limit", "bound", "busiest link"]
    table = [head]
    for row in rows:
        busiest = row["links"][0] if row["links"] else None
        times = [
            row[key]
            for key in ("median_seconds", "model_seconds", "wire_limit_seconds", "bound_seconds")
        ]
        table.append(
            [
                format_size(row["nbytes"]),
                row["family"],
                *(format_seconds(seconds) if seconds else "-" for seconds in times),
                f"{busiest['name']} ({busiest['busy']:.0%} busy)" if busiest else "none",
            ]
        )
    print_table(table)


def _keep(rows: "list[Record]", output: Path | None, *, as_json: bool) -> None:
    from topo_ar.telemetry.records import RecordWriter, encode, manifest

    if as_json:
        for row in rows:
            print(encode(row).decode())
    if output is not None:
        about = manifest()
        with RecordWriter(output) as writer:
            for row in rows:
                writer.write({**row, "manifest": about})
        if not as_json:
            print(f"written: {output}")
