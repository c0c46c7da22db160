"""What does a node that lost part of its network cost, and what do weighted shards win back?

Command: python -m experiments.06_uneven --out results/
Minutes: 4 on two cores (4 hosts of 2 ranks with NICs of 500 Mbit/s, one of which carries less; and
hosts of 4, 2 and 2 ranks); --quick shows that it runs.

25 MB are reduced by the plan, whose shards fit what each node carries, by the same plan with equal
shards, and by gloo. The slow-down is against the plan on hosts that are all well. The simulator, on
the same model of hosts with 08's calibration, goes on to more nodes and losses.

Writes uneven_CASE.jsonl (measured: well, lost-25, lost-50, lost-75, sizes) and
uneven_simulated.jsonl, a row a candidate: ``experiment`` "uneven", ``simulated``, ``case``,
``num_nodes``, ``lost_share`` (share of one node's NIC; null in `sizes`, hosts of unequal numbers of
ranks), ``candidate`` ("plan", "plan:equal", "gloo"), ``nbytes``, ``median_seconds``, ``slowdown``
(median over the plan's where nothing is lost; in `sizes` over the plan's own), and where measured
``seconds``, ``low``, ``high`` (95 % of the slow-down), ``manifest`` and what `topo-ar bench`
writes. Files that are there already are not made again.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from experiments import emulated_model
from experiments.bench_groups import bench_rows
from experiments.jobs import Part, run_parts
from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.spec import ClusterSpec, NodeSpec
from topo_ar.errors import ConfigError
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record, manifest, read_records
from topo_ar.units import parse_rate

NBYTES = 25_000_000
NODES, RANKS = 4, 2
RATE = parse_rate("500mbit")
WELL = "well"
LOSSES = {WELL: 0.0, "lost-25": 0.25, "lost-50": 0.5, "lost-75": 0.75}
SIZES = "sizes"
SIMULATED = "simulated"
PLAN, EQUAL, GLOO = "plan", "plan:equal", "gloo"
_MANY_NODES = (2, 4, 8, 16, 32)
_MANY_LOSSES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


def degraded(nodes: int, lost: float) -> ClusterSpec:
    """Return equal hosts, the last of which has lost a share of its NIC."""
    rates = [RATE] * (nodes - 1) + [RATE * (1 - lost)]
    return ClusterSpec(
        tuple(
            NodeSpec(tuple(range(RANKS * i, RANKS * (i + 1))), (rate,))
            for i, rate in enumerate(rates)
        )
    )


def unequal() -> ClusterSpec:
    """Return a large node with a full NIC and two small ones with half of it each."""
    return ClusterSpec(
        (
            NodeSpec((0, 1, 2, 3), (RATE,)),
            NodeSpec((4, 5), (RATE / 2,)),
            NodeSpec((6, 7), (RATE / 2,)),
        )
    )


def measured(case: str, out: Path, *, quick: bool) -> Iterator[Record]:
    """Yield the rows of a case."""
    spec = unequal() if case == SIZES else degraded(NODES, LOSSES[case])
    nbytes, iterations = (1_000_000, 2) if quick else (NBYTES, 10)
    rows = bench_rows(out, spec, nbytes, iterations, (EQUAL, GLOO))
    base = next(row for row in rows if row["candidate"] == PLAN)
    if case not in (WELL, SIZES):
        base = next(row for row in rows_of(out, WELL, quick=quick) if row["candidate"] == PLAN)
    for row in rows:
        found = speedup_interval(row["seconds"], base["seconds"])
        yield {
            "experiment": "uneven",
            "simulated": False,
            "case": case,
            "num_nodes": len(spec.nodes),
            "lost_share": LOSSES.get(case),
            "slowdown": found.ratio,
            "low": found.low,
            "high": found.high,
            **row,
        }


def simulated(*, quick: bool) -> Iterator[Record]:
    """Yield the heat map: nodes by losses, with weighted and with equal shards."""
    about = manifest()
    for nodes in _MANY_NODES[: 2 if quick else None]:
        well = None
        for lost in _MANY_LOSSES[:: 4 if quick else 1]:
            for candidate in (PLAN, EQUAL):
                seconds = emulated_model.all_reduce(
                    degraded(nodes, lost), NBYTES, equal=candidate == EQUAL
                )
                well = well or seconds
                yield {
                    "experiment": "uneven",
                    "simulated": True,
                    "case": SIMULATED,
                    "num_nodes": nodes,
                    "lost_share": lost,
                    "candidate": candidate,
                    "nbytes": NBYTES,
                    "median_seconds": seconds,
                    "slowdown": seconds / well,
                    "manifest": about,
                }


def path_of(out: Path, case: str, *, quick: bool) -> Path:
    """Return where the rows of a case are kept."""
    return out / f"uneven_{case}{'.quick' if quick else ''}.jsonl"


def rows_of(out: Path, case: str, *, quick: bool) -> list[Record]:
    """Return the rows of a case that was measured.

    Raises
    ------
    ConfigError
        If it was not.
    """
    path = path_of(out, case, quick=quick)
    if not path.exists():
        raise ConfigError(f"{path} is not there; run experiments.06_uneven without --only")
    return read_records(path)


def table(out: Path, *, quick: bool) -> Iterator[str]:
    """Yield a line for each measured row, with what was simulated beside it."""
    if quick:
        yield "two samples each: the table shows that it works, not how fast anything is"
    path = path_of(out, SIMULATED, quick=quick)
    known = {
        (row["num_nodes"], row["lost_share"], row["candidate"]): row["slowdown"]
        for row in (read_records(path) if path.exists() else ())
    }
    for case in (*LOSSES, SIZES):
        if path_of(out, case, quick=quick).exists():
            for row in rows_of(out, case, quick=quick):
                said = known.get((row["num_nodes"], row["lost_share"], row["candidate"]))
                yield (
                    f"{case:8} {row['candidate']:10} {1e3 * row['median_seconds']:7.1f} ms, "
                    f"{row['slowdown']:.2f} [{row['low']:.2f}, {row['high']:.2f}] times as long"
                    + (f", simulated {said:.2f}" if said else "")
                )


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--quick", action="store_true", help="small and two samples: that it runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()
    quick, out = options.quick, options.out

    def work() -> int:
        cases = (WELL, "lost-50") if quick else (*LOSSES, SIZES)
        parts = [
            Part(case, 0.2 if quick else 0.7, partial(measured, case, out, quick=quick))
            for case in cases
        ]
        parts.append(Part(SIMULATED, 0.5, partial(simulated, quick=quick)))
        if not options.table:
            run_parts(parts, lambda case: path_of(out, case, quick=quick))
        for line in table(out, quick=quick):
            print(line)
        return 0

    return exit_code_of(work, "interrupted; whole cases are kept")


if __name__ == "__main__":
    sys.exit(main())
