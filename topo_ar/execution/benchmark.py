"""Timing all-reduces in a job: candidates interleaved, slowest rank counts, results checked.

A sample is the mean of a few back-to-back calls after one untimed call, so that no candidate gains
from credit that an idle link has saved up; a lone sample is one call after a pause.
"""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from topo_ar.execution.communicator import Communicator
from topo_ar.execution.pipeline import Span
from topo_ar.planning.calibration import predict_seconds
from topo_ar.planning.plan import Family, Plan
from topo_ar.telemetry.metrics import algbw, busbw, slow_link_busbw

LONE_LIMIT_NBYTES = 256 << 10
_LONE_PAUSE_S = 0.01
_SAMPLE_S = 0.04
_MAX_CALLS = 40
_BURSTS_PER_NIC = 16
_CALIBRATION_SAMPLES = 3

AllReduce = Callable[[torch.Tensor], object]


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. Sizes in bytes; `dtype` is a torch name; `op` is ``sum`` or ``avg``.

    Sizes from `large_nbytes` up take `large_iterations` samples where that is given. One planned
    all-reduce of `trace_nbytes` is recorded span by span.
    """

    sizes: tuple[int, ...]
    iterations: int = 20
    warmup: int = 1
    check: bool = True
    dtype: str = "float32"
    op: str = "sum"
    against: tuple[str, ...] = ("gloo",)
    plan: str = "auto"
    timeout_s: float = 120.0
    burst_nbytes: int | None = None
    large_nbytes: int = 64_000_000
    large_iterations: int | None = None
    trace_nbytes: int | None = None


@dataclass(slots=True)
class Candidate:
    """One way to all-reduce: a name, the call, and the family its times calibrate."""

    name: str
    call: AllReduce
    family: Family | None


Row = dict[str, Any]


def run_benchmark(
    config: BenchConfig, communicator: Communicator, announce: Callable[[str, Row], None]
) -> Iterator[Row]:
    """Measure every size and yield one row per candidate on rank 0; nothing on other ranks.

    Collective: every rank iterates to the end.

    Parameters
    ----------
    config : BenchConfig
        Equal on all ranks.
    communicator : Communicator
        Over all ranks of the default group.
    announce : callable
        Called on rank 0 with the name of an event and its data: ``calibration``, ``plan`` and
        ``prediction`` before a size is timed, ``span`` at the end.
    """
    bench = _Bench(config, communicator)
    try:
        calibrations = bench.calibrate(announce)
        for nbytes in config.sizes:
            for row in bench.measure(nbytes, calibrations, announce):
                if communicator.rank == 0:
                    yield row
        if config.trace_nbytes is not None:
            for span in bench.trace(config.trace_nbytes):
                announce("span", span)
    finally:
        bench.close()


class _Bench:
    def __init__(self, config: BenchConfig, communicator: Communicator) -> None:
        self.config = config
        self.communicator = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.op = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[config.op]
        self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_s))
        self.candidates = [
            *(
                [Candidate("gloo", self._flat, Family.FLAT_RING)]
                if "gloo" in config.against
                else []
            ),
            Candidate("plan", self._planned, None),
        ]

    def close(self) -> None:
        dist.destroy_process_group(self._gloo)

    def _flat(self, tensor: torch.Tensor) -> object:
        return dist.all_reduce(tensor, op=self.op, group=self._gloo)

    def _planned(self, tensor: torch.Tensor) -> object:
        return self.communicator.all_reduce(tensor, self.op).wait()

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes // self.dtype.itemsize, dtype=self.dtype)

    def calibrate(self, announce: Callable[[str, Row], None]) -> dict[str, list[tuple[int, float]]]:
        """Time every candidate at sizes that are not asked for."""
        points: dict[str, list[tuple[int, float]]] = {c.name: [] for c in self.candidates}
        for nbytes in calibration_sizes(self.config.sizes):
            tensor = self._zeros(nbytes)
            samples = self._interleaved(tensor, _CALIBRATION_SAMPLES)
            for candidate in self.candidates:
                points[candidate.name].append((nbytes, median(samples[candidate.name].seconds)))
        if self.rank == 0:
            announce("calibration", {"points": points})
        return points

    def measure(
        self,
        nbytes: int,
        calibrations: dict[str, list[tuple[int, float]]],
        announce: Callable[[str, Row], None],
    ) -> Iterator[Row]:
        """Yield the rows of one size."""
        plan = self.communicator.plan_for(nbytes, self.dtype.itemsize)
        predicted = {c.name: predict_seconds(calibrations[c.name], nbytes) for c in self.candidates}
        if self.rank == 0:
            announce("plan", {"nbytes": nbytes, "hash": plan.hash, "reason": plan.reason})
            announce("prediction", {"nbytes": nbytes, "predicted_seconds": predicted})
        wrong_before = self._wrong(nbytes)
        tensor = self._zeros(nbytes)
        iterations = self.config.iterations
        if self.config.large_iterations is not None and nbytes >= self.config.large_nbytes:
            iterations = self.config.large_iterations
        samples = self._interleaved(tensor, iterations)
        lone = self._lone(tensor) if nbytes <= LONE_LIMIT_NBYTES else {}
        wrong_after = self._wrong(nbytes)
        for candidate in self.candidates:
            name = candidate.name
            wrong = None
            if self.config.check:
                wrong = wrong_before[name] + wrong_after[name]
            yield self._row(
                candidate, nbytes, plan, samples[name], lone.get(name), predicted[name], wrong
            )

    def trace(self, nbytes: int) -> Iterator[Row]:
        """Yield on rank 0 the spans of all ranks for one planned all-reduce."""
        tensor = self._zeros(nbytes)
        self._planned(tensor)
        dist.barrier(group=self._gloo)
        self.communicator.record_spans()
        self._planned(tensor)
        recorded = self.communicator.record_spans(enabled=False)
        everyone = self.communicator.gather(msgspec.json.encode(recorded))
        if self.rank == 0:
            per_rank = [msgspec.json.decode(data, type=list[Span]) for data in everyone]
            origin = min(span.begin for spans in per_rank for span in spans)
            for rank, spans in enumerate(per_rank):
                for span in spans:
                    yield {
                        "rank": rank,
                        "stage": span.stage,
                        "chunk": span.chunk,
                        "what": span.what,
                        "begin_seconds": span.begin - origin,
                        "end_seconds": span.end - origin,
                    }

    def _row(
        self,
        candidate: Candidate,
        nbytes: int,
        plan: Plan,
        samples: "_Samples",
        lone: list[float] | None,
        predicted: float | None,
        wrong: int | None,
    ) -> Row:
        seconds = median(samples.seconds)
        nodes = self.communicator.nodes
        marks = self._marks(nbytes)
        limit = plan.wire_limit_seconds
        return {
            "collective": "all_reduce",
            "candidate": candidate.name,
            "family": str(plan.family) if candidate.name == "plan" else "flat_ring",
            "dtype": self.config.dtype,
            "redop": self.config.op,
            "nbytes": nbytes,
            "world_size": self.world_size,
            "hosts": len(nodes),
            "iterations": len(samples.seconds),
            "warmup": self.config.warmup,
            "calls_per_sample": samples.calls,
            "seconds": samples.seconds,
            "median_seconds": seconds,
            "cpu_seconds": median(samples.cpu_seconds),
            "lone_seconds": lone,
            "algbw": algbw(nbytes, seconds),
            "busbw": busbw(nbytes, seconds, self.world_size),
            "slow_link_busbw": slow_link_busbw(nbytes, seconds, len(nodes)),
            "wrong": wrong,
            "bound_seconds": plan.bound_seconds,
            "bottleneck": plan.bottleneck,
            "wire_limit_seconds": limit,
            "fraction": limit / seconds if limit and not marks else None,
            "predicted_seconds": predicted,
            "model_seconds": plan.predicted_seconds if candidate.name == "plan" else None,
            "plan_hash": plan.hash if candidate.name == "plan" else None,
            "congestion_control": self.communicator.congestion_control,
            "marks": marks,
        }

    def _marks(self, nbytes: int) -> list[str]:
        burst = self.config.burst_nbytes
        nodes = self.communicator.nodes
        if burst and len(nodes) > 1:
            num_nics = max(1, self.communicator.nics_per_node)
            per_nic = 2 * (len(nodes) - 1) / len(nodes) * nbytes / num_nics
            if per_nic < _BURSTS_PER_NIC * burst:
                return ["burst"]
        return []

    def _interleaved(self, tensor: torch.Tensor, num_samples: int) -> dict[str, "_Samples"]:
        calls = {c.name: self._calls_per_sample(c, tensor) for c in self.candidates}
        mine = {c.name: _Samples(calls[c.name], [], []) for c in self.candidates}
        for _ in range(num_samples):
            for candidate in self.candidates:
                self._sample(candidate, tensor, mine[candidate.name])
        return {name: self._slowest(samples) for name, samples in mine.items()}

    def _calls_per_sample(self, candidate: Candidate, tensor: torch.Tensor) -> int:
        dist.barrier(group=self._gloo)
        for _ in range(self.config.warmup):
            candidate.call(tensor)
        begin = time.perf_counter()
        candidate.call(tensor)
        elapsed = self._reduce_max([time.perf_counter() - begin])[0]
        return min(_MAX_CALLS, max(1, round(_SAMPLE_S / elapsed)))

    def _sample(self, candidate: Candidate, tensor: torch.Tensor, samples: "_Samples") -> None:
        dist.barrier(group=self._gloo)
        candidate.call(tensor)
        cpu = _cpu_seconds()
        begin = time.perf_counter()
        for _ in range(samples.calls):
            candidate.call(tensor)
        samples.seconds.append((time.perf_counter() - begin) / samples.calls)
        samples.cpu_seconds.append((_cpu_seconds() - cpu) / samples.calls)

    def _lone(self, tensor: torch.Tensor) -> dict[str, list[float]]:
        mine: dict[str, list[float]] = {c.name: [] for c in self.candidates}
        for _ in range(self.config.iterations):
            for candidate in self.candidates:
                dist.barrier(group=self._gloo)
                time.sleep(_LONE_PAUSE_S)
                dist.barrier(group=self._gloo)
                begin = time.perf_counter()
                candidate.call(tensor)
                mine[candidate.name].append(time.perf_counter() - begin)
        return {name: self._reduce_max(values) for name, values in mine.items()}

    def _slowest(self, samples: "_Samples") -> "_Samples":
        total = torch.tensor(samples.cpu_seconds, dtype=torch.float64)
        dist.all_reduce(total, group=self._gloo)
        cpu = (total / self.world_size).tolist()
        return _Samples(samples.calls, self._reduce_max(samples.seconds), cpu)

    def _reduce_max(self, values: Sequence[float]) -> list[float]:
        most = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._gloo)
        slowest: list[float] = most.tolist()
        return slowest

    def _wrong(self, nbytes: int) -> dict[str, int]:
        """Count elements that differ from the exact sum of small integers, over all ranks."""
        if not self.config.check:
            return {}
        numel = nbytes // self.dtype.itemsize
        counts = {}
        for candidate in self.candidates:
            pattern = torch.arange(numel) % 7
            tensor = (pattern + self.rank % 5).to(self.dtype)
            offset = sum(rank % 5 for rank in range(self.world_size))
            expected = (pattern * self.world_size + offset).double()
            if self.op == dist.ReduceOp.AVG:
                expected /= self.world_size
            candidate.call(tensor)
            wrong = torch.tensor([int((tensor != expected.to(self.dtype)).sum())])
            dist.all_reduce(wrong, group=self._gloo)
            counts[candidate.name] = int(wrong)
        return counts


@dataclass(slots=True)
class _Samples:
    calls: int
    seconds: list[float]
    cpu_seconds: list[float]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def calibration_sizes(sizes: Sequence[int]) -> list[int]:
    """Return sizes in bytes near those asked for and different from all of them.

    Each decade of sizes gets two points, so that every size lies between measured neighbours or
    within a factor of three of one; nothing larger than 40 MB is timed.
    """
    if not sizes or max(sizes) == 0:
        return []
    wanted = [s for s in sizes if s]
    grid = [base * 10**power for power in range(3, 8) for base in (2, 6)]
    grid = [size - size % 64 for size in grid if size <= 40_000_000]
    low, high = min(wanted), max(wanted)
    chosen = [s for s in grid if low / 4 <= s <= max(high * 1.5, low) and s not in wanted]
    while len(chosen) < 2:
        chosen.append(max([low, *chosen]) * 2 + 64)
    return chosen
