"""How large should DDP's buckets be, and what of a step do they leave exposed?

Command: python -m experiments.04_bucket_cap --out results/
Minutes: 2 on two cores (2 hosts of 4 ranks with NICs of 200 Mbit/s); --quick shows that it runs.

A ResNet with gradients of 4.9 MB trains by plain DDP and through the hook, each with several
``bucket_cap_mb``, step by step in turns with steps that do not communicate. Small buckets begin
early and pay latency each; large ones begin late. Beside each measured cap stands the simulator's
step with the buckets that DDP makes then, and the cap with its fastest step.

Writes bucket_cap.jsonl, a row a candidate and cap: ``experiment`` "bucket_cap", ``simulated``,
``nic``, ``candidate`` ("plain DDP", "hook"), ``bucket_cap_mib``, ``num_buckets``, ``seconds``
(raw), ``median_seconds``, ``low_seconds``, ``high_seconds`` (95 %), ``median_compute_seconds``,
``compute_seconds``, ``exposed_seconds``, ``communication_seconds`` (alone), ``overlap_efficiency``,
``chosen_cap_mib`` (the simulator's best for the hook, the same in all rows), ``manifest``. Rows of
the hook have ``buckets``, the bucket trace of a step (call and done in seconds after the begin of
backward), and ``spans`` of the first rank in a step: [{name, rank, lane, begin_seconds,
end_seconds}]. A file that is there already is not made again.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

from experiments import emulated_model
from experiments.compute_load_ranks import COMPUTE, HOOK, PLAIN
from experiments.jobs import Part, as_rank, first_rank, measure, run_parts
from experiments.step_turns import StepSettings, measure_steps
from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.planning.buckets import Backward, ddp_buckets
from topo_ar.simulation.compute import Compute
from topo_ar.telemetry.metrics import exposed_seconds, overlap_efficiency, speedup_interval
from topo_ar.telemetry.records import Record, manifest, read_records

SCRIPT = "experiments.04_bucket_cap"
NODES, RANKS, NIC = 2, 4, "200mbit"
CAPS = (0.1, 0.25, 0.5, 1.0, 2.0, 25.0)
_FINE = tuple(0.05 * 2 ** (i / 2) for i in range(18))
_MODES = {PLAIN: "flat", HOOK: "hierarchical"}
SETTINGS = StepSettings(caps=CAPS, batches=(4,), samples=12, spans=True)
QUICK = StepSettings(caps=(0.05, 25.0), batches=(1,), width=16, samples=2, warm_up=1, spans=True)


def make(settings: StepSettings) -> Iterator[Record]:
    """Yield measured rows and simulated ones."""
    rows = measure(ClusterSpec.uniform(NODES, RANKS, NIC), SCRIPT, settings, measure_steps)
    if not rows:
        return  # a later rank of a real job
    compute = next(row for row in rows if row["candidate"] == COMPUTE)
    computing = median(compute["seconds"])
    hook = next(row for row in rows if row["candidate"] == HOOK)
    backward = emulated_model.backward_alone(hook, computing - median(compute["forward_seconds"]))
    emulated = rows[0]["manifest"]["links"] is not None
    curve = list(simulated(backward, computing)) if emulated else []
    best = min(
        (row for row in curve if row["candidate"] == HOOK),
        key=lambda row: row["median_seconds"],
        default=None,
    )
    context = {
        "experiment": "bucket_cap",
        "record": "training",
        "nic": NIC if emulated else None,
        "hosts": NODES if emulated else None,
        "chosen_cap_mib": None if best is None else best["bucket_cap_mib"],
    }
    for row in rows:
        if row["candidate"] != COMPUTE:
            yield {**context, "simulated": False, **compared(row, compute)}
    about = manifest()
    for row in curve:
        yield {**context, "simulated": True, **row, "manifest": about}


def compared(row: Record, compute: Record) -> Record:
    """Return a measured row beside steps that do not communicate."""
    step, computing = median(row["seconds"]), median(compute["seconds"])
    exposed = exposed_seconds(step, computing, 0, 0)
    alone = median(row["alone_seconds"])
    interval = speedup_interval(row["seconds"], [1.0] * len(row["seconds"]))
    return {
        **row,
        "median_seconds": step,
        "low_seconds": interval.low,
        "high_seconds": interval.high,
        "compute_seconds": compute["seconds"],
        "median_compute_seconds": computing,
        "exposed_seconds": exposed,
        "communication_seconds": alone,
        "overlap_efficiency": overlap_efficiency(exposed, alone),
    }


def simulated(backward: Backward, computing: float) -> Iterator[Record]:
    """Yield the simulator's steps over caps, and plans."""
    spec = ClusterSpec.uniform(NODES, RANKS, NIC)
    compute = Compute(computing - backward.seconds, backward.seconds)
    for cap in _FINE:
        buckets = ddp_buckets(backward, cap)
        for name, mode in _MODES.items():
            step = emulated_model.step(spec, buckets, compute, mode)
            yield {
                "candidate": name,
                "bucket_cap_mib": cap,
                "num_buckets": len(buckets),
                "median_seconds": step.seconds,
                "median_compute_seconds": step.compute_seconds,
                "exposed_seconds": step.exposed_seconds,
                "communication_seconds": step.communication_seconds,
                "overlap_efficiency": step.overlap_efficiency,
            }


def path_of(out: Path, *, quick: bool) -> Path:
    """Return where the rows are kept."""
    return out / f"bucket_cap{'.quick' if quick else ''}.jsonl"


def table(out: Path, *, quick: bool) -> Iterator[str]:
    """Yield a line for each measured cap."""
    if quick:
        yield "two samples each: the table shows that it works, not how fast anything is"
    path = path_of(out, quick=quick)
    rows = read_records(path) if path.exists() else []
    for row in rows:
        if not row["simulated"]:
            yield (
                f"{row['candidate']:10} cap {row['bucket_cap_mib']:5.2f} MiB, "
                f"{row['num_buckets']:2} buckets: step {1e3 * row['median_seconds']:6.1f} ms "
                f"[{1e3 * row['low_seconds']:.1f}, {1e3 * row['high_seconds']:.1f}], exposed "
                f"{1e3 * row['exposed_seconds']:.1f} ms of {1e3 * row['communication_seconds']:.1f}"
            )
    if rows and rows[0]["chosen_cap_mib"] is not None:
        yield f"simulated best for the hook: {rows[0]['chosen_cap_mib']:.2f} MiB"


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
    quick = options.quick

    def work() -> int:
        part = Part("bucket_cap", 0.5 if quick else 2, partial(make, QUICK if quick else SETTINGS))
        if not options.table:
            run_parts([part], lambda _: path_of(options.out, quick=quick))
        for line in table(options.out, quick=quick) if first_rank() else ():
            print(line)
        return 0

    return exit_code_of(work, "interrupted; nothing is kept of a run that is not whole")


if __name__ == "__main__":
    sys.exit(main())
