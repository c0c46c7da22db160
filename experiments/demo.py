"""The main job on emulated hosts: probe, plan, execute, measure, train, plot.

Command: python experiments/demo.py --nodes 2 --ranks 4 --nic 1gbit --out demo-results
Minutes: 4 on two cores.

Runs 01_allreduce_size.py and 02_ddp_parity.py, shows the probed topology and the plan, draws every
figure and prints a summary. Everything it writes is in the output directory.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from topo_ar import figures
from topo_ar.cli.bench import cluster_spec
from topo_ar.cli.script import exit_code_of
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record, read_records
from topo_ar.telemetry.trace import read_trace
from topo_ar.units import format_seconds, format_size

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The cluster to emulate, and where results go."""

    nodes: int = 2
    ranks: int = 4
    nic: str = "1gbit"
    sizes: str = "4K,64K,1M,4M,25MB,100MB"
    iterations: int = 20
    out: Path = Path("demo-results")

    @property
    def grid(self) -> str:
        """Nodes by ranks per node."""
        return f"{self.nodes}x{self.ranks}"


def run(config: Config) -> int:
    """Run every step; return 0, or the exit code of the first step that failed."""
    begin = time.monotonic()
    cluster_spec(config.grid, config.nic)  # refuse what cannot be built before anything is touched
    out = config.out
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("allreduce_size", "allreduce_size.predictions", "ddp_parity"):
        (out / f"{stale}.jsonl").unlink(missing_ok=True)
    python, cli = sys.executable, [sys.executable, "-m", "topo_ar"]
    topology = str(out / "topology.json")
    steps: list[tuple[str, list[str]]] = [
        (
            f"all-reduce on {config.grid} ranks, {config.nic} NICs",
            [
                *(python, str(HERE / "01_allreduce_size.py"), "--cluster", config.grid),
                *("--nic", config.nic, "--sizes", config.sizes, "--out", str(out)),
                *("--iterations", str(config.iterations)),
            ],
        ),
        ("the topology that the ranks probed and measured", [*cli, "show", topology]),
        (
            "the plan for 25 MB",
            [*cli, "plan", topology, "-s", "25MB", "-o", str(out / "plan.json")],
        ),
        (
            "training through the hook against plain DDP",
            [
                *(python, str(HERE / "02_ddp_parity.py"), "--nodes", str(config.nodes)),
                *("--ranks", str(config.ranks), "--nic", config.nic, "--out", str(out)),
            ],
        ),
    ]
    for number, (title, command) in enumerate(steps, 1):
        print(f"\n== {number}/{len(steps) + 1} {title}", flush=True)
        code = subprocess.run(command, check=False).returncode
        if code:  # the step has said why
            return code
    print(f"\n== {len(steps) + 1}/{len(steps) + 1} figures", flush=True)
    draw(out)
    summarize(out)
    print(f"\ndone in {time.monotonic() - begin:.0f} s; everything is in {out}/")
    return 0


def draw(out: Path) -> None:
    """Draw every figure from the records in `out`."""
    rows = read_records(out / "allreduce_size.jsonl")
    training = read_records(out / "ddp_parity.jsonl")
    pictures: dict[str, Callable[[], object]] = {
        "busbw": lambda: figures.busbw_over_size(rows),
        "predicted": lambda: figures.predicted_measured(rows),
        "topology": lambda: figures.topology_graph(
            msgspec.json.decode((out / "topology.json").read_bytes())
        ),
        "timeline": lambda: figures.bucket_timeline(read_trace(out / "bucket_trace.json")),
        "parity": lambda: figures.training_parity(training),
        "step_time": lambda: figures.step_time(training),
    }
    for name, picture in pictures.items():
        for path in figures.save(picture(), out / f"{name}.png"):  # type: ignore[arg-type]
            print(path)


def summarize(out: Path) -> None:
    """Print what was measured, in one table, and keep it as summary.md."""
    rows = read_records(out / "allreduce_size.jsonl")
    lines = [
        "| size | gloo | plan | speed-up (95 %) | share of wire limit | predicted | wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    for nbytes in dict.fromkeys(row["nbytes"] for row in rows):
        by_name = {row["candidate"]: row for row in rows if row["nbytes"] == nbytes}
        lines.append(_size_line(nbytes, by_name["gloo"], by_name["plan"]))
    training = read_records(out / "ddp_parity.jsonl")
    lines += ["", *_training_lines(training)]
    text = "\n".join(lines)
    (out / "summary.md").write_text(text + "\n")
    print(f"\n{text}")


def _size_line(nbytes: int, gloo: Record, plan: Record) -> str:
    ratio = speedup_interval(gloo["seconds"], plan["seconds"])
    share = "small for the link's burst" if plan["marks"] else f"{plan['fraction']:.3f}"
    error = "-"
    if plan["predicted_seconds"] is not None:
        error = f"{plan['predicted_seconds'] / plan['median_seconds'] - 1:+.1%}"
    return (
        f"| {format_size(nbytes)} | {format_seconds(gloo['median_seconds'])} "
        f"| {format_seconds(plan['median_seconds'])} "
        f"| {ratio.ratio:.2f} ({ratio.low:.2f} - {ratio.high:.2f}) | {share} | {error} "
        f"| {plan['wrong']} |"
    )


def _training_lines(records: list[Record]) -> list[str]:
    lines = [
        f"DDP step, {record['candidate']}: {format_seconds(record['median_seconds'])}, of which "
        f"exposed communication {format_seconds(record['exposed_seconds'])}"
        for record in records
        if record.get("record") == "training"
    ]
    for record in records:
        for oracle in record.get("oracles", ()):
            verdict = "holds" if oracle["passed"] else "FAILS"
            lines.append(
                f"{verdict}: {oracle['meaning']}: {oracle['value']:.3g}, "
                f"at most {oracle['limit']:.3g}"
            )
    return lines


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Config()
    parser.add_argument("--nodes", type=int, default=defaults.nodes)
    parser.add_argument("--ranks", type=int, default=defaults.ranks, help="ranks per node")
    parser.add_argument("--nic", default=defaults.nic, help="rate of each host's NIC")
    parser.add_argument("--sizes", default=defaults.sizes)
    parser.add_argument("--iterations", type=int, default=defaults.iterations)
    parser.add_argument("--out", type=Path, default=defaults.out)
    options = vars(parser.parse_args())
    return exit_code_of(lambda: run(Config(**options)))


if __name__ == "__main__":
    sys.exit(main())
