"""How long do three workloads take to their target on slow networks, by each plan and codec?

Command: python -m experiments.11_time_to_accuracy --out results/
Minutes: 35 on two cores (2 hosts of 4 ranks; three workloads, three seeds each); --only runs one
workload, --quick shows that all of them run, --seeds takes fewer.

A ResNet on digits, BERT pre-training and a recommender with sparse embeddings train by plain DDP,
through the hook, and with compression between nodes. NICs are slow enough for a step to wait as
long for the wire as it computes: the models are small. Targets were set before: accuracy 0.96, 0.25
nats below the unigram cross-entropy, HR@10 0.60. Each seed's mean over the last three evaluations
has to reach it, and the mean over seeds may differ from plain DDP's by 1 point (0.05 nats).

All candidates of a seed train in one job, step by step in turns; a candidate's clock adds up the
seconds of the slowest rank in its own steps, so that evaluations do not count. Time to accuracy is
the clock at the first evaluation that reaches the target, None where none did.

Writes time_to_accuracy_WORKLOAD_SEED.jsonl, a row a candidate: ``record`` "training", ``workload``,
``candidate``, ``seed``, ``nic``, ``hosts``, ``world_size``, ``metric``, ``falling`` (quality is a
loss), ``target``, ``baseline`` {name, quality}, ``data``, ``synthetic``, ``seconds`` (each step),
``evaluations`` [{epoch, step, seconds, quality}], ``quality`` (mean of the last three),
``target_reached``, ``reached_seconds``, ``manifest``. Seeds that are there already are not trained
again; an interrupted one goes on after its last epoch from a checkpoint beside the records.

Under torchrun or srun the job is what it is, and no host is emulated.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median

import msgspec

from experiments.jobs import Part, as_rank, first_rank, measure, run_parts
from experiments.training_runs import HOOK, PLAIN, RunSettings, train
from experiments.workloads.catalogue import NAMES
from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.telemetry.metrics import median_time_to_accuracy, speedup_interval
from topo_ar.telemetry.records import Record, read_records

SCRIPT = "experiments.11_time_to_accuracy"
NODES, RANKS = 2, 4
# Gradients are small, so the credit of a token bucket has to be, for them to be shaped.
_BURST = 16 << 10
NICS = {"vision": "20mbit", "language": "100mbit", "recommender": "100mbit"}
CANDIDATES = {
    "vision": (PLAIN, HOOK, "int8", "topk:0.05"),
    "language": (PLAIN, HOOK, "int8", "powersgd:4"),
    "recommender": (PLAIN, HOOK),
}
MINUTES = {"vision": 4.0, "language": 4.5, "recommender": 3.0}


def spec_of(nic: str, nodes: int = NODES, ranks: int = RANKS) -> ClusterSpec:
    """Return equal hosts whose small gradients are shaped too."""
    return msgspec.structs.replace(ClusterSpec.uniform(nodes, ranks, nic), burst=_BURST)


def parts(workloads: Sequence[str], seeds: int, out: Path, *, quick: bool) -> Iterator[Part]:
    """Yield a part for each training, seeds outermost, so that an early end leaves whole tables."""
    for seed in range(seeds):
        for workload in workloads:
            settings = RunSettings(
                workload=workload,
                seed=seed,
                candidates=CANDIDATES[workload],
                epochs=2 if quick else None,
                steps=4 if quick else None,
                checkpoint=str((out / f"{workload}_{seed}.checkpoint").resolve()),
            )
            name = f"{workload}_{seed}"
            yield Part(name, 0.5 if quick else MINUTES[workload], partial(_make, settings, out))


def _make(settings: RunSettings, out: Path) -> Iterable[Record]:
    def say(row: Record) -> None:
        if row["record"] == "evaluation":
            print(
                f"  epoch {row['epoch']} {row['candidate']}: {row['quality']:.4f} after "
                f"{row['seconds']:.1f} s",
                flush=True,
            )

    out.mkdir(parents=True, exist_ok=True)
    nic = NICS[settings.workload]
    rows = measure(spec_of(nic), SCRIPT, settings, train, keep=[out.resolve()], on_row=say)
    for row in rows:
        if row["record"] == "training":
            yield {
                "experiment": "time_to_accuracy",
                "nic": None if row["manifest"]["links"] is None else nic,
                **row,
            }
    if rows and settings.checkpoint is not None:  # not on later ranks of a real job
        Path(settings.checkpoint).unlink(missing_ok=True)


def path_of(out: Path, name: str, *, quick: bool) -> Path:
    """Return where the rows of a seed of a workload are kept."""
    return out / f"time_to_accuracy_{name}{'.quick' if quick else ''}.jsonl"


def table(out: Path, *, quick: bool) -> Iterator[str]:
    """Yield what each candidate reached, when, and whether that is near plain DDP's."""
    if quick:
        yield "a few steps each: the table shows that it works, not what is reached"
    pattern = path_of(out, "*", quick=quick).name
    files = [
        path
        for path in sorted(out.glob(pattern))
        if quick or not path.name.endswith(".quick.jsonl")
    ]
    rows = [row for path in files for row in read_records(path)]
    for workload in NAMES:
        mine = [row for row in rows if row["workload"] == workload]
        if mine:
            yield from workload_table(mine)


def workload_table(rows: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of a workload's trainings."""
    first = rows[0]
    base = first["baseline"]
    yield (
        f"{first['workload']}: {first['data']}{' (SYNTHETIC)' * first['synthetic']}; "
        f"{first['metric']} target {first['target']:.4f}, {base['name']} {base['quality']:.4f}"
    )
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for row in rows:
        groups[row["candidate"]].append(row)
    plain = groups[PLAIN]
    for name, mine in groups.items():
        qualities = [row["quality"] for row in mine]
        times = [
            float("inf") if row["reached_seconds"] is None else row["reached_seconds"]
            for row in mine
        ]
        steps = [[s for row in group for s in row["seconds"]] for group in (plain, mine)]
        faster = speedup_interval(*steps)
        apart = abs(mean(qualities) - mean(row["quality"] for row in plain))
        met = sum(row["target_reached"] for row in mine)
        yield (
            f"  {name:12} {mean(qualities):.4f} of seeds "
            f"{', '.join(f'{quality:.4f}' for quality in qualities)}; target met by {met} of "
            f"{len(mine)}; in {median_time_to_accuracy(times):.1f} s "
            f"({', '.join(f'{seconds:.1f}' for seconds in times)}); step {median(steps[1]):.3f} s, "
            f"{faster.ratio:.2f} [{faster.low:.2f}, {faster.high:.2f}] x plain DDP"
            + f"; {apart:.4f} apart: {'PASS' if apart <= first['tolerance'] else 'MISS'}"
            * (name != PLAIN)
        )


def main() -> int:
    """Read the command line."""
    if as_rank(RunSettings, train):
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--quick", action="store_true", help="a few steps: that it runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()

    def work() -> int:
        if not options.table:
            seeds = 1 if options.quick else options.seeds
            run_parts(
                list(parts(options.only, seeds, options.out, quick=options.quick)),
                lambda name: path_of(options.out, name, quick=options.quick),
            )
        for line in table(options.out, quick=options.quick) if first_rank() else ():
            print(line)
        return 0

    return exit_code_of(work, "interrupted; the same command goes on after the last epoch")


if __name__ == "__main__":
    sys.exit(main())
