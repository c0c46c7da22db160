"""How near does the planned all-reduce come to the limit of the wire, and where does it win?

Command: python -m experiments.02_limits --out results/
Minutes: 36 on two cores; --list says what each group takes, --only runs some, --quick shows that
all of them run.

Each group is a run on emulated hosts with interleaved samples and writes wire_GROUP.jsonl; groups
that are there already are not measured again. The table at the end holds the targets that were set
before against what was measured, with 95 % intervals, then comparisons that have no target.
Candidates beside flat gloo: Open MPI with its defaults and with HAN (skipped where it is not
installed), other plans of our own. Exits with 0 when all groups ran, whatever the targets say, and
with 1 when ranks failed or a result was wrong. The figure: python plots/wire_share.py
results/wire_*.jsonl -o wire_share.png.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments.bench_groups import bench
from topo_ar.cli.bench import cluster_spec
from topo_ar.cli.script import exit_code_of
from topo_ar.errors import ExecutionError
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record, read_records
from topo_ar.units import parse_size

_SPECS = Path(__file__).parent / "specs"
_HAN, _MPI = "openmpi-han", "openmpi"
_BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Group:
    """One run on emulated hosts. `cluster` is a grid or a spec; sizes as on the command line."""

    name: str
    cluster: str
    nic: str
    sizes: str
    against: tuple[str, ...]
    iterations: int = 20
    minutes: float = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """`ours` shall be `least` times as fast as `theirs`, or reach that share of the wire limit.

    `theirs` is a candidate, ``wire limit``, ``CPU of`` a candidate, or ``lone`` and a candidate.
    Without `least` it is a comparison that nothing depends on.
    """

    group: str
    size: str
    theirs: str
    least: float | None
    ours: str = "plan"


GROUPS = (
    Group("small", "2x4", "1gbit", "4K,64K", ("gloo", _HAN), minutes=1),
    Group("sweep", "2x4", "1gbit", "1K,16K,256K", ("gloo", _HAN), 10, 1.5),
    Group("large", "2x4", "1gbit", "1M,4M,25MB", ("gloo", _HAN), minutes=3),
    Group("largest", "2x4", "1gbit", "100MB", ("gloo", _HAN), 10, 2),
    Group("defaults", "2x4", "1gbit", "4M,25MB", ("gloo", _MPI), 10, 2),
    Group("fast", "2x4", "10gbit", "25MB", ("gloo", _HAN, "plan:zero-copy"), minutes=1.5),
    Group("four-nodes", "4x2", "1gbit", "64K,4M,25MB", ("gloo", _HAN), minutes=2.5),
    Group("four-by-four", "4x4", "1gbit", "64K,4M,25MB", ("gloo", _HAN), 10, 3),
    Group("two-ranks", "2x2", "1gbit", "64K,4M,25MB", ("gloo", _HAN), minutes=2),
    Group("two-ranks-fast", "2x2", "2.5gbit", "25MB", ("gloo", _HAN), 10, 1),
    Group("one-node", "1x8", "1gbit", "64K,4M,25MB", ("gloo", _HAN), minutes=1),
    Group("slow-wire", "2x4", "500mbit", "64K,4M,25MB", ("gloo", _HAN), 10, 2),
    Group("slow-two-ranks", "2x2", "500mbit", "64K,4M,25MB", ("gloo", _HAN), 10, 2),
    Group("slow-four-nodes", "4x2", "500mbit", "64K,4M,25MB", ("gloo", _HAN), 10, 3),
    Group("uneven-small", "uneven_4_2_2.toml", "", "64K,4M", ("gloo", _HAN), 10, 1),
    Group("uneven", "uneven_4_2_2.toml", "", "25MB", ("gloo", "plan:equal"), minutes=2),
    Group("slow-nic", "slow_nic_4x2.toml", "", "25MB", ("gloo", "plan:equal"), minutes=2),
    Group("alternating", "alternating_2x4.toml", "", "25MB", ("gloo",), 10, 2),
    # Without pipelining a buffer is one chunk, which has to fit a slot of shared memory.
    Group(
        "ablation",
        "2x4",
        "1gbit",
        "1M,2M",
        ("plan:hierarchical_sequential", "plan:zero-copy", "plan:no-shared-memory"),
        10,
    ),
)

TARGETS = (
    Target("small", "4K", "gloo", 100),
    Target("small", "4K", "lone gloo", 15),
    Target("small", "64K", "gloo", 20),
    Target("small", "64K", _HAN, 1 / 1.1),
    Target("large", "1M", "gloo", 2),
    Target("large", "1M", _HAN, 0.97),
    Target("large", "4M", "gloo", 1.7),
    Target("large", "4M", _HAN, 0.97),
    Target("large", "25MB", "wire limit", 0.98),
    Target("large", "25MB", _HAN, 0.99),
    Target("large", "25MB", f"CPU of {_HAN}", 3),
    Target("largest", "100MB", "wire limit", 0.98),
    Target("largest", "100MB", _HAN, 0.99),
    Target("fast", "25MB", "gloo", 1.6),
    Target("fast", "25MB", _HAN, 1.6),
    Target("fast", "25MB", "gloo", 2.2, "plan:zero-copy"),
    Target("fast", "25MB", _HAN, 2.2, "plan:zero-copy"),
    Target("four-nodes", "25MB", "wire limit", 0.97),
    Target("four-nodes", "25MB", "gloo", 1.12),
    Target("four-nodes", "25MB", _HAN, 2),
    Target("uneven", "25MB", "plan:equal", 1.2),
    Target("slow-nic", "25MB", "plan:equal", 1.3),
    Target("alternating", "25MB", "gloo", 5),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a target: the ratio with its interval, None where nothing was measured."""

    target: Target
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    busy: bool = False

    @property
    def word(self) -> str:
        """PASS, MISS, NONE, or nothing for a comparison without a target."""
        if self.target.least is None:
            return ""
        if self.ratio is None:
            return "NONE"
        return "PASS" if self.ratio >= self.target.least else "MISS"


def judge(target: Target, rows: Sequence[Record]) -> Verdict:
    """Hold the rows of a group against a target."""
    size = parse_size(target.size)
    found = {row["candidate"]: row for row in rows if row["nbytes"] == size}
    ours = found.get(target.ours)
    theirs = found.get(target.theirs.removeprefix("CPU of ").removeprefix("lone "))
    if ours is None:
        return Verdict(target)
    busy = cpu_share(ours) > _BUSY
    if target.theirs == "wire limit":
        limit = ours["wire_limit_seconds"]
        shares = speedup_interval([limit] * len(ours["seconds"]), ours["seconds"])
        return Verdict(target, shares.ratio, shares.low, shares.high, busy)
    if theirs is None:
        return Verdict(target)
    if target.theirs.startswith("CPU of "):
        return Verdict(target, theirs["cpu_seconds"] / ours["cpu_seconds"], busy=busy)
    samples = "lone_seconds" if target.theirs.startswith("lone ") else "seconds"
    ratio = speedup_interval(theirs[samples], ours[samples])
    return Verdict(target, ratio.ratio, ratio.low, ratio.high, busy)


def cpu_share(row: Record) -> float:
    """Return the share of the machine's cores that was busy; the ranks' where no more is known."""
    if row.get("machine_cpu_share") is not None:
        return float(row["machine_cpu_share"])
    cores = row["manifest"]["cpu_count"]
    return float(row["cpu_seconds"] * row["world_size"] / (median(row["seconds"]) * cores))


def run(groups: Sequence[Group], out: Path, quick: bool) -> list[str]:
    """Measure the groups that have no records yet; return the names of those that failed."""
    failed = []
    out.mkdir(parents=True, exist_ok=True)
    left = [group for group in groups if not path_of(out, group, quick).exists()]
    for number, group in enumerate(left):
        minutes = sum(later.minutes for later in left[number:])
        print(
            f"== {group.name}: {number + 1} of {len(left)}, about {minutes:g} min left", flush=True
        )
        begun = time.monotonic()
        if not _measure(group, path_of(out, group, quick), quick):
            failed.append(group.name)
        print(f"== {group.name}: {(time.monotonic() - begun) / 60:.1f} min", flush=True)
    return failed


def _measure(group: Group, path: Path, quick: bool) -> bool:
    cluster = str(_SPECS / group.cluster) if group.cluster.endswith(".toml") else group.cluster
    sizes = [parse_size(size) for size in group.sizes.split(",")][: 1 if quick else None]
    against = [name for name in group.against if _installed(name)]
    try:
        bench(
            path,
            cluster_spec(cluster, group.nic or "1gbit"),
            sizes,
            2 if quick else group.iterations,
            against,
        )
    except ExecutionError:
        return False
    return True


def _installed(candidate: str) -> bool:
    return candidate not in (_HAN, _MPI) or shutil.which("mpirun") is not None


def path_of(out: Path, group: Group, quick: bool) -> Path:
    """Return where the rows of a group are kept."""
    return out / f"wire_{group.name}{'.quick' if quick else ''}.jsonl"


def table(out: Path, quick: bool) -> Iterator[str]:
    """Yield a line for every target and comparison of what was measured, then their number."""
    if quick:
        yield "two samples each: the table shows that it works, not how fast anything is"
    yield f"{'group':12} {'size':>6} {'ours':16} {'against':28} {'target':>7} {'measured':>24}"
    measured = {
        group.name: list(read_records(path))
        for group in GROUPS
        if (path := path_of(out, group, quick)).exists()
    }
    verdicts = [judge(target, measured.get(target.group, [])) for target in TARGETS]
    for verdict in verdicts:
        if verdict.target.group in measured:
            yield _line(verdict)
    for target in comparisons():
        if target.group in measured:
            yield _line(judge(target, measured[target.group]))
    count = {word: sum(v.word == word for v in verdicts) for word in ("PASS", "MISS", "NONE")}
    yield (
        f"{len(verdicts)} targets: {count['PASS']} PASS, {count['MISS']} MISS, "
        f"{count['NONE']} not measured"
    )


def comparisons() -> Iterator[Target]:
    """Yield what groups without a target are there to show."""
    for group in GROUPS:
        if all(target.group != group.name for target in TARGETS):
            for size in group.sizes.split(","):
                for theirs in group.against:
                    yield Target(group.name, size, theirs, None)


def _line(verdict: Verdict) -> str:
    target = verdict.target
    least = "-" if target.least is None else f"{target.least:.3g}"
    ratio = "-" if verdict.ratio is None else f"{verdict.ratio:.3f}"
    if verdict.low is not None:
        ratio += f" [{verdict.low:.3f}, {verdict.high:.3f}]"
    line = (
        f"{target.group:12} {target.size:>6} {target.ours:16} {target.theirs:28} "
        f"{least:>7} {ratio:>24} {verdict.word}{' (CPU > 90 %)' * verdict.busy}"
    )
    return line.rstrip()


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [group.name for group in GROUPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="GROUP")
    parser.add_argument("--list", action="store_true", help="print the groups and their minutes")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--quick", action="store_true", help="one size and two samples for each")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    groups = [group for group in GROUPS if group.name in options.only]
    if options.list:
        for group in groups:
            print(
                f"{group.name:12} {group.minutes:4g} min  {group.cluster} {group.nic} "
                f"{group.sizes} against {', '.join(group.against)}"
            )
        print(f"{'all':12} {sum(group.minutes for group in groups):4g} min")
        return 0

    def work() -> int:
        failed: list[str] = []
        if not options.table:
            failed = run(groups, options.out, options.quick)
        for line in table(options.out, options.quick):
            print(line)
        if failed:
            print(f"error: {', '.join(failed)} failed; run again for these alone", file=sys.stderr)
        return int(bool(failed))

    return exit_code_of(work, "interrupted; whole groups are kept")


if __name__ == "__main__":
    sys.exit(main())
