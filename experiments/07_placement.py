"""What does it cost when ranks are numbered against the network, and who notices?

Command: python -m experiments.07_placement --out results/
Minutes: 3 on two cores; --quick shows that it runs.

25 MB are reduced by gloo, whose ring follows the numbers of the ranks, and by the plan, which finds
out who is where. Placements: `blocks`, node by node; `dealt`, dealt out to the nodes in turns;
`racks`, four hosts in two racks whose uplinks carry as much as one NIC, node by node and rack by
rack; `racks-dealt`, the same with neighbouring nodes in different racks. The simulator, with 08's
calibration, goes on to more nodes, and to ranks shuffled by chance.

Writes placement_CASE.jsonl and placement_simulated.jsonl, a row a candidate: ``experiment``
"placement", ``simulated``, ``case``, ``num_nodes``, ``world_size``, ``candidate`` ("plan", "gloo"),
``nbytes``, ``median_seconds``, ``crossings`` (hops of a ring in rank order that leave a node), and
where measured ``seconds``, ``speedup``, ``low``, ``high`` (of the plan over gloo in the same run,
95 %), ``manifest`` and what `topo-ar bench` writes; simulated rows have ``seed`` for shuffled ones.
Files that are there already are not made again.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from experiments import emulated_model
from experiments.bench_groups import bench_rows
from experiments.jobs import Part, run_parts
from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.spec import ClusterSpec, NodeSpec
from topo_ar.planning.plan import Family
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record, manifest, read_records
from topo_ar.units import parse_rate

NBYTES = 25_000_000
RATE = parse_rate("500mbit")
BLOCKS, DEALT, RACKS, RACKS_DEALT = "blocks", "dealt", "racks", "racks-dealt"
CASES = (BLOCKS, DEALT, RACKS, RACKS_DEALT)
SIMULATED = "simulated"
PLAN, GLOO = "plan", "gloo"
_RANKS = 4
_MANY_NODES = (2, 4, 8, 16)
_SEEDS = 3


def placed(order: Sequence[int], num_nodes: int, racks: Sequence[str] = ()) -> ClusterSpec:
    """Return equal hosts; ``order`` lists the ranks of the first node, then of the next, ...

    `racks` names each node's rack; their uplinks carry what one NIC does.
    """
    size = len(order) // num_nodes
    names = racks or ["rack0"] * num_nodes
    nodes = tuple(
        NodeSpec(tuple(order[size * i : size * (i + 1)]), (RATE,), names[i])
        for i in range(num_nodes)
    )
    return ClusterSpec(nodes, uplinks=dict.fromkeys(racks, RATE))


def spec_of(case: str) -> ClusterSpec:
    """Return the hosts of a measured case."""
    if case == BLOCKS:
        return placed(range(8), 2)
    if case == DEALT:
        return placed(dealt(2, _RANKS), 2)
    names = ("r0", "r0", "r1", "r1") if case == RACKS else ("r0", "r1", "r0", "r1")
    return placed(range(8), 4, names)


def dealt(num_nodes: int, ranks: int) -> list[int]:
    """Return the ranks of each node when they are dealt out in turns."""
    return [node + num_nodes * turn for node in range(num_nodes) for turn in range(ranks)]


def crossings(spec: ClusterSpec) -> int:
    """Return how many hops of a ring in the order of the ranks leave a node."""
    node_of = {rank: i for i, node in enumerate(spec.nodes) for rank in node.ranks}
    world = spec.world_size
    return sum(node_of[rank] != node_of[(rank + 1) % world] for rank in range(world))


def measured(case: str, out: Path, *, quick: bool) -> Iterator[Record]:
    """Yield the rows of a case."""
    spec = spec_of(case)
    nbytes, iterations = (1_000_000, 2) if quick else (NBYTES, 10)
    rows = bench_rows(out, spec, nbytes, iterations, (GLOO,))
    ours, theirs = (
        next(row["seconds"] for row in rows if row["candidate"] == name) for name in (PLAN, GLOO)
    )
    found = speedup_interval(theirs, ours)
    for row in rows:
        yield {
            "experiment": "placement",
            "simulated": False,
            "case": case,
            "num_nodes": len(spec.nodes),
            "crossings": crossings(spec),
            "speedup": found.ratio,
            "low": found.low,
            "high": found.high,
            **row,
        }


def simulated(*, quick: bool) -> Iterator[Record]:
    """Yield rows of more nodes, in good order, dealt out and shuffled."""
    about = manifest()
    for nodes in _MANY_NODES[: 2 if quick else None]:
        world = nodes * _RANKS
        orders: list[tuple[str, int | None, list[int]]] = [
            (BLOCKS, None, list(range(world))),
            (DEALT, None, dealt(nodes, _RANKS)),
        ]
        for seed in range(_SEEDS):
            shuffled = list(range(world))
            random.Random(seed).shuffle(shuffled)
            orders.append(("shuffled", seed, shuffled))
        for case, drawn, order in orders:
            spec = placed(order, nodes)
            for candidate, family in ((PLAN, None), (GLOO, Family.FLAT_RING)):
                yield {
                    "experiment": "placement",
                    "simulated": True,
                    "case": case,
                    "seed": drawn,
                    "num_nodes": nodes,
                    "world_size": world,
                    "candidate": candidate,
                    "nbytes": NBYTES,
                    "crossings": crossings(spec),
                    "median_seconds": emulated_model.all_reduce(spec, NBYTES, family),
                    "manifest": about,
                }


def path_of(out: Path, case: str, *, quick: bool) -> Path:
    """Return where the rows of a case are kept."""
    return out / f"placement_{case}{'.quick' if quick else ''}.jsonl"


def table(out: Path, *, quick: bool) -> Iterator[str]:
    """Yield a line for each row."""
    if quick:
        yield "two samples each: the table shows that it works, not how fast anything is"
    for case in (*CASES, SIMULATED):
        path = path_of(out, case, quick=quick)
        for row in read_records(path) if path.exists() else ():
            line = (
                f"{row['case']:12} {row['num_nodes']:2} nodes, ring leaves a node "
                f"{row['crossings']:2} times: {row['candidate']:5} "
                f"{1e3 * row['median_seconds']:7.1f} ms"
            )
            if row["simulated"]:
                line += " simulated"
            elif row["candidate"] == PLAN:
                line += f", {row['speedup']:.2f} [{row['low']:.2f}, {row['high']:.2f}] x gloo"
            yield line


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
        parts = [
            Part(case, 0.2 if quick else 0.6, partial(measured, case, out, quick=quick))
            for case in (CASES[1:2] if quick else CASES)
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
