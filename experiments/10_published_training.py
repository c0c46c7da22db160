"""Does the simulator predict what others measured of whole training steps, and of peaks?

Command: python -m experiments.10_published_training --out results/
Minutes: 1.

Peaks: the best bus bandwidth from 1 GiB of every system in topo_ar/data/published, by NCCL's own
model; nothing is fitted; shall be within 15 %. DDP on V100: the overhead (ddp minus no ddp); the
cost of copies and the jitter are fitted to ResNet-50 and three other models are scored. Horovod on
four servers: the exposed time, with one overlap parameter for each transport, fitted to ResNet-101;
shall be within 30 %. BERT-large on DGX A100: weak efficiency per node within 5 points, optimizer
and jitter fitted to the mixed-precision rows of sequence length 512.

Each stands beside two null models, communication that is free and communication that is fully
exposed (for peaks: a flat ring, and 96 % of it after 30 us). A check counts only if our median
error is below half of the better null's. Writes published_training.jsonl; misses are shown, and
the exit code is 0.
"""

import argparse
import csv
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import prod
from pathlib import Path
from statistics import mean, median

from topo_ar.cli.script import exit_code_of
from topo_ar.planning.buckets import Backward, ddp_buckets, uniform_backward
from topo_ar.planning.models import model_parameters
from topo_ar.planning.parameters import Parameter, assumed_parameters
from topo_ar.simulation.compute import Compute
from topo_ar.simulation.step import StepSimulator
from topo_ar.telemetry.metrics import busbw, weak_scaling_efficiency
from topo_ar.telemetry.records import Record, RecordWriter, manifest
from topo_ar.topology.presets import preset

# Counts of the ImageNet weights in the documentation of torchvision.models; Inception without its
# auxiliary head.
_COUNTS = {
    "resnet101": 44_549_160,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "Inception V3": 23_834_568,
    "ResNet-101": 44_549_160,
}
_FORWARD = 1 / 3  # of forward and backward: backward does twice the work
_DRAWS = 40
_NIC_25G = 25e9 / 8
_FUSION_MIB = 64  # Horovod's default


def parameters_of(model: str, dtype: str = "float32") -> tuple[Parameter, ...]:
    """Return the parameters of a model that the sources name."""
    if model in _COUNTS:
        return assumed_parameters(_COUNTS[model], dtype)
    return model_parameters({"VGG-16": "vgg16"}.get(model, model), dtype)


@dataclass(frozen=True, slots=True)
class Check:
    """A kind of rows: what is compared, how near it shall be, and in which unit errors are."""

    name: str
    limit: float | None
    points: bool = False

    def row(
        self, about: Record, measured: float, ours: float, nulls: tuple[float, float]
    ) -> Record:
        """Return a scored row; errors are relative, or in points."""

        def error(predicted: float) -> float:
            off = abs(predicted - measured)
            return off * 100 if self.points else off / measured

        return {
            "kind": self.name,
            **about,
            "measured": measured,
            "predicted": ours,
            "error": error(ours),
            "null_free": nulls[0],
            "null_free_error": error(nulls[0]),
            "null_exposed": nulls[1],
            "null_exposed_error": error(nulls[1]),
            "within": None if self.limit is None else error(ours) <= self.limit,
        }


PEAKS = Check("peak", 0.15)
DDP = Check("ddp_overhead", None)
HOROVOD = Check("horovod_exposed", 0.30)
BERT = Check("bert_efficiency", 5.0, points=True)


def peak_rows() -> Iterator[Record]:
    """Yield one row for each system: its best bus bandwidth from 1 GiB."""
    published = importlib.import_module("experiments.10_published")
    times = [row for row in published.time_rows() if row["nbytes"] >= 1 << 30]
    for name in dict.fromkeys(row["system"] for row in times):
        rows = [row for row in times if row["system"] == name]
        ranks = rows[0]["num_ranks"]

        def best(key: str, rows: list[Record] = rows, ranks: int = ranks) -> float:
            return max(busbw(row["nbytes"], row[key], ranks) for row in rows)

        nulls = best("null_ring_seconds"), best("null_thumb_seconds")
        about = {"system": name, "num_rows": len(rows)}
        yield PEAKS.row(about, best("measured_seconds"), best("nccl_model_seconds"), nulls)


def ddp_rows() -> Iterator[Record]:
    """Yield one row for each DDP time of a model that nothing was fitted to."""
    rows = [row for row in _table("ddp_iteration_time.csv") if row["mode"] == "ddp"]
    plain = {
        row["model"]: float(row["p50_s"])
        for row in _table("ddp_iteration_time.csv")
        if row["mode"] == "none"
    }

    def overhead(row: dict[str, str]) -> float:
        return float(row["p50_s"]) - plain[row["model"]]

    fitted_on = [row for row in rows if row["model"] == "resnet50"]
    alone = next(row for row in fitted_on if row["gpus"] == "1")
    copying = overhead(alone) / sum(p.nbytes for p in parameters_of("resnet50"))
    jobs = {
        (row["model"], row["gpus"]): _DdpJob(
            row["model"], int(row["gpus"]), plain[row["model"]], copying
        )
        for row in rows
    }

    def misfit(jitter: float) -> float:
        return sum(
            (jobs["resnet50", row["gpus"]].overhead(jitter) - overhead(row)) ** 2
            for row in fitted_on
        )

    jitter = _least(misfit, [0.0025 * i for i in range(25)])
    print(f"DDP: copies {1e-9 / copying:.0f} GB/s, jitter {jitter:.2%}, fitted to ResNet-50")
    for row in rows:
        if row["model"] == "resnet50":
            continue
        job = jobs[row["model"], row["gpus"]]
        about = {"model": row["model"], "gpus": int(row["gpus"])}
        yield DDP.row(about, overhead(row), job.overhead(jitter), (0.0, job.communication()))


class _DdpJob:
    """A model under DDP on DGX-1 V100 with four 100 Gbit/s NICs each."""

    def __init__(self, model: str, gpus: int, seconds: float, copying: float) -> None:
        parameters = parameters_of(model)
        self._plain = seconds
        self._copies = copying * sum(p.nbytes for p in parameters)
        backward = uniform_backward(parameters, (1 - _FORWARD) * seconds + self._copies)
        self._compute = Compute(_FORWARD * seconds, backward.seconds)
        nodes = max(1, gpus // 8)
        topology = preset("dgx1-v100", nodes, gpus // nodes)
        buckets = ddp_buckets(backward, 25)
        self._simulator = StepSimulator(topology, buckets, self._compute, mode="flat")

    def overhead(self, jitter: float) -> float:
        """Return the median step beyond one without DDP."""
        compute = replace(self._compute, jitter=jitter)
        steps = [self._simulator.run(i, compute).seconds for i in range(_DRAWS if jitter else 1)]
        return median(steps) - self._plain

    def communication(self) -> float:
        """Return the time of all buckets alone."""
        return self._simulator.run(0, self._compute).communication_seconds


def horovod_rows() -> Iterator[Record]:
    """Yield one row for each transport and model that nothing was fitted to."""
    rows = [row for row in _table("throughput_scaling.csv") if row["source"] == "S21"]
    base = {row["model"]: 64 / float(row["throughput"]) for row in rows if row["gpus"] == "1"}
    jobs = {model: _HorovodJob(model, seconds) for model, seconds in base.items()}
    ours = [row for row in rows if row["framework"].startswith("Horovod")]

    def exposed(row: dict[str, str]) -> float:
        return 64 * int(row["gpus"]) / float(row["throughput"]) - base[row["model"]]

    for transport in dict.fromkeys(row["framework"] for row in ours):
        mine = {row["model"]: exposed(row) for row in ours if row["framework"] == transport}
        overlap = jobs["ResNet-101"].overlap_of(mine["ResNet-101"])
        print(f"{transport}: overlap {overlap:.2f}, fitted to ResNet-101")
        for model, measured in mine.items():
            if model != "ResNet-101":
                job = jobs[model]
                about = {"transport": transport, "model": model, "overlap": overlap}
                yield HOROVOD.row(
                    about, measured, job.exposed(overlap), (0.0, job.exposed(0.0, whole=True))
                )


class _HorovodJob:
    """A model under Horovod on four servers with four GPUs and one 25 Gbit/s NIC each."""

    def __init__(self, model: str, seconds: float) -> None:
        parameters = parameters_of(model)
        self._seconds = (1 - _FORWARD) * seconds
        self._forward = _FORWARD * seconds
        self._backward = (
            vgg_backward(parameters, self._seconds)
            if model == "VGG-16"
            else uniform_backward(parameters, self._seconds)
        )
        self._topology = preset("pcie-4", 4, nic=_NIC_25G)
        self._known: dict[float, tuple[float, float]] = {}

    def overlap_of(self, seconds: float) -> float:
        """Return the overlap with which about so much is exposed."""
        return _least(lambda o: abs(self.exposed(o) - seconds), [i / 50 for i in range(51)])

    def exposed(self, overlap: float, *, whole: bool = False) -> float:
        """Return what sticks out where gradients go out as late as ``1 - overlap`` of backward.

        With `whole` all communication, as if nothing overlapped.
        """
        if overlap not in self._known:
            late = (1 - overlap) * self._seconds
            ready = tuple(late + overlap * at for at in self._backward.ready_seconds)
            buckets = ddp_buckets(replace(self._backward, ready_seconds=ready), _FUSION_MIB)
            compute = Compute(self._forward, self._seconds)
            step = StepSimulator(self._topology, buckets, compute, mode="flat").run()
            self._known[overlap] = step.exposed_seconds, step.communication_seconds
        return self._known[overlap][int(whole)]


def vgg_backward(parameters: Sequence[Parameter], seconds: float) -> Backward:
    """Return VGG-16's backward, in which layers take time by their multiplications at 224 x 224.

    The fully connected layers hold nine tenths of the parameters and come first.
    """
    sides = iter([224] * 2 + [112] * 2 + [56] * 3 + [28] * 3 + [14] * 3)
    work = [
        prod(p.shape) * (next(sides) ** 2 if len(p.shape) == 4 else 1) if len(p.shape) > 1 else 0
        for p in parameters
    ]
    total, done, ready = sum(work), 0, []
    for each in reversed(work):
        done += each
        ready.append(seconds * done / total)
    return Backward(tuple(reversed(parameters)), tuple(ready), seconds, "By multiplications.")


def bert_rows() -> Iterator[Record]:
    """Yield one row for each number of nodes of the series that nothing was fitted to."""
    rows = [
        row
        for row in _table("throughput_scaling.csv")
        if row["model"].startswith("BERT-large pretrain")
        and row["note"].startswith("strong scaling")
        and row["framework"].startswith("PyTorch")
    ]
    series: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        series.setdefault((row["model"], row["precision"]), []).append(row)
    jobs = {
        key: {int(row["nodes"]): _BertJob(row, own[0]) for row in own}
        for key, own in series.items()
    }
    fitted = next(key for key in series if "seq512" in key[0] and key[1] == "mixed")

    def misfit(optimizer: float, jitter: float) -> float:
        found = jobs[fitted]
        base = found[1].seconds(optimizer, jitter)
        return sum(
            (base / (n * job.seconds(optimizer, jitter)) - job.measured) ** 2
            for n, job in found.items()
        )

    grid = [(o * 0.01, j * 0.005) for o in range(0, 21, 2) for j in range(9)]
    optimizer, jitter = min(grid, key=lambda each: misfit(*each))
    print(
        f"BERT: optimizer {optimizer * 1e3:.0f} ms, jitter {jitter:.2%}, fitted to sequence length "
        "512 in mixed precision"
    )
    for key, found in jobs.items():
        if key == fitted:
            continue
        base = found[1].seconds(optimizer, jitter)
        for n, job in found.items():
            if n == 1:
                continue
            efficiency = base / (n * job.seconds(optimizer, jitter))
            nulls = 1.0, job.all_exposed()
            about = {"model": key[0], "precision": key[1], "nodes": n}
            yield BERT.row(about, job.measured, efficiency, nulls)


class _BertJob:
    """A series' row: the last micro-batch of a step is simulated, those before it compute."""

    def __init__(self, row: dict[str, str], base: dict[str, str]) -> None:
        nodes = int(row["nodes"])
        rate, base_rate = float(row["throughput"]), float(base["throughput"])
        accumulation = int(base["note"].rsplit(" ", 1)[1])
        batch = int(base["gpus"]) * int(base["batch_per_gpu"]) * accumulation
        self.measured = weak_scaling_efficiency(rate, nodes, base_rate)
        self._one_node = batch / base_rate
        whole = self._one_node / nodes
        micro = self._one_node / accumulation
        dtype = "float16" if row["precision"] == "mixed" else "float32"
        backward = uniform_backward(parameters_of("bert-large", dtype), (1 - _FORWARD) * micro)
        self._compute = Compute(whole - backward.seconds, backward.seconds)
        self._simulator = StepSimulator(
            preset("dgx-a100", nodes),
            ddp_buckets(backward, 25),
            self._compute,
            mode="flat",
        )
        self._known: dict[float, float] = {}

    def seconds(self, optimizer: float, jitter: float) -> float:
        """Return the mean step."""
        if jitter not in self._known:
            # The optimizer comes after everything else, on all ranks alike.
            compute = replace(self._compute, jitter=jitter)
            draws = _DRAWS // 4 if jitter else 1
            self._known[jitter] = mean(
                self._simulator.run(i, compute).seconds for i in range(draws)
            )
        return self._known[jitter] + optimizer

    def all_exposed(self) -> float:
        """Return the efficiency if no communication were hidden, against one that has none."""
        step = self._simulator.run(0, self._compute)
        return step.compute_seconds / (step.compute_seconds + step.communication_seconds)


def score(rows: Sequence[Record], check: Check) -> Record:
    """Return how near a kind of rows is, and whether it counts."""
    ours = median(row["error"] for row in rows)
    better = min(
        median(row[f"{null}_error"] for row in rows) for null in ("null_free", "null_exposed")
    )
    return {
        "kind": "score",
        "check": check.name,
        "num_rows": len(rows),
        "limit": check.limit,
        "within_limit": None if check.limit is None else sum(row["within"] for row in rows),
        "median_error": ours,
        "better_null_error": better,
        "counts": ours < better / 2,
    }


def run(out: Path) -> int:
    """Predict, write and print."""
    path = out / "published_training.jsonl"
    path.unlink(missing_ok=True)
    with RecordWriter(path) as writer:
        writer.write({"kind": "manifest", "manifest": manifest()})
        for check, make in (
            (PEAKS, peak_rows),
            (DDP, ddp_rows),
            (HOROVOD, horovod_rows),
            (BERT, bert_rows),
        ):
            rows = list(make())
            total = score(rows, check)
            for row in (*rows, total):
                writer.write(row)
            _print(rows, total, check)
    print(f"written: {path}")
    return 0


def _print(rows: Sequence[Record], total: Record, check: Check) -> None:
    unit = "points" if check.points else "of it"
    print(f"== {check.name}: measured, predicted, both nulls")
    for row in rows:
        what = " ".join(
            str(row[key])
            for key in ("system", "transport", "model", "precision", "gpus", "nodes")
            if key in row
        )
        error = f"{row['error']:.1f}" if check.points else f"{row['error']:.1%}"
        print(
            f"  {what:52} {row['measured']:>10.4g} {row['predicted']:>10.4g} "
            f"{row['null_free']:>10.4g} {row['null_exposed']:>10.4g}  off by {error}"
            + ("  MISS" if row["within"] is False else "")
        )
    within = (
        ""
        if check.limit is None
        else f"{total['within_limit']} of {total['num_rows']} within {check.limit:g} {unit}; "
    )
    print(
        f"  {within}median error {total['median_error']:.3g}, better null "
        f"{total['better_null_error']:.3g}: {'counts' if total['counts'] else 'does not count'}"
    )


def _least(cost: Callable[[float], float], values: Sequence[float]) -> float:
    return min(values, key=cost)


def _table(name: str) -> list[dict[str, str]]:
    text = files("topo_ar.data").joinpath("published", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    return exit_code_of(lambda: run(options.out))


if __name__ == "__main__":
    sys.exit(main())
