"""One rank's part of ``compute_load --only auto-...``: what `auto` chooses, and how well.

A job trains alone until it has chosen, a few times anew; then plain DDP, the hook held to the plain
path and the hook held to the plan take turns step by step.
"""

import copy
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments.compute_load_ranks import (
    HOOK,
    HOOK_FLAT,
    LEARNING_RATE,
    PLAIN,
    Settings,
    Trainee,
    over_ranks,
    rounds,
)
from experiments.workloads.resnet import ImageSet, gratings, resnet18
from topo_ar.errors import ExecutionError
from topo_ar.integrations.ddp import Handle, attach
from topo_ar.integrations.path_choice import UNDECIDED
from topo_ar.telemetry.records import Record

AUTO = "auto"
_MOST_STEPS = 60


def measure_choice(settings: Settings) -> list[Record]:
    """Return a row for each of auto's choices, and one a candidate with its seconds. Collective."""
    batch = gratings(settings.batch, dist.get_rank(), settings.image_side)
    torch.manual_seed(0)
    module = resnet18(width=settings.auto_width)
    choices = [_choose(module, batch, settings) for _ in range(settings.auto_trials)]
    plans = {PLAIN: None, HOOK: "hierarchical", HOOK_FLAT: "flat"}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    with ExitStack() as stack:
        trainees = {
            name: _trainee(module, plan, settings, stack)[0] for name, plan in plans.items()
        }
        for turns in rounds(list(plans), settings.warm_up + settings.samples):
            for name in turns:
                seconds[name].append(trainees[name].step(batch))
    slowest = over_ranks(list(seconds.values()), dist.ReduceOp.MAX)
    rows: list[Record] = [
        {"candidate": name, "seconds": each[settings.warm_up :]}
        for name, each in zip(seconds, slowest, strict=True)
    ]
    nbytes = sum(p.nbytes for p in module.parameters())
    return [{**row, "gradient_nbytes": nbytes} for row in choices + rows]


def _choose(module: torch.nn.Module, batch: ImageSet, settings: Settings) -> Record:
    """Train a copy of `module` alone until auto has chosen."""
    with ExitStack() as stack:
        trainee, handle = _trainee(module, "auto", settings, stack)
        assert handle is not None
        for _ in range(_MOST_STEPS):
            trainee.step(batch)
            choice = handle.choice
            if choice.path != UNDECIDED:
                found = choice.speedup
                interval = None if found is None else [found.ratio, found.low, found.high]
                return {
                    "candidate": AUTO,
                    "path": choice.path,
                    "reason": choice.reason,
                    "steps": choice.steps,
                    "speedup": interval,
                }
    raise ExecutionError(f"auto has not chosen within {_MOST_STEPS} steps: {choice.reason}")


def _trainee(
    module: torch.nn.Module, plan: str | None, settings: Settings, stack: ExitStack
) -> tuple[Trainee, Handle | None]:
    model = DistributedDataParallel(copy.deepcopy(module), gradient_as_bucket_view=True)
    handle = None
    if plan is not None:
        handle = stack.enter_context(attach(model, plan=plan, timeout_s=settings.timeout_s))
    return Trainee(model, torch.optim.SGD(model.parameters(), LEARNING_RATE)), handle
