"""What does a training step take over its computing, as communication grows against it?

Command: python -m experiments.03_comm_compute_ratio --out results/
Minutes: 7 on two cores (2 hosts of 4 ranks, NICs of four rates, two batches); --quick shows that it
runs.

A ResNet with gradients of 4.9 MB trains by plain DDP, through the hook, and through the hook with
int8 between nodes, step by step in turns with steps that do not communicate. The ratio of
communication to computation is what plain DDP's buckets take alone, over forward and backward;
rate and batch move it. The curve is the simulator's for the same model, with 08's calibration,
computing as measured, and a ratio of its own. Theory stands beside: ``1 + r`` when nothing is
hidden, ``max(1, r)`` when all is.

Writes comm_compute_ratio_NIC.jsonl (measured) and comm_compute_ratio_curve.jsonl (simulated), a row
a candidate: ``experiment`` "comm_compute_ratio", ``simulated``, ``nic`` (text),
``nic_bytes_per_s``, ``batch``, ``candidate`` ("plain DDP", "hook", "int8"), ``ratio`` (of plain
DDP, the x axis), ``step_over_compute`` (the y axis; measured ones with ``low`` and ``high``, 95 %),
``median_seconds``, ``median_compute_seconds``, ``exposed_seconds``, ``communication_seconds``
(alone; null where int8 was measured), ``overlap_efficiency``, and where measured ``seconds``,
``compute_seconds``, ``alone_seconds`` (raw samples), ``buckets`` (bucket trace of a step),
``manifest``. Files that are there already are not made again. Under torchrun the network is what it
is: the rate is null.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from experiments import emulated_model
from experiments.compute_load_ranks import COMPUTE, HOOK, PLAIN
from experiments.jobs import Part, as_rank, first_rank, measure, run_parts, under_torchrun
from experiments.step_turns import StepSettings, measure_steps
from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.planning.buckets import Bucket, ddp_buckets
from topo_ar.simulation.compute import Compute
from topo_ar.telemetry.metrics import (
    communication_ratio,
    exposed_seconds,
    overlap_efficiency,
    speedup_interval,
)
from topo_ar.telemetry.records import Record, manifest, read_records
from topo_ar.units import parse_rate

SCRIPT = "experiments.03_comm_compute_ratio"
NODES, RANKS = 2, 4
NICS = ("50mbit", "150mbit", "500mbit", "1gbit")
CODEC = "int8"
CURVE = "curve"
# bytes/s of the curve: 10 Mbit/s to 10 Gbit/s, six a decade
RATES = tuple(1.25e6 * 10 ** (i / 6) for i in range(19))
MODES = {PLAIN: ("flat", "none"), HOOK: ("hierarchical", "none"), CODEC: ("hierarchical", CODEC)}

SETTINGS = StepSettings(batches=(2, 16), candidates=tuple(MODES))
QUICK = StepSettings(batches=(1,), candidates=tuple(MODES), width=16, samples=2, warm_up=1)


def measured(nic: str, settings: StepSettings) -> Iterator[Record]:
    """Yield the rows of one rate."""
    spec = ClusterSpec.uniform(NODES, RANKS, nic)
    rows = measure(spec, SCRIPT, settings, measure_steps)
    if not rows:
        return  # a later rank of a real job
    emulated = rows[0]["manifest"]["links"] is not None
    context = {
        "experiment": "comm_compute_ratio",
        "record": "training",
        "simulated": False,
        "nic": nic if emulated else None,
        "nic_bytes_per_s": parse_rate(nic) if emulated else None,
        "hosts": NODES if emulated else None,
    }
    for batch in settings.batches:
        mine = {row["candidate"]: row for row in rows if row["batch"] == batch}
        for name in settings.candidates:
            yield {**context, **compared(mine[name], mine[COMPUTE], mine[PLAIN])}


def compared(row: Record, compute: Record, plain: Record) -> Record:
    """Return the row of a candidate beside steps without communication and plain DDP's."""
    step, computing = median(row["seconds"]), median(compute["seconds"])
    exposed = exposed_seconds(step, computing, 0, 0)
    alone = None if row["candidate"] == CODEC else median(row["alone_seconds"])
    over = speedup_interval(row["seconds"], compute["seconds"])
    return {
        **row,
        "ratio": communication_ratio(median(plain["alone_seconds"]), computing, 0),
        "step_over_compute": over.ratio,
        "low": over.low,
        "high": over.high,
        "median_seconds": step,
        "compute_seconds": compute["seconds"],
        "forward_seconds": compute["forward_seconds"],
        "median_compute_seconds": computing,
        "exposed_seconds": exposed,
        "communication_seconds": alone,
        "overlap_efficiency": None if alone is None else overlap_efficiency(exposed, alone),
    }


def simulated(out: Path, *, quick: bool) -> Iterator[Record]:
    """Yield the curve, from the buckets and the computing of the measured rows."""
    rows = [row for nic in NICS for row in rows_of(out, nic, quick=quick)]
    hooks = {row["batch"]: row for row in rows if row["candidate"] == HOOK}
    about = manifest()
    for batch, row in hooks.items():
        whole = median(row["compute_seconds"])
        backward = emulated_model.backward_alone(row, whole - median(row["forward_seconds"]))
        buckets = ddp_buckets(backward, row["bucket_cap_mib"])
        compute = Compute(whole - backward.seconds, backward.seconds)
        for rate in RATES[:: 6 if quick else 1]:
            spec = ClusterSpec.uniform(NODES, RANKS, f"{rate * 8:.0f}bit")
            for found in steps_of(spec, buckets, compute):
                yield {
                    "experiment": "comm_compute_ratio",
                    "record": "training",
                    "simulated": True,
                    "nic": None,
                    "nic_bytes_per_s": rate,
                    "hosts": NODES,
                    "batch": batch,
                    **found,
                    "manifest": about,
                }


def steps_of(spec: ClusterSpec, buckets: Sequence[Bucket], compute: Compute) -> Iterator[Record]:
    """Yield a row for each candidate, simulated on emulated hosts."""
    ratio = None
    for name, (mode, codec) in MODES.items():
        step = emulated_model.step(spec, buckets, compute, mode, codec)
        if ratio is None:  # plain DDP comes first
            ratio = communication_ratio(
                step.communication_seconds, compute.forward, compute.backward
            )
        yield {
            "candidate": name,
            "ratio": ratio,
            "step_over_compute": step.seconds / step.compute_seconds,
            "median_seconds": step.seconds,
            "median_compute_seconds": step.compute_seconds,
            "exposed_seconds": step.exposed_seconds,
            "communication_seconds": step.communication_seconds,
            "overlap_efficiency": step.overlap_efficiency,
        }


def path_of(out: Path, name: str, *, quick: bool) -> Path:
    """Return where the rows of a rate, or of the curve, are kept."""
    return out / f"comm_compute_ratio_{name}{'.quick' if quick else ''}.jsonl"


def rows_of(out: Path, name: str, *, quick: bool) -> list[Record]:
    """Return the rows of a rate, or of the curve; none where it was not measured."""
    path = path_of(out, name, quick=quick)
    return read_records(path) if path.exists() else []


def table(out: Path, *, quick: bool) -> Iterator[str]:
    """Yield a line for each measured point, with the simulator's beside it."""
    if quick:
        yield "two samples each: the table shows that it works, not how fast anything is"
    curve = rows_of(out, CURVE, quick=quick)
    for nic in NICS:
        for row in rows_of(out, nic, quick=quick):
            near = [
                each
                for each in curve
                if (each["candidate"], each["batch"]) == (row["candidate"], row["batch"])
            ]
            rate = row["nic_bytes_per_s"] or 0
            found = min(near, key=lambda each: abs(each["nic_bytes_per_s"] - rate), default=None)
            said = "" if found is None else f", simulated {found['step_over_compute']:.2f}"
            yield (
                f"{nic:8} batch {row['batch']:2} {row['candidate']:10} ratio {row['ratio']:6.2f}: "
                f"step {row['step_over_compute']:5.2f} [{row['low']:.2f}, {row['high']:.2f}] of "
                f"computing{said}"
            )


def main() -> int:
    """Read the command line."""
    if as_rank(StepSettings, measure_steps):
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--quick", action="store_true", help="small and two samples: that it runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()
    quick, out = options.quick, options.out

    def work() -> int:
        nics = NICS[-1:] if quick or under_torchrun() else NICS
        settings = QUICK if quick else SETTINGS
        parts = [Part(nic, 0.5 if quick else 1, partial(measured, nic, settings)) for nic in nics]
        if not under_torchrun():
            parts.append(Part(CURVE, 0.5, partial(simulated, out, quick=quick)))
        if not options.table:
            run_parts(parts, lambda name: path_of(out, name, quick=quick))
        for line in table(out, quick=quick) if first_rank() else ():
            print(line)
        return 0

    return exit_code_of(work, "interrupted; whole parts are kept")


if __name__ == "__main__":
    sys.exit(main())
