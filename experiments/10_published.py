"""Does the model of NCCL predict what others measured, and does nothing beat the bound?

Command: python experiments/10_published.py --out results/
Minutes: 1, without a GPU.

Every all-reduce in topo_ar/data/published is compared with three predictions: the tuning model of
NCCL on the channels its search would find, and two null models, a flat ring at nominal rates
without latency (null_ring) and the rule of thumb that 96 % of it is reached after 30 us
(null_thumb). The algorithm that the model chooses is compared with the one NCCL chose. Each row is
also held against the exact bound of its switch mode. Writes published.jsonl; exits with 1 when a
measurement beats its bound.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import networkx as nx

from topo_ar.data.published_nccl import System, choices, measurements, scaling, systems
from topo_ar.errors import TopoError
from topo_ar.planning.bounds import all_reduce_bound
from topo_ar.planning.nccl_search import NcclMachine, nccl_job, nvlink_bytes_per_s
from topo_ar.planning.nccl_tuning import Algorithm, choice, estimates
from topo_ar.telemetry.records import Record, RecordWriter, manifest

_CAPABILITY = {"A100": 80, "H100": 90, "H200": 90, "B200": 100, "A40": 86}
_NVLINK_NOMINAL = {80: 25e9, 86: 14.0625e9, 90: 25e9, 100: 50e9}
_PCIE = 24e9  # gen4 x16 as NCCL counts it
_PCIE_NOMINAL = 31.5e9
_HAS_SHARP = {"H100", "H200", "B200"}
# The sources do not name the processor; these are the usual ones of the machines they name.
_CPU = {"a100-1x8": "amd", "a100-2x8-oci": "amd", "a100-3x8-4hdr": "amd", "h100-2x8-p5": "amd"}
_BANDS = (("to 64 KiB", 64 << 10), ("to 16 MiB", 16 << 20), ("above 16 MiB", 1 << 62))
_ALGORITHMS = {"Ring": "ring", "NVLS": "nvls", "NVLSTree": "nvls_tree", "Tree": "tree"}
# nccl_algorithm_choice.csv names systems by their machine.
_CHOICE_SYSTEMS = {
    "h200-8": System("", "H200", 1, 8, 450e9, 0, None, "NVSwitch", "S1", ""),
    "b200-8": System("", "B200", 1, 8, 900e9, 0, None, "NVSwitch", "S1", ""),
    "h200-p5en": System("", "H200", 1, 8, 450e9, 16, 25e9, "EFA", "S1", ""),
}
_DGX_H100 = System("", "H100", 1, 8, 450e9, 8, 50e9, "InfiniBand", "S16/S18", "")


@dataclass(frozen=True, slots=True)
class Case:
    """A published system as the model and the bound take it."""

    machine: NcclMachine
    port_nominal: float
    nics_nominal: float
    sharp: bool


def case_of(system: System, cpu: str = "intel") -> Case | None:
    """Return the case, or None where the source does not say how fast the links are."""
    family = system.gpu.split("-")[0].split(" ")[0]
    capability = _CAPABILITY.get(family)
    several = system.num_nodes > 1
    if capability is None or (several and not system.nic_bytes_per_s):
        return None
    nominal = system.nvlink_bytes_per_s
    links = round(nominal / _NVLINK_NOMINAL[capability]) if nominal else 0
    nics = [system.nic_bytes_per_s or 0.0] * system.nics_per_node
    shown = nics
    if "EFA" in system.fabric and len(nics) > system.gpus_per_node:
        # The plug-in shows the NICs of one GPU as one device.
        group = len(nics) // system.gpus_per_node
        shown = [group * nics[0]] * system.gpus_per_node
    sharp = family in _HAS_SHARP and system.fabric != "PCIe"
    return Case(
        NcclMachine(
            system.num_nodes,
            system.gpus_per_node,
            capability,
            links * nvlink_bytes_per_s(capability) if links else _PCIE,
            shown if several else (),
            nvlink=bool(links),
            nvls=sharp,
            cpu=cpu,
        ),
        nominal or _PCIE_NOMINAL,
        sum(nics),
        sharp,
    )


def bound_algbw(case: Case) -> float:
    """Return the most bytes/s of buffer that any all-reduce can reach on nominal rates.

    Switches between GPUs that can multicast and reduce (NVLink SHARP) may do so.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    ranks, switches = [], []
    machine = case.machine

    def join(a: str, b: str, bandwidth: float) -> None:
        graph.add_edge(a, b, bandwidth=round(bandwidth))
        graph.add_edge(b, a, bandwidth=round(bandwidth))

    for node in range(machine.num_nodes):
        switch = f"node{node}/switch"
        switches.append(switch)
        for local in range(machine.ranks_per_node):
            rank = f"node{node}/gpu{local}"
            ranks.append(rank)
            join(rank, switch, case.port_nominal)
            if machine.num_nodes > 1:
                join(rank, f"node{node}/nics", case.nics_nominal)
        if machine.num_nodes > 1:
            join(f"node{node}/nics", "fabric", case.nics_nominal)
    mode = switches if case.sharp else ()
    return float(all_reduce_bound(graph, ranks, multicast=mode, reducing=mode).algbw)


def run(out: Path) -> int:
    """Write the records, print the score table, return 1 when a row beats its bound."""
    path = out / "published.jsonl"
    path.unlink(missing_ok=True)
    with RecordWriter(path) as writer:
        writer.write({"kind": "manifest", "manifest": manifest()})
        times = list(time_rows())
        picks = list(choice_rows())
        curves = list(scaling_rows())
        scores = list(score_rows(times))
        for row in [*times, *picks, *curves, *scores]:
            writer.write(row)
    print_scores(scores, picks, curves)
    beaten = [row for row in times if row["measured_seconds"] < row["bound_seconds"]]
    for row in beaten:
        print(f"beats its bound: {row['system']} at {row['nbytes']} bytes")
    print(f"{len(times)} measurements, {len(beaten)} of them faster than the bound")
    print(f"written: {path}")
    return 1 if beaten else 0


def time_rows() -> Iterator[Record]:
    """Yield one row for each measurement whose system's rates are known."""
    found = systems()
    cases = {name: case_of(system, _CPU.get(name, "intel")) for name, system in found.items()}
    bounds = {name: bound_algbw(case) for name, case in cases.items() if case}
    for row in measurements():
        case = cases[row.system]
        if case is None:
            continue
        ring = _null_ring(case, row.nbytes)
        best = choice(nccl_job(case.machine), row.nbytes)
        yield {
            "kind": "time",
            "system": row.system,
            "num_nodes": case.machine.num_nodes,
            "num_ranks": row.num_ranks,
            "nbytes": row.nbytes,
            "measured_seconds": row.seconds,
            "bound_seconds": row.nbytes / bounds[row.system],
            "switch_mode": "multicast and reducing" if case.sharp else "plain",
            "nccl_model_seconds": best.seconds,
            "nccl_model_algorithm": f"{best.algorithm} {best.protocol}",
            "null_ring_seconds": ring,
            "null_thumb_seconds": ring / 0.96 + 30e-6,
        }


def choice_rows() -> Iterator[Record]:
    """Yield one row for each question that NCCL answered by its choice."""
    by_question: dict[tuple[str, int, int, int], list[tuple[str, float, bool]]] = {}
    for row in choices():
        key = (row.system, row.num_gpus, row.num_nodes, row.nbytes)
        by_question.setdefault(key, []).append((row.algorithm, row.busbw, row.chosen))
    for (name, gpus, nodes, nbytes), seen in by_question.items():
        chosen = next((algorithm for algorithm, _, was in seen if was), None)
        system = replace(_CHOICE_SYSTEMS[name], num_nodes=nodes, gpus_per_node=gpus // nodes)
        case = case_of(system)
        if chosen is None or case is None:
            continue
        predicted = choice(nccl_job(case.machine), nbytes)
        sharp = "nvls" if nodes == 1 else "nvls_tree"
        yield {
            "kind": "choice",
            "system": name,
            "num_nodes": nodes,
            "num_gpus": gpus,
            "nbytes": nbytes,
            "chosen": _ALGORITHMS[chosen],
            "nccl_model": predicted.algorithm.value,
            "null_always_ring": "ring",
            "null_always_sharp": sharp,
            "measured_busbw": {_ALGORITHMS[a]: busbw for a, busbw, _ in seen},
            "predicted_busbw": {
                estimate.algorithm.value: _busbw(estimate.algbw, gpus)
                for estimate in estimates(nccl_job(case.machine), nbytes)
                if estimate.protocol == "simple"
            },
        }


def scaling_rows() -> Iterator[Record]:
    """Yield one row for each digitised point, with the model's busbw at the same size."""
    for row in scaling():
        system = replace(_DGX_H100, num_nodes=row.num_nodes)
        case = case_of(system)
        if case is None or row.num_nodes < 2:
            continue
        job = nccl_job(case.machine)
        if row.algorithm == "default":
            seconds = choice(job, row.nbytes).seconds
        else:
            seconds = next(
                e.seconds for e in estimates(job, row.nbytes) if e.algorithm is Algorithm.NVLS_TREE
            )
        yield {
            "kind": "scaling",
            "system": row.system,
            "num_nodes": row.num_nodes,
            "num_gpus": row.num_gpus,
            "algorithm": row.algorithm,
            "nbytes": row.nbytes,
            "measured_busbw": row.busbw,
            "reading_error": row.reading_error,
            "nccl_model_busbw": _busbw(row.nbytes / seconds, row.num_gpus),
        }


def score_rows(times: list[Record]) -> Iterator[Record]:
    """Yield the median factor between prediction and measurement, by system and size."""
    for name in dict.fromkeys(row["system"] for row in times):
        least = -1
        for band, most in _BANDS:
            rows = [r for r in times if r["system"] == name and least < r["nbytes"] <= most]
            least = most
            if rows:
                yield {
                    "kind": "score",
                    "system": name,
                    "band": band,
                    "num_rows": len(rows),
                    **{f"{model}_factor": _factor(rows, model) for model in _MODELS},
                    "nccl_model_bias": math.exp(median(_logs(rows, "nccl_model"))),
                }


_MODELS = ("nccl_model", "null_ring", "null_thumb")


def _logs(rows: list[Record], model: str) -> list[float]:
    return [math.log(row[f"{model}_seconds"] / row["measured_seconds"]) for row in rows]


def _factor(rows: list[Record], model: str) -> float:
    return math.exp(median(abs(value) for value in _logs(rows, model)))


def _null_ring(case: Case, nbytes: int) -> float:
    n = case.machine.num_nodes * case.machine.ranks_per_node
    slowest = case.port_nominal
    if case.machine.num_nodes > 1:
        slowest = min(slowest, case.nics_nominal) if case.port_nominal else case.nics_nominal
    return 2 * (n - 1) / n * nbytes / slowest


def _busbw(algbw: float, ranks: int) -> float:
    return algbw * 2 * (ranks - 1) / ranks


def print_scores(scores: list[Record], picks: list[Record], curves: list[Record]) -> None:
    """Print what the records say, misses included."""
    print("median factor between prediction and measurement (1 is perfect)")
    print(f"{'system':<16} {'size':<13} {'rows':>4} {'NCCL model':>11} {'ring':>7} {'thumb':>7}")
    for row in scores:
        print(
            f"{row['system']:<16} {row['band']:<13} {row['num_rows']:>4} "
            f"{row['nccl_model_factor']:>11.2f} {row['null_ring_factor']:>7.2f} "
            f"{row['null_thumb_factor']:>7.2f}"
        )
    print("\nalgorithm that NCCL chose")
    for name in ("nccl_model", "null_always_ring", "null_always_sharp"):
        right = sum(row[name] == row["chosen"] for row in picks)
        print(f"  {name:<18} {right} of {len(picks)} right")
    for row in picks:
        if row["nccl_model"] != row["chosen"]:
            print(
                f"  miss: {row['system']}, {row['num_gpus']} GPUs on {row['num_nodes']} nodes: "
                f"{row['nccl_model']} predicted, {row['chosen']} chosen"
            )
    print("\nbusbw over nodes, prediction / reading (median over sizes)")
    for key in dict.fromkeys((row["system"], row["num_nodes"]) for row in curves):
        ratios = [
            row["nccl_model_busbw"] / row["measured_busbw"]
            for row in curves
            if (row["system"], row["num_nodes"]) == key and row["measured_busbw"] > 0
        ]
        print(f"  {key[0]:<34} {key[1]:>5} nodes {median(ratios):.2f}")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    try:
        return run(options.out)
    except TopoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
