"""Timing all-reduces in a job: candidates interleaved, slowest rank counts, results checked.

A sample is the mean of a few back-to-back calls after one untimed call, so that no candidate gains
from credit that an idle link has saved up; a lone sample is one call after a pause.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from topo_ar.execution.candidates import Candidate, CandidateLostError, Own, Run, Sample
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.flight import Span
from topo_ar.execution.machine_load import CpuTicks, busy_share, cpu_ticks
from topo_ar.execution.orders import PeerPlace
from topo_ar.execution.peer import Peer
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.planning.calibration import predict_seconds
from topo_ar.planning.plan import Plan
from topo_ar.telemetry.metrics import algbw, busbw, slow_link_busbw

PLANNED = "plan:"
ZERO_COPY = "plan:zero-copy"
SEPARATE = "plan:no-shared-memory"
LONE_LIMIT_NBYTES = 256 << 10
_LONE_PAUSE_S = 0.01
_SAMPLE_S = 0.25
_MAX_CALLS = 40
_BURSTS_PER_NIC = 16
_CALIBRATION_SAMPLES = 5
_LARGEST_CALIBRATION = 40_000_000
# A peer's order has this share of the time for which the job's other ranks wait.
_PEER_SHARE = 1 / 3
_LONGEST_PEER_S = 60.0


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. Sizes in bytes; `dtype` is a torch name; `op` is ``sum`` or ``avg``.

    Sizes from `large_nbytes` up take `large_iterations` samples where that is given. One planned
    all-reduce of `trace_nbytes` is recorded span by span. `against` names what the plan is measured
    against in this job: ``gloo``, `PLANNED` and a mode of `Communicator` such as ``plan:equal``,
    `ZERO_COPY`, the plan on buffers in shared memory, or `SEPARATE`, what is planned where every
    rank counts as a node of its own. `peers` are jobs of other libraries that take turns with
    this one.
    """

    sizes: tuple[int, ...]
    iterations: int = 20
    warmup: int = 1
    check: bool = True
    dtype: str = "float32"
    op: str = "sum"
    against: tuple[str, ...] = ("gloo",)
    peers: tuple[PeerPlace, ...] = ()
    plan: str = "auto"
    timeout_s: float = 120.0
    burst_nbytes: int | None = None
    large_nbytes: int = 64_000_000
    large_iterations: int | None = None
    trace_nbytes: int | None = None


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
        ``prediction`` before a size is timed, ``lost`` when a peer is not measured any more,
        ``span`` at the end.
    """
    bench = _Bench(config, communicator, announce)
    try:
        calibrations = bench.calibrate()
        for nbytes in config.sizes:
            for row in bench.measure(nbytes, calibrations):
                if communicator.rank == 0:
                    yield row
        if config.trace_nbytes is not None:
            for span in bench.trace(config.trace_nbytes):
                announce("span", span)
    finally:
        bench.close()


class _Bench:
    def __init__(
        self,
        config: BenchConfig,
        communicator: Communicator,
        announce: Callable[[str, Row], None],
    ) -> None:
        self.config = config
        self.communicator = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self._announce = announce if self.rank == 0 else lambda event, data: None
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.op = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[config.op]
        self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_s))
        self._buffer = torch.empty(0, dtype=self.dtype)
        self._shared: dict[int, torch.Tensor] = {}
        self._lost: dict[str, str] = {}
        self._planned = {"plan": communicator} | {
            name: self._other(name.removeprefix(PLANNED))
            for name in config.against
            if name.startswith(PLANNED)
        }
        self.candidates: list[Candidate] = [*self._own(), *self._peers()]

    def _own(self) -> Iterator[Candidate]:
        if "gloo" in self.config.against:
            yield Own("gloo", self._flat, self._zeros, self.op, self._gloo)
        for name, communicator in self._planned.items():
            call = partial(communicator.all_reduce_sync, op=self.op)
            zeros = self._zeros if name != ZERO_COPY else partial(self._shared_zeros, communicator)
            yield Own(name, call, zeros, self.op, self._gloo)

    def _other(self, mode: str) -> Communicator:
        if PLANNED + mode == SEPARATE:
            return self._separate()
        if PLANNED + mode == ZERO_COPY:
            mode = self.config.plan
        return Communicator(
            topology=self.communicator.topology, plan=mode, timeout_s=self.config.timeout_s
        )

    def _separate(self) -> Communicator:
        known = os.environ.get(HOST_ID_ENV)
        os.environ[HOST_ID_ENV] = f"rank {self.rank}"
        try:
            return Communicator(plan=self.config.plan, timeout_s=self.config.timeout_s)
        finally:
            os.environ.pop(HOST_ID_ENV)
            if known is not None:
                os.environ[HOST_ID_ENV] = known

    def _peers(self) -> Iterator[Candidate]:
        config = self.config
        deadline = min(_LONGEST_PEER_S, _PEER_SHARE * config.timeout_s)
        for place in config.peers:
            yield Peer(place, config.dtype, config.op, deadline, self._gloo)

    def close(self) -> None:
        for candidate in self.candidates:
            candidate.close()
        for communicator in self._planned.values():
            if communicator is not self.communicator:
                communicator.close()
        dist.destroy_process_group(self._gloo)

    def _flat(self, tensor: torch.Tensor) -> object:
        return dist.all_reduce(tensor, op=self.op, group=self._gloo)

    def _zeros(self, nbytes: int) -> torch.Tensor:
        """Return a buffer that all candidates share until another size is asked for."""
        if self._buffer.nbytes != nbytes:
            self._buffer = torch.zeros(nbytes // self.dtype.itemsize, dtype=self.dtype)
        return self._buffer

    def _shared_zeros(self, communicator: Communicator, nbytes: int) -> torch.Tensor:
        """Return a buffer that co-located ranks read where it lies."""
        shared = self._shared.get(nbytes)
        if shared is None:
            shared = self._shared[nbytes] = torch.zeros(
                nbytes // self.dtype.itemsize, dtype=self.dtype
            )
            communicator.share(shared).wait()
        return shared

    def calibrate(self) -> dict[str, list[tuple[int, float]]]:
        """Time every candidate at sizes that are not asked for."""
        points: dict[str, list[tuple[int, float]]] = {c.name: [] for c in self.candidates}
        for nbytes in calibration_sizes(self.config.sizes):
            for name, samples in self._interleaved(nbytes, _CALIBRATION_SAMPLES).items():
                points[name].append((nbytes, median(samples.seconds)))
        self._announce("calibration", {"points": points})
        return points

    def measure(
        self, nbytes: int, calibrations: dict[str, list[tuple[int, float]]]
    ) -> Iterator[Row]:
        """Yield the rows of one size."""
        plans = {
            name: made.plan_for(nbytes, self.dtype.itemsize) for name, made in self._planned.items()
        }
        plan = plans["plan"]
        predicted = {c.name: predict_seconds(calibrations[c.name], nbytes) for c in self.candidates}
        self._announce("plan", {"nbytes": nbytes, "hash": plan.hash, "reason": plan.reason})
        self._announce("prediction", {"nbytes": nbytes, "predicted_seconds": predicted})
        wrong_before = self._wrong(nbytes)
        iterations = self.config.iterations
        if self.config.large_iterations is not None and nbytes >= self.config.large_nbytes:
            iterations = self.config.large_iterations
        samples = self._interleaved(nbytes, iterations)
        lone = self._lone(nbytes) if nbytes <= LONE_LIMIT_NBYTES else {}
        wrong_after = self._wrong(nbytes)
        for name in [candidate.name for candidate in self.candidates]:
            wrong = wrong_before[name] + wrong_after[name] if self.config.check else None
            alone = lone[name].seconds if name in lone else None
            own = plans.get(name)
            yield self._row(name, nbytes, plan, own, samples[name], alone, predicted[name], wrong)

    def trace(self, nbytes: int) -> Iterator[Row]:
        """Yield on rank 0 the spans of all ranks for one planned all-reduce."""
        tensor = self._zeros(nbytes)
        self.communicator.all_reduce_sync(tensor, self.op)
        dist.barrier(group=self._gloo)
        self.communicator.record_spans()
        self.communicator.all_reduce_sync(tensor, self.op)
        recorded = self.communicator.record_spans(enabled=False)
        everyone = self.communicator.gather(msgspec.json.encode(recorded))
        if self.rank == 0:
            per_rank = [msgspec.json.decode(data, type=list[Span]) for data in everyone]
            origin = min((span.begin for spans in per_rank for span in spans), default=0.0)
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
        name: str,
        nbytes: int,
        plan: Plan,
        own: Plan | None,
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
            "candidate": name,
            "family": own.family if own else {"gloo": "flat_ring"}.get(name),
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
            # Of all cores of rank 0's machine, while samples were taken.
            "machine_cpu_share": busy_share(samples.ticks),
            "lone_seconds": lone,
            "algbw": algbw(nbytes, seconds),
            "busbw": busbw(nbytes, seconds, self.world_size),
            "slow_link_busbw": slow_link_busbw(nbytes, seconds, len(nodes)),
            "wrong": wrong,
            "bound_seconds": plan.bound_seconds,
            "bottleneck": plan.bottleneck,
            "wire_limit_seconds": limit,
            # Inside one node there is no wire whose limit is known.
            "fraction": limit / seconds if len(nodes) > 1 and not marks else None,
            "predicted_seconds": predicted,
            "model_seconds": own.predicted_seconds if own else None,
            "plan_hash": own.hash if own else None,
            "congestion_control": self.communicator.congestion_control,
            "marks": marks,
            "lost": dict(self._lost),
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

    def _interleaved(self, nbytes: int, num_samples: int) -> dict[str, "_Samples"]:
        runs = {}
        for candidate in tuple(self.candidates):
            calls = self._calls_per_sample(candidate, nbytes)
            runs[candidate.name] = Run(nbytes, calls)
        return self._take(runs, num_samples)

    def _lone(self, nbytes: int) -> dict[str, "_Samples"]:
        run = Run(nbytes, calls=1, warmup=0, pause_seconds=_LONE_PAUSE_S)
        return self._take({c.name: run for c in self.candidates}, self.config.iterations)

    def _take(self, runs: dict[str, Run], num_samples: int) -> dict[str, "_Samples"]:
        """Sample every candidate in turn; those that are lost meanwhile have no samples."""
        mine = {name: _Samples(run.calls, [], [], []) for name, run in runs.items()}
        for _ in range(num_samples):
            for candidate in tuple(self.candidates):
                begin = cpu_ticks()
                sample = self._sample(candidate, runs[candidate.name])
                if sample is not None:
                    mine[candidate.name].seconds.append(sample.seconds)
                    mine[candidate.name].cpu_seconds.append(sample.cpu_seconds)
                    mine[candidate.name].ticks.append((begin, cpu_ticks()))
        return {c.name: self._slowest(mine[c.name]) for c in self.candidates}

    def _calls_per_sample(self, candidate: Candidate, nbytes: int) -> int:
        sample = self._sample(candidate, Run(nbytes, calls=1, warmup=self.config.warmup))
        if sample is None:
            return 1
        return min(_MAX_CALLS, max(1, round(_SAMPLE_S / self._reduce_max([sample.seconds])[0])))

    def _sample(self, candidate: Candidate, run: Run) -> Sample | None:
        try:
            return candidate.sample(run)
        except CandidateLostError as error:
            self._drop(candidate, error)
            return None

    def _drop(self, candidate: Candidate, error: CandidateLostError) -> None:
        self.candidates.remove(candidate)
        self._lost[candidate.name] = str(error)
        self._announce("lost", {"candidate": candidate.name, "reason": str(error)})

    def _slowest(self, samples: "_Samples") -> "_Samples":
        total = torch.tensor(samples.cpu_seconds, dtype=torch.float64)
        dist.all_reduce(total, group=self._gloo)
        cpu = (total / self.world_size).tolist()
        return _Samples(samples.calls, self._reduce_max(samples.seconds), cpu, samples.ticks)

    def _reduce_max(self, values: Sequence[float]) -> list[float]:
        most = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._gloo)
        slowest: list[float] = most.tolist()
        return slowest

    def _wrong(self, nbytes: int) -> dict[str, int]:
        counts = {}
        for candidate in tuple(self.candidates) if self.config.check else ():
            try:
                counts[candidate.name] = candidate.wrong(nbytes)
            except CandidateLostError as error:
                self._drop(candidate, error)
        return counts


@dataclass(slots=True)
class _Samples:
    calls: int
    seconds: list[float]
    cpu_seconds: list[float]
    ticks: list[tuple[CpuTicks | None, CpuTicks | None]]


def calibration_sizes(sizes: Sequence[int]) -> list[int]:
    """Return sizes in bytes near those asked for and different from all of them.

    Each decade of sizes gets two points, so that every size lies between measured neighbours or
    within a factor of three of one; nothing larger than 40 MB is timed.
    """
    if not sizes or max(sizes) == 0:
        return []
    wanted = [s for s in sizes if s]
    grid = [base * 10**power for power in range(3, 8) for base in (2, 6)]
    grid = [size - size % 64 for size in grid if size <= _LARGEST_CALIBRATION]
    low, high = min(wanted), max(wanted)
    chosen = [s for s in grid if low / 4 <= s <= max(high * 1.5, low) and s not in wanted]
    while len(chosen) < 2:
        larger, smaller = max([high, *chosen]) * 2 + 64, min([low, *chosen]) // 3
        chosen.append(larger if larger <= _LARGEST_CALIBRATION else smaller - smaller % 64)
    return chosen
