"""Training steps of several DDPs in turns, with what their communication takes alone.

One rank's part of `03_comm_compute_ratio` and `04_bucket_cap`.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments.compute_load_ranks import COMPUTE, HOOK, LEARNING_RATE, PLAIN, over_ranks, rounds
from experiments.training import timed_step
from experiments.workloads.resnet import ImageSet, ResNet, gratings
from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.ddp import Handle, attach
from topo_ar.planning.buckets import trace_buckets
from topo_ar.telemetry.bucket_trace import BucketTrace
from topo_ar.telemetry.records import Record

_ALONE = 3  # samples of communication alone


class StepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to train; equal on all ranks.

    `batches` are images of a rank, `caps` are ``bucket_cap_mb`` in MiB. `candidates` are ``plain
    DDP``, ``hook`` and codecs; each trains with every cap.
    """

    batches: tuple[int, ...] = (2,)
    caps: tuple[float, ...] = (1.0,)
    candidates: tuple[str, ...] = (PLAIN, HOOK)
    width: int = 64
    image_side: int = 16
    warm_up: int = 2
    samples: int = 10
    timeout_s: float = 60.0
    spans: bool = False


@dataclass(slots=True)
class Turn:
    """One DDP with its cap; `seconds` are this rank's."""

    name: str
    cap: float
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    handle: Handle | None
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: ImageSet, *, silent: bool = False) -> float:
        """Train one step and return its seconds. Collective."""
        return timed_step(self.model, self.optimizer, batch.images, batch.labels, silent=silent)[0]


def measure_steps(settings: StepSettings) -> Iterator[Record]:
    """Train all in turns, batch by batch; yield a row for each DDP and one without communication.

    Collective. `seconds` are those of the slowest rank; `forward_seconds` is the part of a step
    without communication that passes before backward, on this rank, and ``buckets`` the last step
    of the hook's bucket trace.
    """
    torch.manual_seed(0)
    module = ResNet(settings.width)
    with ExitStack() as stack:
        with Communicator(measure=True, timeout_s=settings.timeout_s) as communicator:
            topology = communicator.topology
        turns = [
            _turn(module, name, cap, settings, topology, stack)
            for cap in settings.caps
            for name in settings.candidates
        ]
        for batch in settings.batches:
            yield from _rows(turns, batch, settings)


def _turn(
    module: torch.nn.Module,
    name: str,
    cap: float,
    settings: StepSettings,
    topology: object,
    stack: ExitStack,
) -> Turn:
    model = DistributedDataParallel(
        copy.deepcopy(module), bucket_cap_mb=cap, gradient_as_bucket_view=True
    )
    handle = None
    if name != PLAIN:
        handle = stack.enter_context(
            attach(
                model,
                plan="hierarchical",  # "auto" would take turns with the plain path
                topology=topology,  # type: ignore[arg-type]
                compression="none" if name == HOOK else name,
                start_step=0,
                guard_steps=0,
                timeout_s=settings.timeout_s,
            )
        )
    return Turn(name, cap, model, torch.optim.SGD(model.parameters(), LEARNING_RATE), handle)


def _rows(turns: Sequence[Turn], batch: int, settings: StepSettings) -> Iterator[Record]:
    images = gratings(batch, dist.get_rank(), settings.image_side)
    names = [COMPUTE, *(f"{turn.name} {turn.cap}" for turn in turns)]
    by_name = dict(zip(names[1:], turns, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for order in rounds(names, settings.warm_up + settings.samples):
        for name in order:
            silent = name == COMPUTE
            turn = turns[0] if silent else by_name[name]
            seconds[name].append(turn.step(images, silent=silent))
    slowest = over_ranks(list(seconds.values()), dist.ReduceOp.MAX)
    measured = [each[settings.warm_up :] for each in slowest]
    nbytes = sum(p.nbytes for p in turns[0].model.parameters())
    about = {"batch": batch, "gradient_nbytes": nbytes, "world_size": dist.get_world_size()}
    yield {**about, "candidate": COMPUTE, "seconds": measured[0], **_forward(turns[0], images)}
    buckets = {turn.cap: _trace(turn) for turn in turns if turn.handle is not None}
    for turn, each in zip(turns, measured[1:], strict=True):
        trace = buckets.get(turn.cap)
        row = {**about, "candidate": turn.name, "bucket_cap_mib": turn.cap, "seconds": each}
        if trace is not None:
            sizes = [bucket.nbytes for bucket in trace_buckets(trace)]
            row["num_buckets"] = len(sizes)
            row["alone_seconds"] = _alone(turn, sizes)
        if turn.handle is not None and trace is not None:
            row["buckets"] = msgspec.to_builtins(trace.steps[-1].buckets)
            row["sent_nbytes"] = turn.handle.compression.sent_nbytes or None
        if settings.spans and turn.handle is not None:
            row["spans"] = _spans(turn, images)
        yield row


def _trace(turn: Turn) -> BucketTrace:
    assert turn.handle is not None
    return turn.handle.trace()


def _forward(turn: Turn, images: ImageSet) -> Record:
    """Return what forward takes of a step without communication, as the slowest rank has it."""
    samples = []
    for _ in range(_ALONE):
        dist.barrier()
        begin = time.perf_counter()
        turn.model.module(images.images)
        samples.append(time.perf_counter() - begin)
    return {"forward_seconds": over_ranks([samples], dist.ReduceOp.MAX)[0]}


def _alone(turn: Turn, sizes: Sequence[int]) -> list[float]:
    """Return what all buckets take one after the other with nothing else, a few times.

    Those of plain DDP and of a codec by gloo, those of the hook by its plan.
    """
    buffers = [torch.zeros(size // 4) for size in sizes]
    exact = turn.name == HOOK and turn.handle is not None
    samples = []
    for _ in range(_ALONE + 1):
        dist.barrier()
        begin = time.perf_counter()
        for buffer in buffers:
            if exact and turn.handle is not None:
                turn.handle.communicator.all_reduce_sync(buffer)
            else:
                dist.all_reduce(buffer)
        samples.append(time.perf_counter() - begin)
    return over_ranks([samples[1:]], dist.ReduceOp.MAX)[0]


def _spans(turn: Turn, images: ImageSet) -> list[Record]:
    """Return what the first rank was doing in one more step, in seconds from its begin."""
    assert turn.handle is not None
    communicator = turn.handle.communicator
    communicator.record_spans()
    begin = time.monotonic()
    turn.step(images)
    rank = dist.get_rank()
    return [
        {
            "name": f"{span.stage} {span.chunk}",
            "rank": rank,
            "lane": span.what,
            "begin_seconds": span.begin - begin,
            "end_seconds": span.end - begin,
        }
        for span in communicator.record_spans(enabled=False)
    ]
