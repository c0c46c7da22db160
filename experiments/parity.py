"""One rank's part of `02_ddp_parity`: what is to hold of the hook against plain DDP."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from experiments.training import (
    Announce,
    Candidate,
    Settings,
    evaluate,
    make_candidate,
    report_steps,
)
from experiments.workloads.resnet import ResNet, gratings, shuffled_batches
from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.ddp import Handle
from topo_ar.planning.plan import Family
from topo_ar.telemetry.bucket_trace import BucketCall
from topo_ar.topology.model import Topology

_HELD_OUT = 256
_INTEGER_STEPS = 3
_LARGEST_FACTOR = 1000


class Oracle(msgspec.Struct, frozen=True):
    """A figure that must not exceed its limit."""

    name: str
    value: float
    limit: float
    meaning: str

    @property
    def passed(self) -> bool:
        """Whether the limit holds."""
        return self.value <= self.limit


def run(settings: Settings, topology: Topology | None, announce: Announce) -> list[Oracle]:
    """Do all of it on this rank and return the oracles. Collective over the default group.

    Events are those of `report_steps` and `evaluate`, ``bucket`` (a call of the hook in the last
    step) and ``oracle``; all ranks announce them with equal data, but for a bucket's times.

    Parameters
    ----------
    settings : Settings
        What to train.
    topology : Topology, optional
        As for `Communicator`; probed and measured when left out.
    announce : callable
        Called with the name of each event and its data.
    """
    if topology is None:
        with Communicator(measure=True, timeout_s=settings.timeout_s) as communicator:
            topology = communicator.topology
    oracles = []
    for oracle in (
        *train(settings, topology, announce),
        double_precision(settings, topology),
        integer_gradients(settings, topology),
    ):
        oracles.append(oracle)
        announce("oracle", {**msgspec.to_builtins(oracle), "passed": oracle.passed})
    return oracles


def train(settings: Settings, topology: Topology, announce: Announce) -> list[Oracle]:
    """Train by the hook and by plain DDP, and return what is to hold of them.

    Two more train alongside: ``permuted`` is plain DDP whose ranks take each other's shards, and
    ``compute`` never communicates.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(world_size, generator=torch.Generator().manual_seed(settings.seed))
    shards = {"hook": rank, "plain": rank, "compute": rank, "permuted": int(order[rank])}
    images = gratings(settings.num_images, settings.seed)
    held_out = gratings(_HELD_OUT, settings.seed + 1)
    module = _module(settings, torch.float32)
    with ExitStack() as stack:
        hook, plain, compute, permuted = (
            make_candidate(name, module, settings, topology, stack, shard)
            for name, shard in shards.items()
        )
        before = after = evaluate((hook, plain), held_out, 0, announce)
        turns = [hook, plain, compute, permuted]
        for epoch in range(settings.epochs):
            seed = settings.seed + epoch
            for numbers in shuffled_batches(len(images), settings.batch * world_size, seed):
                batch = images.take(numbers)
                for candidate in turns:
                    candidate.step(batch)
                turns.append(turns.pop(0))  # going first is no candidate's privilege
            report_steps((hook, plain, compute), epoch, announce)
            after = evaluate((hook, plain), held_out, epoch + 1, announce)
        assert hook.handle is not None
        buckets = hook.handle.trace().steps[-1].buckets
        for bucket in buckets:
            announce("bucket", msgspec.to_builtins(bucket))
        num_plain = _num_plain(hook.handle, buckets)
        same = [_same_states(candidate) for candidate in (hook, plain)]
    distance = _over_ranks(_distance(hook, plain))
    by_order = _over_ranks(_distance(permuted, plain))
    return [
        Oracle("plain_path", num_plain, 0, "buckets that did not go by a hierarchical plan"),
        *same,
        Oracle(
            "rank_order",
            distance,
            2 * by_order,
            "distance of the weights from plain DDP's, "
            "against twice the distance of plain DDP in another rank order",
        ),
        *(
            Oracle(
                f"learns_{name}",
                after[name],
                before[name] / 2,
                f"held-out loss of {name}, against half of that before training",
            )
            for name in ("hook", "plain")
        ),
    ]


def double_precision(settings: Settings, topology: Topology) -> Oracle:
    """Train by the hook and by plain DDP in float64 for some steps and compare the weights."""
    world_size = dist.get_world_size()
    images = gratings(settings.double_steps * world_size, settings.seed)
    module = _module(settings, torch.float64)
    with ExitStack() as stack:
        hook, plain = (
            make_candidate(name, module, settings, topology, stack) for name in ("hook", "plain")
        )
        for numbers in shuffled_batches(len(images), world_size, settings.seed):
            for candidate in (hook, plain):
                candidate.step(images.take(numbers))
    difference = float((hook.weights() - plain.weights()).abs().max())
    meaning = f"largest difference of a weight from plain DDP's, {settings.double_steps} steps"
    return Oracle("double_precision", _over_ranks(difference), 1e-10, meaning)


class _Integers(nn.Module):
    """A model whose parameters' gradients are the factors that it is called with."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.module.parameters(), factors, strict=True)
        return torch.stack([(parameter * factor).sum() for parameter, factor in pairs]).sum()


def integer_gradients(settings: Settings, topology: Topology) -> Oracle:
    """Average whole numbers, which no order of summation rounds, and count what is not exact.

    They are multiples of the number of ranks, so that dividing by it rounds nothing either.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = _Integers(_module(settings, torch.float32))
    wrong = 0
    with ExitStack() as stack:
        hook, plain = (
            make_candidate(name, module, settings, topology, stack).model
            for name in ("hook", "plain")
        )
        for step in range(_INTEGER_STEPS):
            factors = [_factors(module, 1000 * step + peer) for peer in range(world_size)]
            for model in (hook, plain):
                model.zero_grad()
                model(factors[rank]).backward()
            exact = [torch.stack(parts).mean(0) for parts in zip(*factors, strict=True)]
            for one, other, right in zip(_gradients(hook), _gradients(plain), exact, strict=True):
                wrong += int(((one != other) | (one != right)).sum())
    meaning = f"elements of integer gradients that differ from plain DDP's, {_INTEGER_STEPS} steps"
    return Oracle("integer_gradients", _over_ranks(wrong), 0, meaning)


def _factors(module: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low, high = -_LARGEST_FACTOR, _LARGEST_FACTOR + 1
    return [
        torch.randint(low, high, p.shape, generator=generator).float() * dist.get_world_size()
        for p in module.parameters()
    ]


def _gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    return (p.grad for p in model.parameters() if p.grad is not None)


def _module(settings: Settings, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(settings.seed)
    return ResNet(settings.width).to(dtype)


def _same_states(candidate: Candidate) -> Oracle:
    meaning = f"different weights and optimizer states that the ranks of {candidate.name} hold"
    return Oracle(f"states_{candidate.name}", candidate.num_states(), 1, meaning)


def _distance(candidate: Candidate, plain: Candidate) -> float:
    """Return how far the weights are from plain DDP's, relative to their length."""
    weights = plain.weights()
    return float((candidate.weights() - weights).norm() / weights.norm())


def _num_plain(handle: Handle, buckets: Sequence[BucketCall]) -> int:
    """Count the buckets that torch.distributed reduced instead of the hook's engine."""
    families = [
        handle.communicator.plan_for(bucket.numel * 4, itemsize=4).family for bucket in buckets
    ]
    return families.count(Family.FLAT_RING)


def _over_ranks(value: float) -> float:
    """Return the largest value of any rank. Collective."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
