"""What does it cost in quality to average between nodes every H steps, and what does it save?

Command: python -m experiments.15_averaging --out results/
Minutes: 5 on two cores (2 hosts of 4 ranks, NICs of 20 Mbit/s); --seeds takes more than one.

The ResNet of `workloads/vision.py` trains by plain DDP through the hook, by `topo_ar.LocalSGD` that
averages parameters every 4 and 16 steps, at once and while steps go on, and by `topo_ar.DiLoCo`
every 16 steps, exactly and with int8 between nodes. All of a seed train in one job, in turns. Each
is evaluated after every epoch, then with the parameters that all ranks share after an exchange.

Writes averaging_SEED.jsonl, a row a candidate: ``candidate``, ``seed``, ``sync_every``, ``delay``,
``nic``, ``world_size``, ``seconds`` (each step, of the slowest rank), ``mean_seconds``,
``evaluations`` [{epoch, step, seconds, quality}], ``quality`` (mean of the last three), ``target``,
``target_reached``, ``nbytes_between`` (sent between nodes by all ranks, in the training),
``manifest``.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments.jobs import Part, as_rank, measure, run_parts
from experiments.training_runs import (
    At,
    RunSettings,
    Trainee,
    place_here,
    pool,
    row,
)
from experiments.workloads.catalogue import load
from experiments.workloads.workload import Workload
from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.integrations.averaging import DiLoCo, LocalSGD
from topo_ar.integrations.ddp import attach
from topo_ar.telemetry.records import Record, read_records

SCRIPT = "experiments.15_averaging"
NIC, NODES, RANKS = "20mbit", 2, 4
_BURST = 16 << 10
HOOK = "hook"


class Method(msgspec.Struct, frozen=True):
    """A way to average between nodes."""

    kind: type[LocalSGD]
    sync_every: int
    delay: int = 0
    compression: str = "none"


METHODS = {
    "LocalSGD 4": Method(LocalSGD, 4),
    "LocalSGD 4, delay 2": Method(LocalSGD, 4, 2),
    "LocalSGD 16": Method(LocalSGD, 16),
    "DiLoCo 16, delay 8": Method(DiLoCo, 16, 8),
    "DiLoCo 16, int8": Method(DiLoCo, 16, 0, "int8"),
}


def train(settings: RunSettings) -> Iterator[Record]:
    """Train all candidates in turns and yield a row each. Collective."""
    workload, place = load(settings.workload), place_here()
    epochs = settings.epochs or workload.epochs
    steps = settings.steps or workload.steps_per_epoch
    with ExitStack() as stack:
        made = [_trainee(name, workload, settings, stack) for name in (HOOK, *METHODS)]
        trainees = [each for each, _ in made]
        for epoch in range(epochs):
            for step in range(steps):
                at = At(epoch, step, epoch * steps + step, epochs * steps)
                turn = at.done % len(trainees)
                for each in (*trainees[turn:], *trainees[:turn]):
                    each.step(workload, settings, at, place)
            pool(trainees)
            for each, averaging in made:
                # What an evaluation needs is no part of the training: it takes nothing with it.
                before = None if averaging is None else _averaged(each)
                each.evaluate(workload, epoch + 1)
                if before is not None:
                    _put(each, before)
        for each, averaging in made:
            method = METHODS.get(each.name)
            assert averaging is not None or each.handle is not None
            communicator = (averaging or each.handle).communicator  # type: ignore[union-attr]
            nbytes = torch.tensor(communicator.nbytes_sent_between)
            dist.all_reduce(nbytes)
            yield {
                **row(each, workload, settings),
                "sync_every": 1 if method is None else method.sync_every,
                "delay": 0 if method is None else method.delay,
                "mean_seconds": mean(each.seconds),
                "nbytes_between": int(nbytes),
                "nic": NIC,
            }


def _trainee(
    name: str, workload: Workload, settings: RunSettings, stack: ExitStack
) -> tuple[Trainee, LocalSGD | None]:
    torch.manual_seed(settings.seed)
    model = DistributedDataParallel(workload.module(), bucket_cap_mb=settings.bucket_cap_mb)
    optimizers = workload.optimizers(model.module)
    if name == HOOK:
        handle = stack.enter_context(
            attach(model, plan="hierarchical", timeout_s=settings.timeout_s)
        )
        return Trainee(name, model, optimizers, handle), None
    method = METHODS[name]
    options: dict[str, Any] = {"plan": "hierarchical", "timeout_s": settings.timeout_s}
    averaging = stack.enter_context(
        method.kind(
            model,
            optimizers[0],
            sync_every=method.sync_every,
            delay=method.delay,
            compression=method.compression,
            **options,
        )
    )
    return Trainee(name, model, optimizers, None), averaging


def _averaged(each: Trainee) -> torch.Tensor:
    """Put the mean of the ranks' parameters in their place and return what this rank had."""
    before = torch.nn.utils.parameters_to_vector(each.model.parameters()).detach()
    mean = before.clone()
    dist.all_reduce(mean)
    _put(each, mean / dist.get_world_size())
    return before


def _put(each: Trainee, flat: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(flat.clone(), each.model.parameters())


def _make(settings: RunSettings) -> Iterable[Record]:
    spec = msgspec.structs.replace(ClusterSpec.uniform(NODES, RANKS, NIC), burst=_BURST)
    return measure(spec, SCRIPT, settings, train)


def path_of(out: Path, name: str) -> Path:
    """Return where the rows of a seed are kept."""
    return out / f"averaging_{name}.jsonl"


def table(out: Path) -> Iterator[str]:
    """Yield the lines of a table of all seeds that are there."""
    found: dict[str, list[Record]] = {}
    for path in sorted(out.glob("averaging_*.jsonl")):
        for each in read_records(path):
            found.setdefault(each["candidate"], []).append(each)
    if not found:
        return
    exact = sum(each["nbytes_between"] for each in found[HOOK])
    yield "| averaging | accuracy | bytes between nodes | mean step | reached 0.96 |"
    yield "|---|---|---|---|---|"
    for name, rows in found.items():
        quality = sum(each["quality"] for each in rows) / len(rows)
        share = sum(each["nbytes_between"] for each in rows) / exact
        seconds = mean(second for each in rows for second in each["seconds"])
        reached = sum(each["target_reached"] for each in rows)
        yield (
            f"| {name} | {quality:.4f} | {share:.4f} | {1000 * seconds:.0f} ms "
            f"| {reached} of {len(rows)} |"
        )


def main() -> int:
    """Read the command line."""
    if as_rank(RunSettings, train):
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps: that it runs")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()

    def work() -> int:
        if not options.table:
            options.out.mkdir(parents=True, exist_ok=True)
            parts = []
            for seed in range(options.seeds):
                settings = RunSettings(
                    workload="vision",
                    seed=seed,
                    epochs=2 if options.quick else None,
                    steps=16 if options.quick else None,
                )
                name = f"quick_{seed}" if options.quick else str(seed)
                parts.append(Part(name, 5.0, partial(_make, settings)))
            run_parts(parts, lambda name: path_of(options.out, name))
        for line in table(options.out):
            print(line)
        return 0

    return exit_code_of(work, "interrupted; the same command makes what is missing")


if __name__ == "__main__":
    sys.exit(main())
