"""Runs ``05_compression.py --ddp`` piece by piece and holds the records against the targets."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec

from experiments.compression_ddp_ranks import (
    AUTO,
    COMPUTE,
    EXACT,
    PLAIN,
    SETTINGS_ENV,
    TORCH_FP16,
    TORCH_POWERSGD,
    UNCHUNKED,
    Settings,
)
from experiments.compression_targets import interval, line
from topo_ar.cli.bench_events import EventReader
from topo_ar.emulation.check import report
from topo_ar.emulation.launch import start
from topo_ar.emulation.loopback import open_cluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ExecutionError
from topo_ar.planning.policy import parse_policy
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record, RecordWriter, manifest, read_records
from topo_ar.units import format_seconds, format_size, parse_rate

ROOT = Path(__file__).resolve().parent.parent
_DEADLINE_S = 600.0
# The targets, set before anything was measured.
_MOST_OF_BEST = 1.05
_LEAST_AT_SLOWEST = (0.1e9 / 8, 3.0)
_MOST_COMPUTE_S = 1.0
_OF_A_PIECE = ("rounds", "visits", "piece_seconds")


@dataclass(frozen=True, slots=True)
class Case:
    """One cluster and one optimizer; its records are pooled."""

    nodes: int
    ranks: int
    nic: str
    settings: Settings

    def has(self, record: Record) -> bool:
        """Tell whether a record is of this case."""
        mine = _kept(self.settings)
        where = (record["nodes"], record["ranks_per_node"], record["nic"])
        return where == (self.nodes, self.ranks, self.nic) and record["settings"] == mine

    def num_rounds(self, path: Path) -> int:
        """Return how many counted rounds are in the records."""
        rows = [r for r in read_records(path) if self.has(r) and r["candidate"] == AUTO]
        return sum(len(row["seconds"]) for row in rows)


def run(path: Path, cases: Sequence[Case], pieces: int | None) -> None:
    """Train what is not in the records yet, at most `pieces` pieces, and append them to `path`.

    Raises
    ------
    ExecutionError
        If a rank failed or was late; what was done before is kept.
    """
    with RecordWriter(path) as writer:
        for case in cases:
            while (done := case.num_rounds(path)) < case.settings.rounds and pieces != 0:
                left = case.settings.rounds - done
                print(f"== {case.nic}, {case.settings.optimizer}: {left} rounds left", flush=True)
                records = _piece(case, msgspec.structs.replace(case.settings, rounds=left))
                for record in records:
                    writer.write(record)
                pieces = None if pieces is None else pieces - 1


def _piece(case: Case, settings: Settings) -> list[Record]:
    """Train once on emulated hosts and return a record for each candidate."""
    rows: list[Record] = []
    begun = time.monotonic()

    def on_event(event: str, data: Record) -> None:
        if event == "row":
            rows.append(data)
            return
        left = (data["of"] - data["done"]) * data["took"]
        print(
            f"round {data['done']}/{data['of']} in {data['took']:.1f} s, "
            f"{format_seconds(min(left, settings.piece_seconds))} left",
            flush=True,
        )

    readers: defaultdict[int, EventReader] = defaultdict(
        lambda: EventReader(on_event, sys.stderr.write)
    )
    with open_cluster(
        ClusterSpec.uniform(case.nodes, case.ranks, [case.nic]), keep=[ROOT]
    ) as cluster:
        links = report(cluster)
        job = start(
            cluster,
            [sys.executable, "-m", "experiments.05_compression"],
            env={SETTINGS_ENV: msgspec.json.encode(settings).decode()},
            cwd=ROOT,
            on_line=lambda rank, line: readers[rank].feed(line),
        )
        ended = job.wait(_DEADLINE_S)
    if ended.exit_code or len(rows) != len(settings.candidates) + 1:
        raise ExecutionError(f"{case.nic}: ranks ended with {ended.returncodes}")
    context = {
        "experiment": "compression_ddp",
        "nodes": case.nodes,
        "ranks_per_node": case.ranks,
        "nic": case.nic,
        "optimizer": settings.optimizer,
        "settings": _kept(case.settings),
        "piece_seconds": round(time.monotonic() - begun, 1),
        "manifest": {
            **manifest("namespaces" if links.emulated else "loopback"),
            "links": msgspec.to_builtins(links),
        },
    }
    return [{**context, **row} for row in rows]


def _kept(settings: Settings) -> Record:
    """Return the settings without those of a single piece."""
    plain: Record = json.loads(msgspec.json.encode(settings))
    return {name: plain[name] for name in plain if name not in _OF_A_PIECE}


def table(records: Iterable[Record]) -> Iterator[str]:
    """Yield what every candidate took at every rate, and a line for each target."""
    groups: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["optimizer"], record["nic"]].append(record)
    for _, rows in sorted(groups.items(), key=lambda g: (g[0][0] != "sgd", parse_rate(g[0][1]))):
        yield from _rate_table(rows)


def _rate_table(rows: Sequence[Record]) -> Iterator[str]:
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    steps: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        seconds[row["candidate"]] += row["seconds"]
        steps[row["candidate"]] += chain.from_iterable(row["step_seconds"])
    chosen = [row for row in rows if row["candidate"] == AUTO]
    last = {row["candidate"]: row for row in rows}
    first = rows[0]
    yield ""
    yield (
        f"{first['nodes']}x{first['ranks_per_node']}, NICs of {first['nic']}, "
        f"{first['optimizer']}: {len(seconds[AUTO])} rounds in {len(chosen)} pieces"
    )
    for name, samples in seconds.items():
        found = speedup_interval(seconds[PLAIN], samples)
        text = (
            f"{name:18}{format_seconds(median(samples)):>9} a step, {interval(found)} x plain DDP"
        )
        if last[name].get("sent_nbytes"):
            sent, dense = (format_size(last[name][k]) for k in ("sent_nbytes", "dense_nbytes"))
            text += f", {sent} of {dense} a rank"
        yield text
    for row in chosen:
        why = row["reason"].split("In turns a step took: ")[-1]
        yield f"auto chose {', '.join(row['codecs']) or EXACT}: {why}"
    settings = msgspec.convert(first["settings"], Settings)
    for codec, why in parse_policy(settings.policy, settings.optimizer).excluded:
        yield f"left out by {settings.policy}: {codec}, {why}"
    yield from _verdicts(seconds, steps, settings, parse_rate(first["nic"]))


def _verdicts(
    seconds: dict[str, list[float]],
    steps: dict[str, list[float]],
    settings: Settings,
    rate: float,
) -> Iterator[str]:
    compute = median(seconds[COMPUTE])
    exposed = (median(seconds[PLAIN]) - compute) / compute
    yield line(
        "compute, seconds", f"<= {_MOST_COMPUTE_S:g}", f"{compute:.3f}", compute <= _MOST_COMPUTE_S
    )
    yield line("exposed by plain DDP / compute", "-", f"{exposed:.2f}")
    best = min((EXACT, *settings.codecs), key=lambda name: median(seconds[name]))
    # Step by step where both had as many, else round by round.
    all_steps = len(steps[AUTO]) == len(steps[best])
    auto = speedup_interval(*((steps if all_steps else seconds)[name] for name in (AUTO, best)))
    ok = auto.high <= _MOST_OF_BEST
    yield line(
        f"auto / best admitted, {best}, n={auto.num_samples}",
        f"<= {_MOST_OF_BEST:g}",
        interval(auto),
        ok,
    )
    gain = speedup_interval(seconds[PLAIN], seconds[AUTO])
    slowest, least = _LEAST_AT_SLOWEST
    at_most = f", at most {median(seconds[PLAIN]) / compute:.1f} for compute"
    if rate <= slowest:
        yield line("plain DDP / auto", f">= {least:g}", interval(gain) + at_most, gain.low >= least)
    else:
        yield line("plain DDP / auto", "-", interval(gain) + at_most)
    for name in (TORCH_FP16, TORCH_POWERSGD):
        yield line(f"{name} / auto", "-", interval(speedup_interval(seconds[name], seconds[AUTO])))
    if UNCHUNKED in seconds:
        gain = speedup_interval(seconds[UNCHUNKED], seconds["int8"])
        yield line(f"{UNCHUNKED} / int8", "-", interval(gain))
