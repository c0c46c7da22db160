"""One rank's part of `compute_load`: all-reduces beside matrix products, and training in turns."""

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments.training import timed_step
from experiments.workloads.resnet import ImageSet, gratings, resnet18
from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.ddp import attach
from topo_ar.telemetry.records import Record

COMPUTE, GLOO, PLAN, ZERO_COPY = "compute", "gloo", "plan", "plan:zero-copy"
PLAIN, HOOK, HOOK_ZERO_COPY, HOOK_FLAT = "plain DDP", "hook", "hook:zero-copy", "hook:flat"
LEARNING_RATE = 0.01


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does; equal on all ranks. Widths are those of ResNet-18, `batch` is per rank."""

    samples: int = 20
    warm_up: int = 3
    nbytes: int = 25_000_000
    calls: int = 2
    side: int = 384
    idle_seconds: float = 0.5
    width: int = 64
    batch: int = 1
    image_side: int = 16
    timeout_s: float = 120.0
    auto_width: int = 32
    auto_trials: int = 2


class Load:
    """A thread that multiplies square matrices and counts them, until `stop`."""

    def __init__(self, side: int) -> None:
        self.num_products = 0
        self._factors = torch.rand(2, side, side).unbind()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        product = torch.empty_like(self._factors[0])
        while not self._stopped:
            torch.mm(*self._factors, out=product)
            self.num_products += 1

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._thread.join()


@dataclass(slots=True)
class Samples:
    """What one candidate took on this rank: seconds a call, and products a second meanwhile."""

    seconds: list[float] = field(default_factory=list)
    products_per_second: list[float] = field(default_factory=list)


def measure_products(settings: Settings) -> list[Record]:
    """All-reduce while every rank multiplies matrices; return a row a candidate. Collective.

    `seconds` are those of the slowest rank, products those of all ranks.
    """
    private = torch.zeros(settings.nbytes // 4)
    shared = torch.zeros_like(private)
    with Communicator(measure=True, timeout_s=settings.timeout_s) as communicator:
        communicator.share(shared).wait()
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            COMPUTE: (1, lambda: time.sleep(settings.idle_seconds)),
            GLOO: (settings.calls, lambda: dist.all_reduce(private)),
            PLAN: (settings.calls, lambda: communicator.all_reduce_sync(private)),
            ZERO_COPY: (settings.calls, lambda: communicator.all_reduce_sync(shared)),
        }
        taken = {name: Samples() for name in calls}
        load = Load(settings.side)
        for turns in rounds(list(calls), settings.samples):
            for name in turns:
                _sample(load, *calls[name], taken[name])
        load.stop()
    seconds = over_ranks([each.seconds for each in taken.values()], dist.ReduceOp.MAX)
    rates = over_ranks([each.products_per_second for each in taken.values()], dist.ReduceOp.SUM)
    context = {
        "nbytes": settings.nbytes,
        "side": settings.side,
        "cores": min(len(os.sched_getaffinity(0)), dist.get_world_size()),
    }
    return [
        {"candidate": name, "seconds": seconds[i], "products_per_second": rates[i], **context}
        for i, name in enumerate(taken)
    ]


def _sample(load: Load, num_calls: int, call: Callable[[], object], samples: Samples) -> None:
    dist.barrier()
    call()  # uses up what the links have saved while they were idle
    products, begin = load.num_products, time.perf_counter()
    for _ in range(num_calls):
        call()
    seconds = time.perf_counter() - begin
    samples.seconds.append(seconds / num_calls)
    samples.products_per_second.append((load.num_products - products) / seconds)


@dataclass(frozen=True, slots=True)
class Trainee:
    """A model in training."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer

    def step(self, batch: ImageSet, *, silent: bool = False) -> float:
        """Train one step and return its seconds; all ranks begin together. Collective."""
        return timed_step(self.model, self.optimizer, batch.images, batch.labels, silent=silent)[0]


def measure_steps(settings: Settings) -> list[Record]:
    """Train all candidates in turns, one step each; return a row a candidate. Collective.

    `seconds` are those of the slowest rank.
    """
    batch = gratings(settings.batch, dist.get_rank(), settings.image_side)
    with ExitStack() as stack:
        trainees = _trainees(settings, stack)
        seconds: dict[str, list[float]] = {name: [] for name in (*trainees, COMPUTE)}
        for turns in rounds(list(seconds), settings.warm_up + settings.samples):
            for name in turns:
                silent = name == COMPUTE
                trainee = trainees[PLAIN if silent else name]
                seconds[name].append(trainee.step(batch, silent=silent))
    slowest = over_ranks(list(seconds.values()), dist.ReduceOp.MAX)
    nbytes = sum(p.nbytes for p in trainees[PLAIN].model.parameters())
    return [
        {"candidate": name, "seconds": each[settings.warm_up :], "gradient_nbytes": nbytes}
        for name, each in zip(seconds, slowest, strict=True)
    ]


def _trainees(settings: Settings, stack: ExitStack) -> dict[str, Trainee]:
    """Return equal models whose gradients are averaged in different ways. Collective."""
    torch.manual_seed(0)
    module = resnet18(width=settings.width)
    # "auto" would take turns with the plain path.
    plans = {PLAIN: None, HOOK: "hierarchical", HOOK_ZERO_COPY: "hierarchical", HOOK_FLAT: "flat"}
    trainees = {}
    for name, plan in plans.items():
        model = DistributedDataParallel(copy.deepcopy(module), gradient_as_bucket_view=True)
        if plan is not None:
            zero_copy = name == HOOK_ZERO_COPY
            stack.enter_context(
                attach(model, plan=plan, zero_copy=zero_copy, timeout_s=settings.timeout_s)
            )
        trainees[name] = Trainee(model, torch.optim.SGD(model.parameters(), LEARNING_RATE))
    return trainees


def rounds(names: Sequence[str], num_rounds: int) -> Iterator[Sequence[str]]:
    """Yield the candidates in the order of each round: going first is no candidate's privilege."""
    for number in range(num_rounds):
        first = number % len(names)
        yield [*names[first:], *names[:first]]


def over_ranks(values: list[list[float]], op: "dist.ReduceOp.RedOpType") -> list[list[float]]:
    """Return figures, equally many of each, reduced over the ranks. Collective."""
    reduced = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(reduced, op)
    result: list[list[float]] = reduced.tolist()
    return result
