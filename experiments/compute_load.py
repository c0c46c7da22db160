"""What do all-reduces take from ranks that compute meanwhile, and how long do these make them take?

Command: python -m experiments.compute_load --out results/
Minutes: 10 on two cores; --only runs one part, --quick shows that both run.

products: 2 hosts of 4 ranks with NICs of 1 Gbit/s; in every rank a second thread multiplies 384x384
matrices without end while 25 MB are reduced by gloo, by the plan, and by the plan on shared
buffers. Core time taken is the share of products that is lost, against a window without
communication in the same round, times the seconds of a call, times the cores.

step: one host of 8 ranks trains ResNet-18 by plain DDP, through the hook, through the hook with
zero copy, through the hook held to the plain path, and without communication. Exposed communication
is what a step takes longer than the last.

auto-one-node, auto-slow, auto-fast: one host of 8 ranks, 2 hosts of 4 with NICs of 1 Gbit/s, 2
hosts of 2 with 10 Gbit/s. What plan="auto" chooses in a training of its own, beside plain DDP, the
hook held to the plain path and the hook held to the plan. Forced to the plain path no more than 1 %
of a step may be lost, and what auto chooses may lose no more against plain DDP.

Candidates take turns, and every round begins with another one. Each part writes load_PART.jsonl, a
row a candidate; parts that are there already are not measured again. The table at the end holds the
targets that were set before against what was measured, with 95 % intervals. Exits with 0 when all
parts ran, whatever the targets say.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist

from experiments.auto_choice_ranks import AUTO, measure_choice
from experiments.compute_load_ranks import (
    COMPUTE,
    GLOO,
    HOOK,
    HOOK_FLAT,
    HOOK_ZERO_COPY,
    PLAIN,
    PLAN,
    ZERO_COPY,
    Settings,
    measure_products,
    measure_steps,
)
from topo_ar.cli.bench_events import EventReader, write_event
from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.check import report
from topo_ar.emulation.launch import start
from topo_ar.emulation.loopback import open_cluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.telemetry.metrics import RatioInterval, exposed_interval, speedup_interval
from topo_ar.telemetry.records import Record, RecordWriter, manifest, read_records

ROOT = Path(__file__).resolve().parent.parent
PART_ENV, SETTINGS_ENV = "COMPUTE_LOAD_PART", "COMPUTE_LOAD_SETTINGS"
_DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True)
class Part:
    """One run on emulated hosts."""

    nodes: int
    ranks: int
    minutes: float
    measure: Callable[[Settings], list[Record]]
    nic: str = "1gbit"


PARTS = {
    "products": Part(2, 4, 2, measure_products),
    "step": Part(1, 8, 3, measure_steps),
    "auto-one-node": Part(1, 8, 2, measure_choice),
    "auto-slow": Part(2, 4, 2, measure_choice),
    "auto-fast": Part(2, 2, 1, measure_choice, "10gbit"),
}

QUICK = Settings(
    samples=2,
    warm_up=2,
    nbytes=1_000_000,
    idle_seconds=0.1,
    width=8,
    image_side=8,
    auto_width=8,
    auto_trials=1,
)


def run_rank() -> None:
    """Do one rank's part under torchrun's environment; rank 0 writes an event a row."""
    settings = msgspec.json.decode(os.environ[SETTINGS_ENV], type=Settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rows = PARTS[os.environ[PART_ENV]].measure(settings)
        for row in rows if dist.get_rank() == 0 else ():
            write_event(sys.stdout, "row", row)
    finally:
        dist.destroy_process_group()


def run(names: Sequence[str], out: Path, *, quick: bool) -> None:
    """Measure the parts that have no records yet."""
    left = [name for name in names if not path_of(out, name, quick=quick).exists()]
    for number, name in enumerate(left):
        minutes = sum(PARTS[later].minutes for later in left[number:])
        print(f"== {name}: {number + 1} of {len(left)}, about {minutes:g} min left", flush=True)
        begun = time.monotonic()
        _measure(name, QUICK if quick else Settings(), path_of(out, name, quick=quick))
        print(f"== {name}: {(time.monotonic() - begun) / 60:.1f} min", flush=True)


def _measure(name: str, settings: Settings, path: Path) -> None:
    part = PARTS[name]
    rows: list[Record] = []
    readers: defaultdict[int, EventReader] = defaultdict(
        lambda: EventReader(lambda event, row: rows.append(row), sys.stderr.write)
    )
    with open_cluster(
        ClusterSpec.uniform(part.nodes, part.ranks, [part.nic]), keep=[ROOT]
    ) as cluster:
        links = report(cluster)
        job = start(
            cluster,
            [sys.executable, "-m", "experiments.compute_load"],
            env={PART_ENV: name, SETTINGS_ENV: msgspec.json.encode(settings).decode()},
            cwd=ROOT,
            on_line=lambda rank, line: readers[rank].feed(line),
        )
        ended = job.wait(_DEADLINE_S)
    if ended.exit_code or not rows:
        raise ExecutionError(f"{name}: ranks ended with {ended.returncodes}")
    context = {
        "experiment": "compute_load",
        "part": name,
        "nodes": part.nodes,
        "world_size": part.nodes * part.ranks,
        "settings": msgspec.to_builtins(settings),
        "manifest": {
            **manifest("namespaces" if links.emulated else "loopback"),
            "links": msgspec.to_builtins(links),
        },
    }
    # A part counts when it is whole.
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with RecordWriter(partial) as writer:
        for row in rows:
            writer.write({**context, **row})
    partial.rename(path)


def path_of(out: Path, part: str, *, quick: bool) -> Path:
    """Return where the rows of a part are kept."""
    return out / f"load_{part}{'.quick' if quick else ''}.jsonl"


def table(out: Path, *, quick: bool) -> Iterator[str]:
    """Yield what each candidate took, and a line for every target of a part that was measured."""
    if quick:
        yield "two samples each: the table shows that it works, not how fast anything is"
    for name, lines in (("products", products_table), ("step", step_table)):
        path = path_of(out, name, quick=quick)
        if path.exists():
            yield from lines({row["candidate"]: row for row in read_records(path)})
    for name in PARTS:
        path = path_of(out, name, quick=quick)
        if name.startswith(AUTO) and path.exists():
            yield f"{name}:"
            yield from choice_table(list(read_records(path)))


def products_table(rows: dict[str, Record]) -> Iterator[str]:
    """Yield the lines of all-reduces beside matrix products."""
    taken = {name: core_seconds(rows[name], rows[COMPUTE]) for name in (GLOO, PLAN, ZERO_COPY)}
    rate = median(rows[COMPUTE]["products_per_second"])
    yield f"{COMPUTE:16} {rate:8.0f} products/s"
    for name, each in taken.items():
        rate = median(rows[name]["products_per_second"])
        yield (
            f"{name:16} {rate:8.0f} products/s meanwhile, "
            f"{1e3 * median(rows[name]['seconds']):.1f} ms a call, "
            f"{1e3 * median(each):.0f} ms of cores taken"
        )
    for ours in (PLAN, ZERO_COPY):
        seconds = (rows[GLOO]["seconds"], rows[ours]["seconds"])
        yield verdict(f"{ours}: times as fast as gloo", 1.6, speedup_interval, *seconds)
        cores = (taken[GLOO], taken[ours])
        yield verdict(f"{ours}: gloo's core time over ours", 1.0, speedup_interval, *cores)


def step_table(rows: dict[str, Record]) -> Iterator[str]:
    """Yield the lines of training steps."""
    compute = rows[COMPUTE]["seconds"]
    for name, row in rows.items():
        exposed = max(0.0, median(row["seconds"]) - median(compute))
        yield (
            f"{name:16} {1e3 * median(row['seconds']):8.1f} ms a step"
            + f", {1e3 * exposed:.1f} ms of it exposed" * (name != COMPUTE)
        )
    plain = rows[PLAIN]["seconds"]
    for ours in (HOOK, HOOK_ZERO_COPY):
        what = f"{ours}: plain DDP's exposed time over ours"
        yield verdict(what, 1.2, exposed_interval, plain, rows[ours]["seconds"], compute)
    what, flat = f"{HOOK_FLAT}: plain DDP's step over ours", rows[HOOK_FLAT]["seconds"]
    yield verdict(what, 1 / 1.01, speedup_interval, plain, flat)


def choice_table(rows: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of what auto chose, and of what it chose between."""
    by_name = {row["candidate"]: row for row in rows}
    for row in rows:
        if row["candidate"] == AUTO:
            yield f"{AUTO:16} {row['path']}: {row['reason']}"
        else:
            yield f"{row['candidate']:16} {1e3 * median(row['seconds']):8.1f} ms a step"
    plain = by_name[PLAIN]["seconds"]
    what, flat = f"{HOOK_FLAT}: plain DDP's step over ours", by_name[HOOK_FLAT]["seconds"]
    yield verdict(what, 1 / 1.01, speedup_interval, plain, flat)
    for path in dict.fromkeys(row["path"] for row in rows if row["candidate"] == AUTO):
        what = f"{AUTO}, {path}: plain DDP's step over ours"
        ours = by_name[HOOK if path == "planned" else HOOK_FLAT]["seconds"]
        yield verdict(what, 1 / 1.01, speedup_interval, plain, ours)


def core_seconds(row: Record, idle: Record) -> list[float]:
    """Return the core time that a call takes from the products, for each round.

    A product takes ``cores / rate`` core seconds when nothing else runs, and ``(rate - slower
    rate) * seconds`` of them are lost.
    """
    rounds = zip(
        row["seconds"], row["products_per_second"], idle["products_per_second"], strict=True
    )
    return [row["cores"] * seconds * (1 - slower / rate) for seconds, slower, rate in rounds]


def verdict(
    what: str,
    least: float,
    compare: Callable[..., RatioInterval],
    *samples: Sequence[float],
) -> str:
    """Return the line of a target: what `compare` says of `samples` shall be `least` or more."""
    try:
        found = compare(*samples)
    except ConfigError as error:
        return f"{what:50} {least:7.3g} NONE ({error})"
    word = "PASS" if found.ratio >= least else "MISS"
    interval = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
    return f"{what:50} {least:7.3g} {interval:>24} {word}"


def main() -> int:
    """Read the command line."""
    if SETTINGS_ENV in os.environ:
        run_rank()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--quick", action="store_true", help="small and two samples: that it runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()

    def work() -> int:
        if not options.table:
            run([options.only] if options.only else [*PARTS], options.out, quick=options.quick)
        for line in table(options.out, quick=options.quick):
            print(line)
        return 0

    return exit_code_of(work, "interrupted; whole parts are kept")


if __name__ == "__main__":
    sys.exit(main())
