"""Every number of the paper, computed from result files.

A number has a value, the text that the paper prints, and the files it comes from. Numbers whose
files are missing are left out, so the same functions serve a single re-run experiment.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from topo_ar.errors import ConfigError
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import read_records
from topo_ar.units import format_size

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Number:
    """One number: what it is, as printed, and the names of the files that it comes from."""

    value: float
    text: str
    sources: tuple[str, ...]


Named = Iterator[tuple[str, float, str]]


def collect(results: Path) -> dict[str, Number]:
    """Return the numbers of all result files that are there, by key.

    Raises
    ------
    ConfigError
        If two functions give the same key, or a file cannot be read.
    """
    numbers: dict[str, Number] = {}
    for pattern, compute in _SOURCES:
        for path in sorted(results.glob(pattern)):
            for key, value, text in compute(path):
                if key in numbers:
                    raise ConfigError(f"{path.name} gives {key!r}, which is there already")
                numbers[key] = Number(value, text, (path.name,))
    return numbers


def stamp(results: Path) -> dict[str, str]:
    """Return what page one says of the records: a digest, the days' commits, the machine."""
    digest = hashlib.sha256()
    commits, machines = set(), set()
    names = sorted({path.name for pattern, _ in _SOURCES for path in results.glob(pattern)})
    for name in names:
        digest.update((results / name).read_bytes())
        for record in read_records(results / name):
            manifest = record.get("manifest") or {}
            if manifest.get("commit"):
                commits.add(manifest["commit"][:7])
                machines.add(
                    f"{manifest['cpu_count']} cores, {manifest['machine']}, "
                    f"torch {manifest['torch']}, Python {manifest['python']}"
                )
    return {
        "records": digest.hexdigest()[:12],
        "commits": ", ".join(sorted(commits)),
        "machine": "; ".join(sorted(machines)),
    }


def _by_candidate(rows: list[Record]) -> dict[int, dict[str, Record]]:
    found: dict[int, dict[str, Record]] = {}
    for row in rows:
        if "candidate" in row and "seconds" in row:
            found.setdefault(row["nbytes"], {})[row["candidate"]] = row
    return found


def _size(nbytes: int) -> str:
    return format_size(nbytes).replace(" ", "")


def _ratio(key: str, baseline: list[float], candidate: list[float]) -> Named:
    ratio = speedup_interval(baseline, candidate)
    yield key, ratio.ratio, f"{ratio.ratio:.2f}"
    yield f"{key}-interval", ratio.high - ratio.low, f"{ratio.low:.2f} to {ratio.high:.2f}"


def _all_reduce(path: Path) -> Named:
    rows = list(read_records(path))
    for nbytes, row in sorted(_by_candidate(rows).items()):
        size, plan = _size(nbytes), row["plan"]
        yield from _ratio(f"demo-{size}-speedup", row["gloo"]["seconds"], plan["seconds"])
        if plan["fraction"] is not None:
            share = plan["wire_limit_seconds"] / median(plan["seconds"])
            yield f"demo-{size}-share", share, f"{100 * share:.1f} %"
    wrong = sum(row["wrong"] for row in rows if row.get("wrong") is not None)
    yield "demo-wrong", wrong, f"{wrong}"
    measured = [r for r in rows if r.get("candidate") == "plan" and r["nbytes"] >= 1 << 20]
    errors = [abs(r["predicted_seconds"] / median(r["seconds"]) - 1) for r in measured]
    yield "demo-prediction-error", max(errors), f"{100 * max(errors):.1f} %"


def _training(path: Path) -> Named:
    rows = list(read_records(path))
    steps = {row["candidate"]: row for row in rows if row.get("record") == "training"}
    hook, plain = steps["hook"], steps["plain"]
    yield from _ratio("training-speedup", plain["seconds"], hook["seconds"])
    exposed = plain["exposed_seconds"] / hook["exposed_seconds"]
    yield "training-exposed", exposed, f"{exposed:.2f}"
    for row in rows:
        for oracle in row.get("oracles", ()):
            value = oracle["value"]
            yield f"parity-{oracle['name'].replace('_', '-')}", value, f"{value:.3g}"


def _wire(path: Path) -> Named:
    name = path.stem.removeprefix("wire_")
    for nbytes, row in sorted(_by_candidate(list(read_records(path))).items()):
        size, plan = _size(nbytes), row["plan"]
        for other, short in _PEERS.items():
            if other in row:
                key = f"wire-{name}-{size}-{short}"
                yield from _ratio(key, row[other]["seconds"], plan["seconds"])
        if plan["fraction"] is not None:
            share = plan["wire_limit_seconds"] / median(plan["seconds"])
            yield f"wire-{name}-{size}-share", share, f"{100 * share:.1f} %"


_PEERS = {"gloo": "gloo", "openmpi-han": "han", "openmpi": "openmpi", "plan:equal": "equal"}


def _simulator(path: Path) -> Named:
    rows = [row for row in read_records(path) if row.get("in_scope") and not row["calibrated"]]
    rows = [row for row in rows if row["nbytes"] >= 1 << 20]
    errors = sorted(abs(row["error"]) for row in rows)
    tail = quantiles(errors, n=20, method="inclusive")[-1]
    yield "simulator-rows", len(errors), f"{len(errors)}"
    yield "simulator-median-error", median(errors), f"{100 * median(errors):.1f} %"
    yield "simulator-tail-error", tail, f"{100 * tail:.1f} %"


def _published(path: Path) -> Named:
    rows = [row for row in read_records(path) if row.get("kind") == "time"]
    yield "published-rows", len(rows), f"{len(rows)}"
    shares = [row["bound_seconds"] / row["measured_seconds"] for row in rows]
    beaten = sum(share > 1 for share in shares)
    yield "published-beaten", beaten, f"{beaten}"
    for system in sorted({row["system"] for row in rows if row["num_nodes"] > 2}):
        of_system = [row for row in rows if row["system"] == system]
        largest = max(of_system, key=lambda row: row["nbytes"])
        share = largest["bound_seconds"] / largest["measured_seconds"]
        yield f"published-{system}-share", share, f"{100 * share:.0f} %"
        of_ring = largest["null_ring_seconds"] / largest["measured_seconds"]
        yield f"published-{system}-ring-share", of_ring, f"{100 * of_ring:.0f} %"


def _faults(path: Path) -> Named:
    seconds: dict[str, list[float]] = {}
    for row in read_records(path):
        seconds.setdefault(row["fault"], []).append(row["seconds"])
    killed = seconds["killed rank"]
    yield "fault-killed-least", min(killed), f"{min(killed):.2f}"
    yield "fault-killed-most", max(killed), f"{max(killed):.2f}"


def _soak(path: Path) -> Named:
    rows = list(read_records(path))
    steps = max(row["steps"] for row in rows)
    yield "soak-steps", steps, f"{steps:,}"
    wrong = sum(row["wrong"] for row in rows if row["job"] == "planned")
    yield "soak-wrong", wrong, f"{wrong}"


def _accuracy(path: Path) -> Named:
    rows = [row for row in read_records(path) if "accuracy" in row]
    found: dict[str, list[float]] = {}
    for row in rows:
        feedback = "" if row["feedback"] or row["codec"] == "none" else "-no-feedback"
        key = f"{row['task']}-{row['optimizer']}-{row['codec']}{feedback}"
        found.setdefault(key, []).append(row["accuracy"])
    for key, values in sorted(found.items()):
        mean = sum(values) / len(values)
        yield f"accuracy-{key}", mean, f"{100 * mean:.1f} %"


def _scaling(path: Path) -> Named:
    rows = [row for row in read_records(path) if row["kind"] == "weak" and row["gpus"] == 1024]
    for row in rows:
        system, plan = row["system"].partition(",")[0], row["candidate"].replace(", ", "-")
        if "Ethernet" in row["system"]:
            system += " " + row["system"].rpartition(" Gbit/s")[0].rpartition(" ")[2]
        name = f"{row['model']}-{system.replace(' ', '-').lower()}-{plan}"
        yield f"scaling-{name}", row["efficiency"], f"{100 * row['efficiency']:.0f} %"
    slowest = max(row["simulation_seconds"] for row in rows)
    yield "scaling-simulation-seconds", slowest, f"{slowest:.1f}"


_SOURCES: tuple[tuple[str, Callable[[Path], Named]], ...] = (
    ("allreduce_size.jsonl", _all_reduce),
    ("ddp_parity.jsonl", _training),
    ("wire_*.jsonl", _wire),
    ("predicted_measured.jsonl", _simulator),
    ("published.jsonl", _published),
    ("scaling.jsonl", _scaling),
    ("fault_times.jsonl", _faults),
    ("soak.jsonl", _soak),
    ("compression_accuracy.jsonl", _accuracy),
)
