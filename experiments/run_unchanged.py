"""Is a script that knows nothing of us faster under `topo-ar run`, and is advice worth taking?

Command: python -m experiments.run_unchanged --out results/
Minutes: 6 on two cores; --only runs one part

slow: 2 hosts of 4 ranks with NICs of 1 Gbit/s. fast: 2 hosts of 2 ranks with 10 Gbit/s. In each
round `experiments/workloads/plain_ddp.py` (ResNet-18 of width 32) runs as it is and under
`topo-ar run`, in turns; compared are the steps after the 45th, when `plan="auto"` has chosen.
Target: faster where the network is slow, no more than 3 % slower where it is fast.

advice: 2 hosts of 4 ranks with 1 Gbit/s. `topo-ar advise` looks at the script, and each of its
suggestions is then taken: what it predicted, with its interval, stands beside what was gained. A
suggestion counts as right when the gain is in the interval.

Each part writes unchanged_PART.jsonl, a row a candidate; parts that are there are not measured
again.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.check import report
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import launch
from topo_ar.emulation.loopback import LoopbackCluster, open_cluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.integrations.injection import environment
from topo_ar.integrations.run_options import RunOptions
from topo_ar.telemetry.metrics import RatioInterval, speedup_interval
from topo_ar.telemetry.records import Record, RecordWriter, manifest, read_records

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ["-m", "experiments.workloads.plain_ddp"]
RUN = ["-m", "topo_ar", "run"]
PLAIN, OURS = "plain", "topo-ar run"
PARTS = {"slow": (2, 4, "1gbit"), "fast": (2, 2, "10gbit"), "advice": (2, 4, "1gbit")}
_CHOSEN = 45
_OBSERVED = 30
_DEADLINE_S = 200.0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--rounds", type=int, default=3, help="of slow and fast")
    parser.add_argument("--steps", type=int, default=75, help="of each run")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()
    if options.steps <= _CHOSEN:
        parser.error(f"--steps must be more than {_CHOSEN}")

    def work() -> int:
        for part in [options.only] if options.only else PARTS:
            path = options.out / f"unchanged_{part}.jsonl"
            if not options.table and not path.exists():
                _measure(part, options.rounds, options.steps, path)
            if path.exists():
                for line in table(part, list(read_records(path))):
                    print(line)
        return 0

    return exit_code_of(work, "interrupted; whole parts are kept")


def _measure(part: str, rounds: int, steps: int, path: Path) -> None:
    nodes, ranks, nic = PARTS[part]
    print(f"== {part}: {nodes} hosts of {ranks} ranks, {nic}", flush=True)
    spec = ClusterSpec.uniform(nodes, ranks, [nic])
    with (
        tempfile.TemporaryDirectory(prefix="run-unchanged-") as name,
        open_cluster(spec, keep=[ROOT, name]) as cluster,
    ):
        links = report(cluster)
        if part == "advice":
            rows = _advice(cluster, Path(name), steps)
        else:
            rows = _turns(cluster, Path(name), rounds, steps)
    context = {
        "experiment": "run_unchanged",
        "part": part,
        "nodes": nodes,
        "world_size": nodes * ranks,
        "nic": nic,
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


def _turns(
    cluster: Cluster | LoopbackCluster, folder: Path, rounds: int, steps: int
) -> list[Record]:
    rows: dict[str, Record] = {name: {"candidate": name, "runs": []} for name in (PLAIN, OURS)}
    told = folder / "told.json"
    prefixes = {PLAIN: [], OURS: [*RUN, "--json", str(told)]}
    for number in range(rounds):
        for name in (PLAIN, OURS) if number % 2 == 0 else (OURS, PLAIN):
            seconds = _run(cluster, folder, prefixes[name], ["--steps", str(steps)])
            rows[name]["runs"].append(seconds)
            print(f"{name:12} {1e3 * median(seconds[_CHOSEN:]):7.1f} ms a step", flush=True)
            if name == OURS:
                rows[OURS].setdefault("told", []).append(json.loads(told.read_text())["models"])
    return list(rows.values())


def _run(
    cluster: Cluster | LoopbackCluster,
    folder: Path,
    prefix: Sequence[str],
    options: Sequence[str],
) -> list[float]:
    """Run the script on every rank and return the seconds of rank 0's steps."""
    out = folder / "steps.json"
    command = [sys.executable, *prefix, *SCRIPT, *options, "--out", str(out)]
    ended = launch(cluster, command, cwd=ROOT, timeout_s=_DEADLINE_S)
    if ended.exit_code:
        raise ExecutionError(f"{' '.join(command)}: ranks ended with {ended.returncodes}")
    seconds: list[float] = json.loads(out.read_text())
    return seconds


def _advice(cluster: Cluster | LoopbackCluster, folder: Path, steps: int) -> list[Record]:
    """Ask for advice, then take it, each suggestion between two runs of the script as it is."""
    told = folder / "advice.json"
    looking = RunOptions(observe_steps=_OBSERVED, report=str(told))
    command, variables = [sys.executable, *SCRIPT], environment(looking, os.environ)
    ended = launch(cluster, command, cwd=ROOT, env=variables, timeout_s=_DEADLINE_S)
    if ended.exit_code:
        raise ExecutionError(f"advise: ranks ended with {ended.returncodes}")
    advice = json.loads(told.read_text())
    before = _run(cluster, folder, [], ["--steps", "40"])[10:]
    rows: list[Record] = [{"candidate": PLAIN, "seconds": before, "advice": advice}]
    for each in advice["suggestions"]:
        taken = _taken(each, steps)
        if taken is None:
            continue
        prefix, options, first, batches = taken
        seconds = _run(cluster, folder, prefix, options)[first:]
        row = {"candidate": each["kind"], "seconds": seconds, "batches_per_step": batches}
        rows.append({**row, "suggestion": each})
        print(f"{each['kind']:14} {1e3 * median(seconds):7.1f} ms a step", flush=True)
    return rows


def _taken(each: Record, steps: int) -> tuple[list[str], list[str], int, int] | None:
    """Return prefix and options that take a suggestion, the first step that counts, batches."""
    kind, value = each["kind"], each["value"]
    if kind == "bucket_cap":
        return [], ["--steps", "40", "--bucket-cap-mb", str(value)], 10, 1
    if kind == "accumulation":
        return [], ["--steps", "25", "--accumulate", str(value)], 5, int(value)
    if kind == "larger_batch":
        return [], ["--steps", "25", "--batch", str(value)], 5, int(value)
    if kind == "plan":
        return RUN, ["--steps", str(steps)], _CHOSEN, 1
    if kind in ("bf16", "codec"):
        return [*RUN, "--compression", str(value)], ["--steps", "40"], 20, 1
    return None


def table(part: str, rows: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of what was measured."""
    by_name = {row["candidate"]: row for row in rows}
    if part != "advice":
        pairs = zip(by_name[PLAIN]["runs"], by_name[OURS]["runs"], strict=True)
        cut = [(a[_CHOSEN:], b[_CHOSEN:]) for a, b in pairs]
        plain = [second for run, _ in cut for second in run]
        ours = [second for _, run in cut for second in run]
        found = speedup_interval(plain, ours)
        least = 1.0 if part == "slow" else 0.97
        word = "PASS" if found.ratio >= least else "MISS"
        yield (
            f"{part}: topo-ar run {1e3 * median(ours):.1f} ms, plain {1e3 * median(plain):.1f} ms "
            f"a step: {_interval(found)} times as fast, target {least:g}: {word}"
        )
        return
    plain = by_name[PLAIN]["seconds"]
    for row in rows:
        if row["candidate"] == PLAIN:
            continue
        each = row["suggestion"]
        per_batch = [second / row["batches_per_step"] for second in row["seconds"]]
        n = min(len(plain), len(per_batch))
        try:
            found = speedup_interval(plain[:n], per_batch[:n])
        except ConfigError as error:
            yield f"{each['kind']}: {error}"
            continue
        word = "in" if each["low"] <= found.ratio <= each["high"] else "OUT of"
        yield (
            f"{each['kind']:14} predicted {each['gain']:.2f} ({each['low']:.2f} - "
            f"{each['high']:.2f}), gained {_interval(found)}: {word} the interval"
        )


def _interval(found: RatioInterval) -> str:
    return f"{found.ratio:.2f} ({found.low:.2f} - {found.high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
