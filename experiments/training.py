"""Trainings of the same model side by side, step by step, in one job.

What differs between two candidates is then the averaging of gradients, and not the machine's mood.
"""

import copy
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from experiments.workloads.resnet import ImageSet
from topo_ar.integrations.ddp import Handle, attach
from topo_ar.topology.model import Topology

Announce = Callable[[str, dict[str, Any]], None]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to train; equal on all ranks. `batch` is per rank, `bucket_cap_mb` in MiB."""

    epochs: int = 3
    num_images: int = 1024
    batch: int = 8
    width: int = 32
    lr: float = 0.01
    momentum: float = 0.9
    bucket_cap_mb: float = 0.25
    double_steps: int = 6
    plan: str = "hierarchical"
    seed: int = 0
    timeout_s: float = 60.0


def timed_step(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    silent: bool = False,
) -> tuple[float, torch.Tensor]:
    """Train one step on images and return its seconds and loss, as `timed`. Collective."""
    return timed(
        model,
        [optimizer],
        lambda: functional.cross_entropy(model(images), labels),
        silent=silent,
    )


def timed(
    model: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[], torch.Tensor],
    *,
    silent: bool = False,
    together: bool = True,
) -> tuple[float, torch.Tensor]:
    """Train one step and return its seconds and loss. Collective.

    `loss_of` runs forward. A `silent` step does not communicate. All ranks begin `together`.
    """
    silence = model.no_sync() if silent else nullcontext()
    if together:
        dist.barrier()
    begin = time.perf_counter()
    for optimizer in optimizers:
        optimizer.zero_grad()
    with silence:
        loss = loss_of()
        torch.autograd.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
    return time.perf_counter() - begin, loss


@dataclass(slots=True)
class Candidate:
    """One model in training; `shard` is the part of every batch that this rank takes.

    The one called ``compute`` never communicates. `handle` is that of `topo_ar.attach`, None for
    plain DDP; `seconds` and `losses` hold a value for each step.
    """

    name: str
    model: DistributedDataParallel
    optimizer: torch.optim.SGD
    shard: int
    handle: Handle | None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, batch: ImageSet) -> None:
        """Train on this rank's shard of `batch`; all ranks begin together. Collective."""
        shard = batch.take(torch.arange(len(batch)).chunk(dist.get_world_size())[self.shard])
        images = shard.images.to(next(self.model.parameters()).dtype)
        seconds, loss = timed_step(
            self.model, self.optimizer, images, shard.labels, silent=self.name == "compute"
        )
        self.seconds.append(seconds)
        self.losses.append(loss.item())

    def weights(self) -> torch.Tensor:
        """Return all parameters as one vector in double precision."""
        return torch.cat([p.detach().double().flatten() for p in self.model.parameters()])

    def num_states(self) -> int:
        """Return how many different weights and optimizer states the ranks hold. Collective."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
            digest.update(self.optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, digest.hexdigest())
        return len(set(digests))


def make_candidate(
    name: str,
    module: nn.Module,
    settings: Settings,
    topology: Topology,
    stack: ExitStack,
    shard: int | None = None,
) -> Candidate:
    """Return a copy of `module` in a DDP, with the hook if it is called ``hook``. Collective.

    The hook lives as long as `stack`. `shard` is the rank itself when left out.
    """
    model = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=settings.bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, settings.momentum)
    handle = None
    if name == "hook":
        handle = stack.enter_context(
            attach(model, plan=settings.plan, topology=topology, timeout_s=settings.timeout_s)
        )
    return Candidate(name, model, optimizer, dist.get_rank() if shard is None else shard, handle)


def report_steps(candidates: Sequence[Candidate], epoch: int, announce: Announce) -> None:
    """Announce a ``step`` for each step since the last report. Collective.

    Seconds are those of the slowest rank, losses the mean of all ranks.
    """
    seconds = torch.tensor([candidate.seconds for candidate in candidates], dtype=torch.float64)
    losses = torch.tensor([candidate.losses for candidate in candidates], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    for step in range(seconds.shape[1]):
        row = {
            candidate.name: {"seconds": float(seconds[i, step]), "loss": float(losses[i, step])}
            for i, candidate in enumerate(candidates)
        }
        announce("step", {"epoch": epoch, "candidates": row})
    for candidate in candidates:
        candidate.seconds.clear()
        candidate.losses.clear()


def evaluate(
    candidates: Sequence[Candidate], held_out: ImageSet, epoch: int, announce: Announce
) -> dict[str, float]:
    """Return each candidate's loss on images never trained on. Collective.

    Announces an ``evaluation`` for each, which has the accuracy as well.
    """
    mine = held_out.take(torch.arange(dist.get_rank(), len(held_out), dist.get_world_size()))
    losses = {}
    for candidate in candidates:
        with torch.no_grad():
            logits = candidate.model.module(mine.images)
        loss = functional.cross_entropy(logits, mine.labels, reduction="sum")
        right = (logits.argmax(1) == mine.labels).sum()
        totals = torch.stack([loss, right]).double()
        dist.all_reduce(totals)
        mean_loss, accuracy = (totals / len(held_out)).tolist()
        losses[candidate.name] = mean_loss
        data = {"epoch": epoch, "candidate": candidate.name, "loss": mean_loss}
        announce("evaluation", {**data, "accuracy": accuracy})
    return losses
