"""What does compression between nodes cost in accuracy, and what in time?

Commands: python -m experiments.05_compression --accuracy --out results/
          python -m experiments.05_compression --kernels --out results/
          python -m experiments.05_compression --ddp --out results/
          python -m experiments.05_compression --table --out results/
Minutes: accuracy 35 on two cores, fewer with --seeds or --quick; kernels 2; ddp 35.

--accuracy trains MNIST-1D (generated) and the digits of scikit-learn (bundled) with SGD and Adam on
8 simulated ranks, 2 nodes of 4, with every codec, with and without error feedback, 3 seeds each;
compression_accuracy.jsonl has a row for each training. Rows that are there already are not made
again. It needs the extra ``workloads``.

--kernels times selection, quantisation and the finite check against torch's own operations on
25 MiB and one thread, in turns, and a step of PowerSGD with error feedback against torch's hook on
a layer of BERT (28 MB) and the tail of ResNet-18 (24 MB); compression_kernels.jsonl has the raw
samples.

--ddp trains ResNet-18 on emulated hosts, 2 of 4 ranks with NICs of 0.1, 0.5 and 1 Gbit/s, with SGD
and with Adam: plain DDP, every codec that the policy admits, the planner's choice and torch's own
hooks take turns, with --visits steps in a round for those that send little. ``compute`` is a step
without any communication. compression_ddp.jsonl has a row for each with its raw samples and bytes.
A piece of it takes less than 8 minutes and is kept when it is whole; rounds that are there already
are not made again, and --pieces 1 ends after the next piece.

--table prints the targets, which were set before, beside what the records say.
"""

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from experiments import compression_ddp, compression_ddp_ranks
from experiments.compression_accuracy import Training, train, trainings
from experiments.compression_kernels import measure
from experiments.compression_kernels_powersgd import measure_powersgd
from experiments.compression_targets import accuracy_lines, kernel_lines
from experiments.workloads.small import load
from topo_ar.cli.bench_events import write_event
from topo_ar.cli.script import exit_code_of
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record, RecordWriter, manifest, read_records

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What to do, and how much of it."""

    accuracy: bool = False
    kernels: bool = False
    ddp: bool = False
    table: bool = False
    optimizers: tuple[str, ...] = ("sgd", "adam")
    nics: tuple[str, ...] = ("100mbit", "500mbit", "1gbit")
    nodes: int = 2
    ranks: int = 4
    pieces: int | None = None
    rounds: int = 10
    visits: int = 3
    tasks: tuple[str, ...] = ("mnist1d", "digits")
    seeds: int = 3
    samples: int = 30
    quick: bool = False
    out: Path = Path("results")


def run_kernels(config: Config) -> None:
    """Time the kernels, write a record and print a line for each."""
    nbytes, samples = (_MIB, 3) if config.quick else (25 * _MIB, config.samples)
    with RecordWriter(path_of(config, "kernels")) as writer:
        steps = [] if config.quick else measure_powersgd(samples)
        for row in chain(measure(nbytes, samples), steps):
            writer.write({**row, "manifest": manifest("threads")})
            theirs, ours = row["torch_seconds"], row["ours_seconds"]
            found = speedup_interval(theirs, ours)
            print(
                f"{row['kernel']:31} torch {1e3 * statistics.median(theirs):7.2f} ms, "
                f"topo_ar {1e3 * statistics.median(ours):7.2f} ms, "
                f"ratio {found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]",
                flush=True,
            )


def run_accuracy(config: Config) -> None:
    """Train what is not in the records yet, then print the table."""
    path = path_of(config, "accuracy")
    tasks = {task: load(task) for task in config.tasks}
    wanted = trainings(list(tasks), 1 if config.quick else config.seeds)
    with RecordWriter(path) as writer:
        done = {_training(record).key() for record in read_records(path)}
        left = [training for training in wanted if training.key() not in done]
        for number, training in enumerate(left, 1):
            task = tasks[training.task]
            row = train(training, task, 20 if config.quick else task.steps)
            writer.write({**row, "manifest": manifest("threads")})
            print(f"{number}/{len(left)} {_words(row)}", flush=True)
    keys = {training.key() for training in wanted}
    print_table([r for r in read_records(path) if _training(r).key() in keys])


def run_ddp(config: Config) -> None:
    """Train on emulated hosts what is not in the records yet."""
    more: dict[str, Any] = {"rounds": config.rounds, "visits": config.visits}
    nics, optimizers = config.nics, config.optimizers
    if config.quick:
        nics, optimizers = nics[-1:], optimizers[:1]
        more = {"rounds": 2, "width": 16}
    cases = [
        compression_ddp.Case(
            config.nodes,
            config.ranks,
            nic,
            compression_ddp_ranks.Settings(optimizer=optimizer, **more),
        )
        for optimizer in optimizers
        for nic in nics
    ]
    compression_ddp.run(path_of(config, "ddp"), cases, config.pieces)


def table(config: Config) -> Iterator[str]:
    """Yield the targets of everything that there are records of."""
    parts = (
        ("kernels", kernel_lines),
        ("accuracy", accuracy_lines),
        ("ddp", compression_ddp.table),
    )
    for name, lines in parts:
        path = path_of(config, name)
        if path.exists():
            yield from lines(read_records(path))


def path_of(config: Config, part: str) -> Path:
    """Return where the records of a part are kept."""
    return config.out / f"compression_{part}{'.quick' if config.quick else ''}.jsonl"


def print_table(records: Sequence[Record]) -> None:
    """Print mean and standard deviation of accuracies over seeds, and the bytes' ratio."""
    groups: defaultdict[tuple[str, str, str, bool], list[Record]] = defaultdict(list)
    for r in records:
        groups[r["task"], r["optimizer"], r["codec"], r["feedback"]].append(r)
    for (task, optimizer, codec, feedback), rows in groups.items():
        found = [100 * r["accuracy"] for r in rows if r["accuracy"] is not None]
        spread = f" +- {statistics.stdev(found):.2f}" if len(found) > 1 else ""
        text = f"{statistics.mean(found):.2f}{spread} %" if found else "not finite"
        if len(found) < len(rows):
            text += f" ({len(rows) - len(found)} of {len(rows)} not finite)"
        sent = [r for r in rows if r["node_sent_nbytes_per_step"]]
        ratio = sent and sent[0]["dense_nbytes_per_step"] / sent[0]["node_sent_nbytes_per_step"]
        how = "" if codec == "none" else " + feedback" if feedback else " without feedback"
        print(f"{task:8} {optimizer:5} {codec + how:32} {text}" + (f", 1/{ratio:.1f}" * bool(sent)))


def _training(record: Record) -> Training:
    return Training(*(record[key] for key in ("task", "optimizer", "codec", "feedback", "seed")))


def _words(row: dict[str, Any]) -> str:
    accuracy = "not finite" if row["accuracy"] is None else f"{100 * row['accuracy']:.2f} %"
    how = "+ feedback " if row["feedback"] else ""
    return (
        f"{row['task']} {row['optimizer']} {row['codec']} {how}seed {row['seed']}: {accuracy} "
        f"in {row['seconds']:.0f} s"
    )


def main() -> int:
    """Read the command line."""
    if compression_ddp_ranks.SETTINGS_ENV in os.environ:
        compression_ddp_ranks.run_rank(partial(write_event, sys.stdout))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Config()
    parser.add_argument("--accuracy", action="store_true", help="train the table of accuracies")
    parser.add_argument("--kernels", action="store_true", help="time the kernels")
    parser.add_argument("--ddp", action="store_true", help="time trainings on emulated hosts")
    parser.add_argument("--table", action="store_true", help="print targets beside the records")
    parser.add_argument(
        "--optimizers", nargs="+", choices=("sgd", "adam"), default=list(defaults.optimizers)
    )
    parser.add_argument("--nics", nargs="+", default=list(defaults.nics), help="rates to emulate")
    parser.add_argument("--nodes", type=int, default=defaults.nodes)
    parser.add_argument("--ranks", type=int, default=defaults.ranks, help="ranks on each node")
    parser.add_argument("--pieces", type=int, help="of --ddp, at most; all when left out")
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="of --ddp, in all")
    parser.add_argument("--visits", type=int, default=defaults.visits, help="steps a round")
    parser.add_argument(
        "--tasks", nargs="+", choices=("mnist1d", "digits"), default=list(defaults.tasks)
    )
    parser.add_argument("--seeds", type=int, default=defaults.seeds)
    parser.add_argument("--samples", type=int, default=defaults.samples)
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument("--out", type=Path, default=defaults.out)
    options = vars(parser.parse_args())
    lists = {name: tuple(options[name]) for name in ("tasks", "nics", "optimizers")}
    config = Config(**{**options, **lists})
    if not (config.accuracy or config.kernels or config.ddp or config.table):
        parser.error("choose --accuracy, --kernels, --ddp or --table")
    torch.set_num_threads(1)

    def work() -> int:
        if config.kernels:
            run_kernels(config)
        if config.accuracy:
            run_accuracy(config)
        if config.ddp:
            run_ddp(config)
        if config.table:
            for text in table(config):
                print(text)
        return 0

    return exit_code_of(work, "interrupted; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
