"""Trainings of a workload to its target, one for each way to average gradients, step by step.

In turns, because what differs is then the averaging and not the machine's mood; each candidate has
a clock of its own, the seconds of the slowest rank in its steps. After each epoch all of it is in a
checkpoint, from which an interrupted job goes on bit for bit.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments.training import timed
from experiments.workloads.catalogue import load
from experiments.workloads.workload import Place, Workload, generator_of
from topo_ar.integrations.ddp import Handle, attach
from topo_ar.telemetry.metrics import time_to_accuracy
from topo_ar.telemetry.records import Record

PLAIN, HOOK, FLAT, AUTO, COMPUTE = "plain DDP", "hook", "hook:flat", "hook:auto", "compute"
_WARM_UP = 0.1
_LAST = 3


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One job: a workload by name, a seed, and the candidates that train in turns.

    `candidates` are ``plain DDP``, ``hook``, ``hook:flat``, ``hook:auto``, or a codec such as
    ``int8``. `epochs` and `steps` of an epoch are the workload's own when left out. `checkpoint` is
    a file that all ranks see; `stop_after` ends the job after so many epochs, as if it had been
    interrupted. With `each_step` there is a row ``step`` for each, and at last ``weights``;
    no barrier comes before them.
    """

    workload: str
    seed: int = 0
    candidates: tuple[str, ...] = (PLAIN, HOOK)
    epochs: int | None = None
    steps: int | None = None
    bucket_cap_mb: float = 0.5
    timeout_s: float = 60.0
    checkpoint: str | None = None
    stop_after: int | None = None
    each_step: bool = False


@dataclass(slots=True)
class Trainee:
    """One candidate in training: its clock, its evaluations and the seconds of its steps.

    `seconds` are this rank's until `Trainee.pool`, and then those of the slowest.
    """

    name: str
    model: DistributedDataParallel
    optimizers: Sequence[torch.optim.Optimizer]
    handle: Handle | None
    fresh: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)

    def step(self, workload: Workload, settings: RunSettings, at: "At", place: Place) -> None:
        """Train one step. Collective."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = workload.rate * one_cycle(at.done, at.total)
        chosen = workload.indices(at.epoch, at.step, settings.seed, place)
        generator = generator_of(at.epoch, at.step, settings.seed, place.rank)
        seconds, _ = timed(
            self.model,
            self.optimizers,
            lambda: workload.loss(self.model, chosen, generator),
            together=not settings.each_step,
        )
        self.fresh.append(seconds)

    def evaluate(self, workload: Workload, epoch: int) -> Record:
        """Evaluate after an epoch; the new entry of `evaluations`. Collective."""
        self.evaluations.append(
            {
                "epoch": epoch,
                "step": len(self.seconds),
                "seconds": sum(self.seconds),
                "quality": workload.evaluate(self.model.module),
            }
        )
        return self.evaluations[-1]

    def state(self) -> dict[str, Any]:
        """Return what `take` goes on from, the same on all ranks. Collective."""
        return {
            "model": self.model.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "handle": None if self.handle is None else self.handle.state_dict(exact=True),
            "seconds": self.seconds,
            "evaluations": self.evaluations,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.module.load_state_dict(state["model"])
        for optimizer, each in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        if self.handle is not None:
            self.handle.load_state_dict(state["handle"])
        self.seconds, self.evaluations = state["seconds"], state["evaluations"]


@dataclass(frozen=True, slots=True)
class At:
    """Where in a training a step is: of `total` steps `done` are over."""

    epoch: int
    step: int
    done: int
    total: int


def one_cycle(done: int, total: int) -> float:
    """Return the learning rate over its highest: up evenly in a tenth, then down by a cosine.

    Source: L. Smith and N. Topin, "Super-Convergence" (2018), with one cosine.
    """
    rise = max(1, round(_WARM_UP * total))
    if done < rise:
        return (done + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (done - rise) / max(1, total - rise)))


def place_here() -> Place:
    """Return where this rank is, by torchrun's variables; one node where there are none."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Place(
        rank,
        world_size,
        int(os.environ.get("GROUP_RANK", rank // local_size)),
        int(os.environ.get("GROUP_WORLD_SIZE", max(1, world_size // local_size))),
        int(os.environ.get("LOCAL_RANK", rank % local_size)),
        local_size,
    )


def train(settings: RunSettings) -> Iterator[Record]:
    """Train all candidates; yield a row an evaluation and at the end one a candidate. Collective.

    Rows have a ``record`` of ``evaluation`` or ``training``, or as `RunSettings.each_step` says.
    """
    workload, place = load(settings.workload), place_here()
    epochs = settings.epochs or workload.epochs
    steps = settings.steps or workload.steps_per_epoch
    with ExitStack() as stack:
        trainees = [trainee(name, workload, settings, stack) for name in settings.candidates]
        first = _resume(trainees, settings)
        for epoch in range(first, epochs):
            if settings.stop_after is not None and epoch >= settings.stop_after:
                return
            for step in range(steps):
                at = At(epoch, step, epoch * steps + step, epochs * steps)
                turn = at.done % len(trainees)  # going first is no candidate's privilege
                for each in (*trainees[turn:], *trainees[:turn]):
                    each.step(workload, settings, at, place)
                if settings.each_step:
                    yield {"record": "step", "done": at.done + 1}
            pool(trainees)
            for each in trainees:
                found = each.evaluate(workload, epoch + 1)
                yield {"record": "evaluation", "candidate": each.name, **found}
            _keep(trainees, epoch + 1, settings)
        for each in trainees:
            yield row(each, workload, settings)
            if settings.each_step:
                yield {"record": "weights", "candidate": each.name, "digest": digest(each.model)}


def digest(model: DistributedDataParallel) -> str:
    """Return a hash of the weights of `model`."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def trainee(name: str, workload: Workload, settings: RunSettings, stack: ExitStack) -> Trainee:
    """Return a new candidate that begins as all others; its hook lives as long as `stack`."""
    torch.manual_seed(settings.seed)
    model = DistributedDataParallel(workload.module(), bucket_cap_mb=settings.bucket_cap_mb)
    handle = None
    if name != PLAIN:
        plan = {FLAT: "flat", AUTO: "auto"}.get(name, "hierarchical")
        codec = "rows" if workload.sparse else "none"
        if not name.startswith(HOOK):
            codec = name
        handle = stack.enter_context(
            attach(
                model,
                plan=plan,
                compression=codec,
                optimizer="adam",
                start_step=10,
                guard_steps=0,
                timeout_s=settings.timeout_s,
            )
        )
    return Trainee(name, model, workload.optimizers(model.module), handle)


def pool(trainees: Sequence[Trainee]) -> None:
    """Move fresh seconds to the seconds of the slowest rank. Collective."""
    fresh = torch.tensor([each.fresh for each in trainees], dtype=torch.float64)
    dist.all_reduce(fresh, dist.ReduceOp.MAX)
    for each, slowest in zip(trainees, fresh.tolist(), strict=True):
        each.seconds += slowest
        each.fresh.clear()


def row(each: Trainee, workload: Workload, settings: RunSettings) -> Record:
    """Return the record of a training that came to its end."""
    last = [found["quality"] for found in each.evaluations[-_LAST:]]
    quality = sum(last) / len(last)
    curve = [(found["seconds"], found["quality"]) for found in each.evaluations]
    reached = time_to_accuracy(curve, workload.target, falling=workload.falling)
    sent = None
    if each.handle is not None:
        sent = each.handle.compression.sent_nbytes or None
    return {
        "record": "training",
        "workload": workload.name,
        "candidate": each.name,
        "seed": settings.seed,
        "metric": workload.metric,
        "falling": workload.falling,
        "target": workload.target,
        "tolerance": workload.tolerance,
        "baseline": {"name": workload.baseline.name, "quality": workload.baseline.quality},
        "data": workload.source,
        "synthetic": workload.synthetic,
        "world_size": dist.get_world_size(),
        "hosts": place_here().num_nodes,
        "num_parameters": sum(p.numel() for p in each.model.parameters()),
        "global_batch": workload.global_batch,
        "epochs": len(each.evaluations),
        "seconds": each.seconds,
        "evaluations": each.evaluations,
        "quality": quality,
        "target_reached": workload.reached(quality),
        "reached_seconds": None if math.isinf(reached) else reached,
        "sent_nbytes": sent,
        "fallbacks": 0 if each.handle is None else each.handle.fallbacks,
    }


def _keep(trainees: Sequence[Trainee], epoch: int, settings: RunSettings) -> None:
    if settings.checkpoint is None:
        return
    states = [each.state() for each in trainees]
    if dist.get_rank() == 0:
        path = Path(settings.checkpoint)
        partial = path.with_suffix(".part")
        torch.save({"epoch": epoch, "job": _job(settings), "states": states}, partial)
        partial.rename(path)


def _job(settings: RunSettings) -> str:
    """Return what has to be the same for a job to go on from a checkpoint."""
    return repr(msgspec.structs.replace(settings, checkpoint=None, stop_after=None))


def _resume(trainees: Sequence[Trainee], settings: RunSettings) -> int:
    """Take over the checkpoint, if there is one, and return the first epoch to train."""
    found: list[Any] = [None]
    if settings.checkpoint is not None and dist.get_rank() == 0:
        path = Path(settings.checkpoint)
        if path.exists():
            kept = torch.load(path, weights_only=True)
            if kept["job"] == _job(settings):
                found = [kept]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    for each, state in zip(trainees, found[0]["states"], strict=True):
        each.take(state)
    return int(found[0]["epoch"])
