"""How do three models scale to thousands of GPUs, on which network, and by which plan?

Command: python -m experiments.09_scaling --out results/
Minutes: 6 on two cores, all of it simulated; --quick goes to 64 GPUs in half a minute.

Weak scaling keeps the batch of each GPU, strong scaling the global batch, which a GPU computes in
micro-batches of the usual size or less; only the last one overlaps. Models: ResNet-50, BERT-large
with sequences of 128 and neural collaborative filtering on MovieLens-20M with embeddings reduced
densely; a GPU computes at the rate that NVIDIA published for one alone, in mixed precision. An H100
is taken to compute as many times faster than an A100 as data sheets say for dense bfloat16, 989.4
over 312 Tflop/s, more than is usually reached: communication then matters more, not less.

Systems: DGX H100 (8 NICs of 400 Gbit/s a node), DGX A100 (8 of 200), and 8 V100 behind one NIC of
100 and of 25 Gbit/s Ethernet. Plans: flat, hierarchical, hierarchical with int8 between nodes, and
the planner's choice for each bucket. Computing varies from step to step and rank to rank by 2 %
(log-normal); a point is the median of several draws. Its bar moves the exposed communication by the
95th percentile of the simulator's errors in 08's record; draws are the same in both ends.

Writes scaling.jsonl, a row a point: ``experiment`` "scaling", ``kind`` (weak, strong), ``model``,
``system``, ``gpus``, ``batch_per_gpu``, ``global_batch``, ``efficiency`` against one GPU,
``efficiency_of_node`` against one node (null below), ``low_efficiency``, ``high_efficiency``,
``error`` (of 08), ``simulation_seconds`` (of the draws together), and what `topo-ar simulate`
writes of a step: ``simulated``, ``candidate`` (the plan), ``world_size``, ``hosts``, ``seconds``
(each draw), ``median_seconds``, ``exposed_seconds``, ``communication_seconds``,
``communication_ratio``, ``nbytes_between``, ... and ``manifest``. Points that are there already are
not made again.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from topo_ar.cli.script import exit_code_of
from topo_ar.errors import ConfigError
from topo_ar.planning.buckets import ddp_buckets, uniform_backward
from topo_ar.planning.codecs import parse_codec
from topo_ar.planning.models import model_parameters
from topo_ar.planning.parameters import Parameter, assumed_parameters
from topo_ar.simulation.compute import Compute
from topo_ar.simulation.step import StepSimulator
from topo_ar.simulation.step_result import step_record
from topo_ar.telemetry.metrics import strong_scaling_efficiency, weak_scaling_efficiency
from topo_ar.telemetry.records import Record, RecordWriter, manifest, read_records
from topo_ar.topology.model import Topology
from topo_ar.topology.presets import preset

PREDICTED = Path(__file__).parent / "results" / "predicted_measured.jsonl"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_SIZES = (1, 8, 16, 64)
JITTER = 0.02
_FORWARD = 1 / 3  # of forward and backward: backward does twice the work
_GPUS = 8
_DRAWS = 5
_H100_OVER_A100 = 989.4 / 312  # dense bfloat16, data sheets of the SXM modules
_CAP_MIB = 25


@dataclass(frozen=True, slots=True)
class Model:
    """A model, the examples a second of one V100 and one A100, its usual and its global batch.

    Rates are those of topo_ar/data/published/throughput_scaling.csv, source S20, one GPU, mixed.
    """

    name: str
    v100: float
    a100: float
    batch: int
    global_batch: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters; gradients are of 16 bits."""
        if self.name == "recommender":
            return assumed_parameters(_NCF_PARAMETERS, "float16")
        return model_parameters(self.name, "float16")


# 138,493 users and 26,744 items with 64 factors, and 128 of a perceptron of 256-256-128-64.
_NCF_PARAMETERS = (138_493 + 26_744) * (64 + 128) + 256 * 256 + 256 * 128 + 128 * 64 + 577
MODELS = (
    Model("resnet50", 1200.0, 2470.0, 256, 32_768),
    Model("bert-large", 224.0, 580.0, 64, 65_536),
    Model("recommender", 20_650_000.0, 34_080_000.0, 1_048_576, 1_048_576),
)


@dataclass(frozen=True, slots=True)
class System:
    """A machine of eight GPUs and its network."""

    name: str
    machine: str
    nic: float | None = None

    def rate(self, model: Model) -> float:
        """Return the examples a second of one of its GPUs."""
        if self.machine == "aws-p3dn":
            return model.v100
        return model.a100 * (_H100_OVER_A100 if self.machine == "dgx-h100" else 1)


SYSTEMS = (
    System("DGX H100, 8x400 Gbit/s", "dgx-h100"),
    System("DGX A100, 8x200 Gbit/s", "dgx-a100"),
    System("V100, 100 Gbit/s Ethernet", "aws-p3dn"),
    System("V100, 25 Gbit/s Ethernet", "aws-p3dn", 3.125e9),
)
PLANS = {
    "flat": ("flat", "none"),
    "hierarchical": ("hierarchical", "none"),
    "hierarchical, int8": ("hierarchical", "int8"),
    "auto": ("auto", "none"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One job to simulate."""

    kind: str
    model: Model
    system: System
    plan: str
    gpus: int

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others in records."""
        return self.kind, self.model.name, self.system.name, self.plan, self.gpus

    @property
    def batch(self) -> int:
        """Examples of each GPU in a step."""
        if self.kind == "weak":
            return self.model.batch
        return self.model.global_batch // self.gpus

    def compute(self) -> tuple[Compute, float]:
        """Return the seconds of a GPU in a step, and of the backward that gradients come from."""
        whole = self.batch / self.system.rate(self.model)
        micro = min(self.batch, self.model.batch) / self.system.rate(self.model)
        backward = (1 - _FORWARD) * micro
        return Compute(whole - backward, backward, jitter=JITTER), backward

    def simulate(self, topology: Topology) -> Record:
        """Return the row of a point without its efficiencies."""
        begun = time.monotonic()
        compute, backward = self.compute()
        mode, codec = PLANS[self.plan]
        buckets = ddp_buckets(uniform_backward(self.model.parameters, backward), _CAP_MIB)
        simulator = StepSimulator(topology, buckets, compute, mode=mode, codecs=parse_codec(codec))
        steps = [simulator.run(draw) for draw in range(_DRAWS)]
        hosts = max(1, self.gpus // _GPUS)
        found = step_record(steps, self.plan, hosts, compute.forward + compute.backward)
        return {
            "experiment": "scaling",
            "kind": self.kind,
            "model": self.model.name,
            "system": self.system.name,
            "gpus": self.gpus,
            "batch_per_gpu": self.batch,
            "global_batch": self.batch * self.gpus,
            "simulation_seconds": time.monotonic() - begun,
            **found,
            "buckets": len(buckets),
            "links": found["links"][:1],  # the busiest
        }


def points(sizes: Sequence[int]) -> Iterator[Point]:
    """Yield all points, small jobs first, as larger ones are compared with them."""
    for gpus in sizes:
        for system in SYSTEMS:
            for model in MODELS:
                for plan in PLANS if gpus > _GPUS else ("flat",):
                    for kind in ("weak", "strong"):
                        yield Point(kind, model, system, plan, gpus)


def error_of_simulator(path: Path = PREDICTED) -> float:
    """Return the 95th percentile of the simulator's relative errors in 08's record.

    Raises
    ------
    ConfigError
        If the record is not there.
    """
    for row in read_records(path):
        if str(row.get("target", "")).startswith("95th percentile"):
            return float(row["value"])
    raise ConfigError(f"{path} holds no 95th percentile; run experiments.08_predicted_measured")


def with_efficiency(row: Record, bases: dict[int, float], error: float) -> Record:
    """Return a row with its efficiency against one GPU and one node, and its bar.

    `bases` holds the seconds of the same job on one GPU and on one node.
    """
    seconds, gpus = row["median_seconds"], row["gpus"]
    moved = error * row["exposed_seconds"]

    def against(base: int, own: float) -> float:
        if row["kind"] == "strong":
            return strong_scaling_efficiency(own, gpus, bases[base], base)
        return weak_scaling_efficiency(gpus / own, gpus, base / bases[base], base)

    return {
        **row,
        "efficiency": against(1, seconds),
        "efficiency_of_node": against(_GPUS, seconds) if gpus >= _GPUS else None,
        "low_efficiency": against(1, seconds + moved),
        "high_efficiency": against(1, seconds - moved),
        "error": error,
    }


def run(out: Path, *, quick: bool) -> int:
    """Simulate the points that are not in the records yet, and print the table."""
    path = out / ("scaling.quick.jsonl" if quick else "scaling.jsonl")
    error = error_of_simulator()
    about = manifest()
    wanted = list(points(QUICK_SIZES if quick else SIZES))
    topologies: dict[tuple[str, int], Topology] = {}
    with RecordWriter(path) as writer:
        done = {key_of(row): row for row in read_records(path)}
        left = [point for point in wanted if point.key not in done]
        begun = time.monotonic()
        for number, point in enumerate(left):
            place = point.system.name, point.gpus
            if place not in topologies:
                topologies = {place: topology_of(point)}
            row = point.simulate(topologies[place])
            bases = {point.gpus: row["median_seconds"]}
            for base in (1, _GPUS):
                if base < point.gpus:
                    other = Point(point.kind, point.model, point.system, "flat", base)
                    bases[base] = done[other.key]["median_seconds"]
            row = {**with_efficiency(row, bases, error), "manifest": about}
            writer.write(row)
            done[point.key] = row
            if number + 1 == len(left) or left[number + 1].gpus != point.gpus:
                print(
                    f"{point.gpus} GPUs: {number + 1} of {len(left)} points, "
                    f"{time.monotonic() - begun:.0f} s",
                    flush=True,
                )
    for line in table([done[point.key] for point in wanted]):
        print(line)
    print(f"written: {path}")
    return 0


def topology_of(point: Point) -> Topology:
    """Return the machines of a point."""
    nodes, ranks = max(1, point.gpus // _GPUS), min(point.gpus, _GPUS)
    return preset(point.system.machine, nodes, ranks, point.system.nic)


def key_of(row: Record) -> tuple[object, ...]:
    """Return the key of the point of a row."""
    return row["kind"], row["model"], row["system"], row["candidate"], row["gpus"]


def table(rows: Sequence[Record]) -> Iterator[str]:
    """Yield the efficiencies of each job over its sizes."""
    sizes = sorted({row["gpus"] for row in rows})
    series: dict[tuple[str, ...], dict[int, Record]] = {}
    for row in rows:
        name = tuple(map(str, key_of(row)[:-1]))
        series.setdefault(name, {})[row["gpus"]] = row
    yield f"{'efficiency against one GPU, %':72} " + " ".join(f"{size:>5}" for size in sizes)
    for name, found in series.items():
        cells = [
            f"{100 * found[size]['efficiency']:5.1f}" if size in found else " " * 5
            for size in sizes
        ]
        kind, model, system, plan = name
        yield f"{kind:7}{model:12} {system:26} {plan:25} " + " ".join(cells)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="up to 64 GPUs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()
    return exit_code_of(
        lambda: run(options.out, quick=options.quick), "interrupted; the same command goes on"
    )


if __name__ == "__main__":
    sys.exit(main())
