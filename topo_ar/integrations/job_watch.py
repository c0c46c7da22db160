"""Watches a job for its telemetry: stamps each call and result, and tells who waits for whom.

All ranks stamp with their own clocks. At the end of a window the stamps of its last steps go round
beside the next step's computation, and rank 0 makes a record of them. What all ranks have to do
alike, such as measuring NICs, rank 0 says in its row.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import torch

from topo_ar.errors import ConfigError
from topo_ar.execution.plans import Plans
from topo_ar.integrations.bucket import Bucket
from topo_ar.integrations.observer import Observer
from topo_ar.integrations.path_choice import UNDECIDED, PathChoice
from topo_ar.integrations.path_trial import Path
from topo_ar.integrations.slow_links import SlowLinks
from topo_ar.integrations.step_traffic import (
    flat_seconds,
    nic_rates_said,
    planned_bytes,
    ring_bytes,
)
from topo_ar.integrations.telemetry_files import TelemetryFiles
from topo_ar.integrations.telemetry_options import Telemetry
from topo_ar.integrations.window_exchange import WindowExchange
from topo_ar.planning.plan import Plan
from topo_ar.telemetry.arrivals import Offsets
from topo_ar.telemetry.drift import steps_within
from topo_ar.telemetry.job_windows import JobStart, Window
from topo_ar.telemetry.records import manifest
from topo_ar.telemetry.window_figures import BucketPlan, Stamps, figures, late_ranks

if TYPE_CHECKING:
    from topo_ar.integrations.hook import DDPHook
    from topo_ar.integrations.target_monitor import TargetMonitor

_LEAST_STEPS = 4
_MOST_SAMPLED = 16
# Numbers of one kind that a rank sends in an exchange.
_MOST_STAMPS = 1024
_HEAD = 5
# What telemetry may take of a step; windows are longer where it would take more.
_BUDGET = 0.005

BucketKey = tuple[int, int, torch.dtype, str]


@dataclass(slots=True)
class _Step:
    """A step on this rank; seconds of its own clock. Results are stamped by another thread."""

    number: int
    began: float
    buckets: list[BucketKey] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    dones: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        return bool(self.calls) and len(self.calls) == len(self.dones)

    @property
    def exposed_seconds(self) -> float:
        return max(0.0, self.dones[-1] - self.calls[-1])


@dataclass(slots=True)
class _Own:
    """What telemetry takes itself since a window began."""

    seconds: float = 0.0
    bucket_seconds: float = 0.0
    calls: int = 0


class JobWatch(Observer):
    """The telemetry of one hook.

    Parameters
    ----------
    hook : DDPHook
        Whose steps it watches.
    window_s : float
        About how many seconds make a window.
    files : TelemetryFiles or None
        Where rank 0 writes; None on the other ranks.

    Attributes
    ----------
    clock : callable
        Returns the time in seconds by which this rank stamps.
    last : Window or None
        The last record; on rank 0 alone.
    monitor : TargetMonitor or None
        What holds steps against targets.
    """

    def __init__(self, hook: "DDPHook", window_s: float, files: TelemetryFiles | None) -> None:
        assert hook.communicator is not None
        self.clock: Callable[[], float] = time.monotonic
        self.last: Window | None = None
        self.monitor: TargetMonitor | None = None
        self._hook = hook
        self._communicator = communicator = hook.communicator
        self._window_s = window_s
        self._files = files
        self._step: _Step | None = None
        self._sample: deque[_Step] = deque(maxlen=_MOST_SAMPLED)
        self._seconds: list[float] = []
        self._last_seconds = 0.0
        self._num_windows = 0
        self._least_cost = math.inf
        self._window_steps = _LEAST_STEPS
        self._first_step = 0
        self._exchange: WindowExchange | None = None
        self._exchanged: list[_Step] = []
        self._exchanged_seconds: list[float] = []
        self._own, self._own_before = _Own(), _Own()
        self._sent_before = communicator.nbytes_sent_between
        self._links = SlowLinks(nic_rates_said(communicator), communicator.nodes)
        self._wants_rates = False
        self._bytes: dict[object, tuple[int, int]] = {}
        self._planned_by: Plans | None = None
        self._plans: dict[tuple[int, int, str], Plan] = {}

    def begin(self, step: int) -> None:
        """End the step before; at the end of a window exchange what was stamped. Collective."""
        now = self.clock()
        begun = time.perf_counter()
        probed = 0.0
        if self._step is not None:
            self._end_step(self._step, now)
        if self._exchange is not None:
            probed = self._take_in(self._exchange)
            self._exchange = None
        if self.monitor is not None and self._step is not None and self._step.whole:
            probed += self._hold_against_targets(self.monitor, self._step)
        if len(self._seconds) >= self._window_steps and self._sample:
            self._begin_exchange()
        self._step = _Step(step, now)
        self._own.seconds += time.perf_counter() - begun - probed

    def called(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Stamp a call."""
        begun = time.perf_counter()
        step = self._step
        assert step is not None
        nbytes = tensor.nbytes if tensor.layout is torch.strided else 0
        step.buckets.append((bucket.index(), nbytes, tensor.dtype, tensor.device.type))
        step.calls.append(self.clock())
        self._count(begun)

    def done(self, reduced: torch.Tensor) -> None:
        """Stamp a result; reductions end in the order of their calls."""
        begun = time.perf_counter()
        if self._step is not None:
            self._step.dones.append(self.clock())
        self._count(begun)

    @property
    def step_seconds(self) -> float:
        """What the last step that has ended took on this rank; 0 before there is one."""
        return self._last_seconds

    def close(self) -> None:
        """Close the files."""
        if self._files is not None:
            self._files.close()

    def _count(self, begun: float) -> None:
        own, seconds = self._own, time.perf_counter() - begun
        own.seconds += seconds
        own.bucket_seconds += seconds
        own.calls += 1

    def _end_step(self, step: _Step, now: float) -> None:
        step.seconds = self._last_seconds = now - step.began
        self._seconds.append(step.seconds)
        if not step.whole:
            self._sample.clear()
            return
        if self._sample and self._sample[-1].buckets != step.buckets:
            self._sample.clear()
        self._sample.append(step)

    def _hold_against_targets(self, monitor: "TargetMonitor", step: _Step) -> float:
        """Let the monitor judge; return the seconds that acting took, mostly 0."""
        begun, before = time.perf_counter(), len(monitor.incidents)
        nbytes = sum(bucket[1] for bucket in step.buckets)
        monitor.step_ended(step.number, step.seconds, step.exposed_seconds, nbytes)
        return time.perf_counter() - begun if len(monitor.incidents) > before else 0.0

    def _begin_exchange(self) -> None:
        most = max(1, _MOST_STAMPS // len(self._sample[-1].calls))
        self._exchanged = steps = list(self._sample)[-most:]
        self._exchanged_seconds = self._seconds
        sent = self._communicator.nbytes_sent_between
        own = self._own
        row = [
            own.seconds / len(self._seconds),
            2 * own.bucket_seconds / own.calls if own.calls else 0.0,
            (sent - self._sent_before) / len(self._seconds),
            float(self._next_window_steps()),
            float(self._wants_rates),
        ]
        assert len(row) == _HEAD
        row += [step.seconds for step in steps]
        row += [step.exposed_seconds for step in steps]
        row += [stamp for step in steps for stamp in step.calls]
        row += [stamp for step in steps for stamp in step.dones]
        self._exchange = WindowExchange(self._communicator, row, self.clock)
        self._sent_before, self._own, self._seconds = sent, _Own(), []
        self._sample.clear()

    def _next_window_steps(self) -> int:
        """Return how many steps the next window has: as asked for, or what telemetry may cost."""
        step = median(self._seconds)
        # A window pays for the record of the one before; the first record pays for what stays.
        self._num_windows += 1
        if self._num_windows > 2:
            self._least_cost = min(self._least_cost, self._own.seconds)
        known = self._least_cost < math.inf and step > 0
        affordable = self._least_cost / (_BUDGET * step) if known else 0.0
        return max(steps_within(self._window_s, step, _LEAST_STEPS), math.ceil(affordable))

    def _take_in(self, exchange: WindowExchange) -> float:
        """Read what all ranks said; return the seconds that measuring NICs took, mostly 0."""
        rows = exchange.rows()
        head, steps = rows[:, :_HEAD], self._exchanged
        # Rank 0's figures, so that all ranks do the same whatever rounding does.
        self._window_steps = int(head[0, 3])
        took = 0.0
        if head[0, 4]:
            begun = time.perf_counter()
            rates = self._communicator.node_rates()
            took = time.perf_counter() - begun
            self._links.measured(rates, took)
            self._wants_rates = False
        if self._files is not None:
            numbers = rows[:, _HEAD:].numpy()
            n, b = len(steps), len(steps[-1].calls)
            stamps = Stamps(
                numbers[:, :n],
                numbers[:, n : 2 * n],
                numbers[:, 2 * n : n * (2 + b)].reshape(-1, n, b),
                numbers[:, n * (2 + b) :].reshape(-1, n, b),
            )
            self._record(stamps, exchange.offsets(), head)
        return took

    def _record(self, stamps: Stamps, offsets: Offsets, head: torch.Tensor) -> None:
        assert self._files is not None
        steps, choice = self._exchanged, self._choice
        buckets = tuple(steps[-1].buckets)
        plans = [self._plan_of(bucket, choice.path) for bucket in buckets]
        found = figures(stamps, offsets, plans)
        predicted = [p.predicted_seconds for p in plans if p.predicted_seconds is not None]
        whole = sum(predicted) if len(predicted) == len(plans) else None
        if choice.path != UNDECIDED:
            key = (buckets, choice.path, tuple(plan.plan_hash for plan in plans))
            self._wants_rates = self._links.see(key, found, whole)
        inside, between = self._nbytes(buckets, choice.path)
        own = float(head[:, 0].max())
        self.last = Window(
            unix_seconds=time.time(),
            first_step=self._first_step,
            last_step=steps[-1].number,
            sampled_steps=len(steps),
            path=choice.path,
            reason=choice.reason,
            replans=choice.replans,
            fallbacks=self._communicator.fallbacks,
            compression=self._compression_reason,
            device=buckets[0][3],
            step_seconds=found.step_seconds,
            step_seconds_max=found.step_seconds_max,
            exposed_seconds=found.exposed_seconds,
            nbytes_inside=inside,
            nbytes_between=between,
            nbytes_sent_between=round(float(head[:, 2].sum()))
            if choice.path == str(Path.PLANNED)
            else None,
            ranks=found.ranks,
            buckets=found.buckets,
            steps=tuple((s.number, *row) for s, row in zip(steps, found.steps, strict=True)),
            spans=found.spans,
            causes=(*late_ranks(found), *self._links.causes),
            clock_uncertainty_seconds=found.uncertainty_seconds,
            own_seconds_per_step=own,
            own_share=own / found.step_seconds if found.step_seconds else 0.0,
            own_seconds_per_bucket=float(head[:, 1].max()),
            incidents=len(self.monitor.incidents) if self.monitor is not None else 0,
        )
        self._first_step = steps[-1].number + 1
        self._files.write(self.last)

    @property
    def _choice(self) -> PathChoice:
        assert self._hook.path is not None
        return self._hook.path.choice

    @property
    def _compression_reason(self) -> str:
        compression = self._hook.compression
        if compression is None or compression.stays_exact:
            return ""
        return compression.reason or "gradients are compressed"

    def _plan_of(self, bucket: BucketKey, path: str) -> BucketPlan:
        index, nbytes, dtype, device = bucket
        name = str(dtype).removeprefix("torch.")
        if not nbytes:
            return BucketPlan(index, 0, name, "sparse", "", None)
        plan = self._plan(nbytes, dtype.to_real().itemsize, device)
        family: str = plan.family
        seconds: float | None = plan.predicted_seconds
        if path == str(Path.PLAIN):
            family, seconds = str(Path.PLAIN), flat_seconds(plan)
        known = path != UNDECIDED and not self._compression_reason
        return BucketPlan(index, nbytes, name, family, plan.hash, seconds if known else None)

    def _plan(self, nbytes: int, itemsize: int, device: str) -> Plan:
        """Return a plan, which takes milliseconds to make anew."""
        planning, _ = self._communicator.planning
        if planning is not self._planned_by:
            self._planned_by = planning
            self._plans.clear()
        key = (nbytes, itemsize, device)
        if key not in self._plans:
            self._plans[key] = self._communicator.plan_for(nbytes, itemsize, device)
        return self._plans[key]

    def _nbytes(self, buckets: tuple[BucketKey, ...], path: str) -> tuple[int, int]:
        """Return the bytes of a step by class of link, over all ranks."""
        counted = [self._bucket_bytes(bucket, path) for bucket in buckets if bucket[1]]
        return sum(inside for inside, _ in counted), sum(between for _, between in counted)

    def _bucket_bytes(self, bucket: BucketKey, path: str) -> tuple[int, int]:
        _, nbytes, dtype, device = bucket
        if path == str(Path.PLAIN):
            return ring_bytes(self._communicator.nodes, nbytes)
        itemsize = dtype.to_real().itemsize
        plan = self._plan(nbytes, itemsize, device)
        key = (plan.hash, itemsize)
        if key not in self._bytes:
            self._bytes[key] = planned_bytes(plan, itemsize)
        return self._bytes[key]


def watch_job(hook: "DDPHook", options: Telemetry) -> JobWatch:
    """Return what watches the steps of `hook` from the next on. Collective.

    Raises
    ------
    ConfigError
        On all ranks, if rank 0 cannot write what is asked for.
    """
    communicator, files, trouble = hook.communicator, None, ""
    assert communicator is not None
    if communicator.rank == 0:
        emulation = os.environ.get("TOPO_AR_EMULATION")
        try:
            files = TelemetryFiles(options, JobStart(communicator.nodes, manifest(emulation)))
        except ConfigError as error:
            trouble = str(error)
    trouble = communicator.gather(trouble.encode())[0].decode()
    if trouble:
        raise ConfigError(trouble)
    watch = JobWatch(hook, options.window_s, files)
    hook.observers.members.append(watch)
    return watch
