"""What runs in the ranks of ``05_compression.py --ddp``: ResNet-18 by all ways in turns."""

import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from experiments.training import timed_step
from experiments.workloads.resnet import ImageSet, gratings, resnet18
from topo_ar.compression.protocol import Group, Layout, Reduced
from topo_ar.compression.quantize import Quantized
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.torch_private import GradBucket
from topo_ar.integrations.compression_choice import CompressionSettings
from topo_ar.integrations.ddp import Handle, make_handle
from topo_ar.planning.codecs import Codec, parse_codec
from topo_ar.planning.policy import parse_policy
from topo_ar.telemetry.records import Record

SETTINGS_ENV = "COMPRESSION_DDP_SETTINGS"
Hook = Callable[[GradBucket], torch.futures.Future[torch.Tensor]]
Announce = Callable[[str, Record], None]
PLAIN, COMPUTE, EXACT, AUTO = "plain DDP", "compute", "none", "auto"
TORCH_FP16, TORCH_POWERSGD = "torch fp16", "torch PowerSGD"
_POWERSGD_AFTER = 2
# The same codec without a chunk being encoded while another is on the wire.
UNCHUNKED = "int8 in one chunk"
_INT8 = Codec("int8")
_ONE_BUCKET_MIB = 1024
# Those that send less than this part of the bytes, and auto, are near the best and need more steps.
_NEAR_RATIO = 0.1
_MATRIX = (512, 512)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to train; equal on all ranks.

    Attributes
    ----------
    optimizer, policy : str
        The policy admits the codecs that are compared.
    warm_up, rounds : int
        Rounds of all candidates that are not counted, in each piece; those that are, in all.
    visits : int
        Steps in a round of those that are near the best; all others have one.
    batch, size, width : int
        Images of a rank, the side of one, and channels of the first stage.
    piece_seconds : float
        No further round begins in this job when it would end later.
    """

    optimizer: str = "sgd"
    policy: str = "lossy:1"
    warm_up: int = 1
    rounds: int = 10
    visits: int = 3
    batch: int = 1
    size: int = 8
    width: int = 64
    piece_seconds: float = 450.0
    timeout_s: float = 120.0

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs that the policy admits with the optimizer."""
        return tuple(map(str, parse_policy(self.policy, self.optimizer).allowed))

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names of what is compared."""
        unchunked = (UNCHUNKED,) if str(_INT8) in self.codecs else ()
        ours = (EXACT, *self.codecs, *unchunked, AUTO)
        return (PLAIN, *ours, TORCH_FP16, TORCH_POWERSGD)

    def compression(self, name: str) -> CompressionSettings:
        """Return what a candidate asks for."""
        return CompressionSettings(
            compression=str(_INT8) if name == UNCHUNKED else name,
            policy=self.policy,
            optimizer=self.optimizer,
            start_step=0,
            guard_steps=0,
        )


@dataclass(slots=True)
class Trainee:
    """A model in training and what takes its gradients, which its candidates change from step on.

    Candidates share the model, its buckets and its optimizer, for a model each would be 15 GiB.
    """

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    hook: Hook | None = None

    def take(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Let the candidate whose turn it is average a bucket; the hook of the model."""
        assert self.hook is not None
        return self.hook(bucket)

    def step(self, batch: ImageSet, *, silent: bool = False) -> float:
        """Train one step and return its seconds; all ranks begin together. Collective."""
        return timed_step(self.model, self.optimizer, batch.images, batch.labels, silent=silent)[0]


@dataclass(slots=True)
class Candidate:
    """One of those that are compared; `handle` is that of topo_ar, None for torch's own ways."""

    name: str
    trainee: Trainee
    hook: Hook | None = None
    handle: Handle | None = None
    silent: bool = False
    seconds: list[float] = field(default_factory=list)
    facts: Record = field(default_factory=dict)

    @property
    def is_near(self) -> bool:
        """Whether it may be the fastest where the wire is slow."""
        if self.handle is None or self.name in (AUTO, UNCHUNKED):
            return self.name == AUTO
        return parse_codec(self.name).ratio([_MATRIX], 2) < _NEAR_RATIO

    def step(self, batch: ImageSet) -> None:
        """Train one step. Collective."""
        self.trainee.hook = self.hook
        self.seconds.append(self.trainee.step(batch, silent=self.silent))


def run_rank(announce: Announce) -> None:
    """Do one rank's part under torchrun's environment; rank 0 announces rounds and rows."""
    settings = msgspec.json.decode(os.environ[SETTINGS_ENV], type=Settings)
    torch.set_num_threads(1)
    # The hooks of a model take turns; those that wait would warn that nobody calls them.
    logging.getLogger("topo_ar").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    try:
        for row in train(settings, announce):
            if dist.get_rank() == 0:
                announce("row", row)
    finally:
        dist.destroy_process_group()


def train(settings: Settings, announce: Announce = lambda name, data: None) -> list[Record]:
    """Train all candidates in turns and return a row for each. Collective.

    All ranks stop together when the next round would be late; rows may then hold fewer rounds.
    ``step_seconds`` has the steps of each round, ``seconds`` their median.
    """
    begun = time.monotonic()
    torch.manual_seed(0)
    module = resnet18(width=settings.width)
    num_rounds = settings.warm_up + settings.rounds
    images = gratings(settings.batch * num_rounds, dist.get_rank(), settings.size)
    with ExitStack() as stack:
        candidates = _candidates(module, settings, stack)
        turns = list(candidates)
        _prepare(candidates, images.take(range(settings.batch)), settings)
        for number in range(num_rounds):
            round_begun = time.monotonic()
            batch = images.take(range(number * settings.batch, (number + 1) * settings.batch))
            for visit in range(settings.visits):
                for candidate in turns:
                    if visit == 0 or candidate.is_near:
                        candidate.step(batch)
            turns.append(turns.pop(0))  # going first is no candidate's privilege
            now = time.monotonic()
            if dist.get_rank() == 0:
                announce("round", {"done": number + 1, "of": num_rounds, "took": now - round_begun})
            late = 2 * now - round_begun - begun > settings.piece_seconds
            if number >= settings.warm_up and _agreed(late):
                break
        return [_row(candidate, settings) for candidate in candidates]


def _row(candidate: Candidate, settings: Settings) -> Record:
    """Return what is known of a candidate, seconds of the slowest rank. Collective."""
    seconds = torch.tensor(candidate.seconds, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    visits = settings.visits if candidate.is_near else 1
    rounds = seconds.view(-1, visits)[settings.warm_up :].tolist()
    timed = {"seconds": [median(each) for each in rounds], "step_seconds": rounds}
    return {"candidate": candidate.name, **timed, **candidate.facts, **_facts(candidate)}


def _agreed(late: bool) -> bool:
    """Return what rank 0 thinks. Collective."""
    said = torch.tensor([float(late)])
    dist.broadcast(said, 0)
    return bool(said.item())


def _candidates(module: nn.Module, settings: Settings, stack: ExitStack) -> list[Candidate]:
    """Return all candidates in the order of their names. Collective."""
    world = dist.group.WORLD
    assert world is not None
    plain, shared = _trainee(module, settings), _trainee(module, settings)
    # Torch's PowerSGD hook hangs on gloo with more than one bucket.
    single = _trainee(module, settings, _ONE_BUCKET_MIB)
    state = powerSGD_hook.PowerSGDState(
        world, matrix_approximation_rank=4, start_powerSGD_iter=_POWERSGD_AFTER
    )
    single.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    shared.model.register_comm_hook(None, shared.take)
    found = [Candidate(COMPUTE, plain, silent=True)]
    topology = None
    for name in settings.candidates:
        if name in (PLAIN, TORCH_POWERSGD):
            found.append(Candidate(name, plain if name == PLAIN else single))
        elif name == TORCH_FP16:
            half = partial(default_hooks.fp16_compress_hook, world)
            found.append(Candidate(name, shared, half))
        else:
            communicator = stack.enter_context(
                Communicator(
                    topology=topology, measure=topology is None, timeout_s=settings.timeout_s
                )
            )
            topology = communicator.topology
            # Exact steps are held to the plan, where "auto" would try plain all-reduce in between.
            handle = make_handle(
                shared.model, communicator, "hierarchical", settings.compression(name)
            )
            if name == UNCHUNKED:
                _in_one_chunk(handle)
            found.append(Candidate(name, shared, partial(handle.hook.hook, None), handle))
    return found


class _OneChunk(Quantized):
    """Encodes a whole shard before any of it is sent."""

    def reduce(
        self, shard: torch.Tensor, layout: Layout, rail: Group, node: Group, step: int
    ) -> Reduced:
        """Add up the shards of the rail; see `Compressor.reduce`."""
        return super().reduce(shard, layout, _Unpipelined(rail), node, step)


class _Unpipelined:
    """A group without operations that begin now and end later."""

    def __init__(self, group: Group) -> None:
        self.index, self.size = group.index, group.size
        self.all_reduce, self.all_gather = group.all_reduce, group.all_gather
        self.all_to_all = group.all_to_all


def _in_one_chunk(handle: Handle) -> None:
    compression = handle.hook.compression
    assert compression is not None
    compression.change(_INT8, lambda name: _INT8, _OneChunk(_INT8))


def _prepare(candidates: Sequence[Candidate], batch: ImageSet, settings: Settings) -> None:
    """Bring torch's PowerSGD past its first steps, and let ``auto`` choose by steps of its own."""
    by_name = {candidate.name: candidate for candidate in candidates}
    hooked, auto = by_name[TORCH_POWERSGD], by_name[AUTO]
    for _ in range(_POWERSGD_AFTER):
        hooked.step(batch)
    hooked.seconds.clear()
    assert auto.handle is not None
    compression = auto.handle.hook.compression
    assert compression is not None
    chooser = compression.auto
    while chooser is not None and not compression.why_not and not chooser.done:
        auto.step(batch)
    auto.facts = {"choosing_steps": len(auto.seconds)}
    auto.seconds.clear()
    if dist.get_rank() == 0:
        plan = auto.handle.advice(settings.policy, settings.optimizer, keep_cap=True)
        auto.facts["plan"] = msgspec.to_builtins(plan)


def _trainee(module: nn.Module, settings: Settings, cap_mib: int | None = None) -> Trainee:
    # All ranks make the same weights from the same seed, and need not send them.
    model = DistributedDataParallel(
        copy.deepcopy(module),
        bucket_cap_mb=cap_mib,
        gradient_as_bucket_view=True,
        init_sync=False,
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if settings.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    return Trainee(model, optimizer)


def _facts(candidate: Candidate) -> Record:
    if candidate.handle is None:
        return {}
    found = candidate.handle.compression
    calls = candidate.handle.trace().steps[-1].buckets
    return {
        "reason": found.reason,
        "sent_nbytes": found.sent_nbytes,
        "dense_nbytes": found.dense_nbytes,
        "codecs": sorted({codec for bucket in found.buckets for codec in bucket.codecs}),
        "num_buckets": len(calls),
    }
