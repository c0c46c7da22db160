"""A training step for ``topo-ar simulate``: from options to results, text and trace."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from topo_ar.cli.plan_training import Training, backward_for
from topo_ar.errors import ConfigError
from topo_ar.units import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from topo_ar.planning.buckets import Bucket
    from topo_ar.simulation.compute import Compute
    from topo_ar.simulation.step_result import SimulatedStep
    from topo_ar.simulation.units import GroupTraffic
    from topo_ar.telemetry.bucket_trace import BucketTrace
    from topo_ar.telemetry.records import Record
    from topo_ar.topology.model import Topology

# Of many buckets the first and the last are shown; records have all.
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What the options say about a step, as on the command line."""

    mode: str = "auto"
    bucket_cap: float | None = None
    codec: str = "none"
    forward_seconds: float | None = None
    optimizer_seconds: float = 0.0
    copy_bandwidth: str | None = None
    stragglers: tuple[str, ...] = ()
    jitter: float = 0.0
    seed: int = 0
    steps: int = 1
    tensor: str | None = None
    pipeline: str | None = None
    sharded: str | None = None
    prices: Path | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Simulated steps, their record, and the measured trace that they stand beside."""

    steps: "tuple[SimulatedStep, ...]"
    record: "Record"
    source: str
    forward_seconds: float
    measured: "BucketTrace | None"


def simulate_steps(topology: "Topology", training: Training, options: StepOptions) -> StepResult:
    """Return the steps that the options describe.

    Raises
    ------
    ConfigError
        If an option is not usable or options contradict each other.
    PlanError, TopologyError
        If the job cannot be planned or simulated.
    """
    from topo_ar.planning.buckets import ddp_buckets, trace_buckets
    from topo_ar.planning.codecs import parse_codec
    from topo_ar.planning.occupancy import MODES
    from topo_ar.simulation.step import StepSimulator
    from topo_ar.simulation.step_result import step_record
    from topo_ar.telemetry.bucket_trace import read
    from topo_ar.telemetry.prices import read_prices
    from topo_ar.topology.levels import levels

    if options.mode not in MODES:
        raise ConfigError(f"mode {options.mode!r} is unknown; choose of {', '.join(MODES)}")
    known = levels(topology)
    backward = backward_for(known, training, topology)
    measured = None if training.trace is None else read(training.trace)
    buckets: list[Bucket] = (
        trace_buckets(measured)
        if measured is not None and options.bucket_cap is None
        else ddp_buckets(backward, options.bucket_cap)
    )
    compute = _compute(options, backward.seconds)
    groups, traffic = _dimensions(options, len(topology.ranks))
    simulator = StepSimulator(
        topology,
        buckets,
        compute,
        mode=options.mode,
        codecs=parse_codec(options.codec),
        groups=groups,
        traffic=traffic,
    )
    made = []
    said = time.monotonic()
    for step in range(options.steps):
        made.append(simulator.run(step))
        if time.monotonic() - said > 1:
            said = time.monotonic()
            print(f"topo-ar simulate: step {step + 1} of {options.steps}", file=sys.stderr)
    record = step_record(made, options.mode, len(known.nodes), compute.forward + compute.backward)
    record["codec"] = options.codec
    if options.prices is not None:
        prices = read_prices(options.prices)
        record["currency"] = prices.currency
        record["cost_per_step"] = prices.cost(
            record["median_seconds"],
            len(known.nodes),
            len(topology.ranks),
            record["nbytes_between"],
        )
    return StepResult(tuple(made), record, backward.source, compute.forward, measured)


def print_step(result: StepResult, options: StepOptions) -> None:
    """Print the step for a person."""
    from topo_ar.cli.table import print_item, print_table

    row, first = result.record, result.steps[0]
    count = len(result.steps)
    print(
        f"{row['world_size']} ranks on {row['hosts']} nodes, simulated as {first.num_kinds} "
        f"kind{'s' if first.num_kinds > 1 else ''} of ranks"
        + (f"; medians of {count} steps" if count > 1 else "")
    )
    efficiency, ratio = row["overlap_efficiency"], row["communication_ratio"]
    lines = [
        ("step", format_seconds(row["median_seconds"])),
        ("without communication", format_seconds(row["median_compute_seconds"])),
        ("exposed communication", format_seconds(row["exposed_seconds"])),
        ("communication alone", format_seconds(row["communication_seconds"])),
        ("overlap efficiency", "-" if efficiency is None else f"{efficiency:.3f}"),
        ("comm/compute ratio", "-" if ratio is None else f"{ratio:.3f}"),
        ("sent inside nodes", format_size(round(row["nbytes_inside"]), like=1)),
        ("sent between nodes", format_size(round(row["nbytes_between"]), like=1)),
    ]
    if "cost_per_step" in row:
        million = f"{1e6 * row['cost_per_step']:,.2f} {row['currency']}"
        lines.append(("cost of a million steps", million))
    print_table(lines)
    print()
    table = [["bucket", "size", "algorithm", "chunks", "codec", "ready", "done", "alone"]]
    left_out = range(_SHOWN, len(first.buckets) - _SHOWN)
    for number, bucket in enumerate(first.buckets):
        if number in left_out:
            if number == left_out[0]:
                table.append(["...", *[""] * (len(table[0]) - 1)])
            continue
        times = (bucket.ready_seconds, bucket.done_seconds, bucket.seconds_alone)
        table.append(
            [
                str(number),
                format_size(bucket.nbytes, like=1),
                bucket.family,
                str(bucket.num_chunks),
                bucket.codec,
                *map(format_seconds, times),
            ]
        )
    print_table(table)
    print()
    if first.links:
        busiest = first.links[0]
        print_item(f"Busiest link: {busiest.name}, full for {busiest.busy:.0%} of the step.")
    print_item(result.source)
    if not first.exact:
        print_item(
            "Of ranks of one kind the slowest stands for all: with jitter times are what they are "
            "at most."
        )
    if options.tensor or options.pipeline or options.sharded:
        print_item("That ranks compute longer when other dimensions wait for links is left out.")


def write_step_trace(result: StepResult, path: Path) -> None:
    """Write the first simulated step for Perfetto, beside the last measured one where there is one.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    from topo_ar.telemetry.trace import Span, write_trace

    spans = list(result.steps[0].spans)
    if result.measured is not None:
        begin = result.forward_seconds
        calls = next(s.buckets for s in reversed(result.measured.steps) if s.buckets)
        spans += [
            Span(
                f"bucket {call.index}",
                0,
                f"measured bucket {call.index}",
                begin + call.call_seconds,
                begin + call.done_seconds,
            )
            for call in calls
            if call.done_seconds is not None
        ]
    write_trace(spans, path)


def _compute(options: StepOptions, backward_seconds: float) -> "Compute":
    from topo_ar.simulation.compute import Compute

    forward = options.forward_seconds
    copying = 0 if options.copy_bandwidth is None else parse_size(options.copy_bandwidth)
    return Compute(
        forward=backward_seconds / 2 if forward is None else forward,
        backward=backward_seconds,
        optimizer=options.optimizer_seconds,
        copy_seconds_per_byte=2 / copying if copying else 0,
        slowdowns=dict(map(_straggler, options.stragglers)),
        jitter=options.jitter,
        seed=options.seed,
    )


def _straggler(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no straggler; write its rank and how many times as long it computes, "
            "such as 3:1.5"
        ) from None


def _dimensions(
    options: StepOptions, world_size: int
) -> "tuple[list[tuple[int, ...]], list[GroupTraffic]]":
    """Return the data-parallel groups and what the other dimensions send.

    Tensor-parallel ranks follow each other, then data-parallel ones, then pipeline stages.
    """
    from topo_ar.simulation.units import GroupTraffic

    width, tensor_nbytes, tensor_count = _parts(options.tensor, "tensor")
    stages, stage_nbytes, stage_count = _parts(options.pipeline, "pipeline")
    if world_size % (width * stages):
        raise ConfigError(
            f"{world_size} ranks cannot be divided into tensor groups of {width} and {stages} "
            "pipeline stages"
        )
    stage_size = world_size // stages
    data = [
        tuple(range(stage * stage_size + place, (stage + 1) * stage_size, width))
        for stage in range(stages)
        for place in range(width)
    ]
    traffic = []
    if width > 1:
        groups = tuple(tuple(range(first, first + width)) for first in range(0, world_size, width))
        traffic.append(GroupTraffic("tensor", groups, "all_reduce", tensor_nbytes, tensor_count))
    if stages > 1:
        groups = tuple(tuple(range(rank, world_size, stage_size)) for rank in range(stage_size))
        traffic.append(GroupTraffic("pipeline", groups, "send", stage_nbytes, stage_count))
    if options.sharded is not None:
        _, nbytes, count = _parts(f"1:{options.sharded}", "sharded")
        if len(data[0]) > 1:
            traffic.append(GroupTraffic("sharded", tuple(data), "all_gather", nbytes, count))
    return data, traffic


def _parts(text: str | None, name: str) -> tuple[int, int, int]:
    if text is None:
        return 1, 0, 0
    parts = text.split(":")
    try:
        size, nbytes, count = int(parts[0]), parse_size(parts[1]), int(parts[2])
    except (ValueError, IndexError):
        size = nbytes = count = 0
    if len(parts) != 3 or size < 1 or nbytes < 1 or count < 1:
        raise ConfigError(
            f"--{name} {text!r} is not ranks, bytes and operations a step, such as 8:32MB:48 "
            "(--sharded without ranks)"
        )
    return size, nbytes, count
