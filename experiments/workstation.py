"""What must change in a training script for one workstation, and does anything get worse?

Command: torchrun --standalone --nproc-per-node=4 -m experiments.workstation --out results/
Minutes: 1 on two cores; the same with --plain for plain DDP.

An ordinary script that trains a ResNet on the digits of `experiments.workloads.vision`, 256 a step.
One line makes it use topo_ar; it is marked. Appends a row to workstation.jsonl: ``experiment``
"workstation", ``candidate`` ("hook:auto", "plain DDP"), ``world_size``, ``hosts`` 1, ``seconds`` of
each step (the slowest rank's), ``losses``, ``evaluations`` [{epoch, quality}], ``quality`` (mean of
the last three), ``path`` and ``reason`` (what `auto` chose), ``data``, ``synthetic``, ``manifest``.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from experiments.jobs import process_group, under_torchrun
from experiments.training_runs import AUTO, PLAIN, one_cycle, place_here
from experiments.workloads.catalogue import load
from topo_ar.cli.script import exit_code_of
from topo_ar.errors import ConfigError
from topo_ar.telemetry.records import Record, RecordWriter, manifest


def train(epochs: int, steps: int | None, *, plain: bool, seed: int = 0) -> Record:
    """Train and return the row. Collective."""
    workload, place = load("vision"), place_here()
    steps = steps or workload.steps_per_epoch
    torch.manual_seed(seed)
    with ExitStack() as stack:
        model = DistributedDataParallel(workload.module())
        handle = None
        if not plain:
            handle = stack.enter_context(topo_ar.attach(model))  # the one line
        optimizer = torch.optim.AdamW(model.parameters(), workload.rate, weight_decay=0.05)
        seconds, losses, evaluations = [], [], []
        for epoch in range(epochs):
            for step in range(steps):
                begin = time.perf_counter()
                chosen = workload.indices(epoch, step, seed, place)
                images = workload.data["images"][chosen].expand(-1, 3, -1, -1)
                optimizer.param_groups[0]["lr"] = workload.rate * one_cycle(
                    epoch * steps + step, epochs * steps
                )
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images), workload.data["labels"][chosen])
                torch.autograd.backward(loss)
                optimizer.step()
                seconds.append(time.perf_counter() - begin)
                losses.append(loss.item())
            evaluations.append({"epoch": epoch + 1, "quality": workload.evaluate(model.module)})
        pooled = torch.tensor([seconds, losses], dtype=torch.float64)
        dist.all_reduce(pooled[0], dist.ReduceOp.MAX)
        dist.all_reduce(pooled[1])
        last = [each["quality"] for each in evaluations[-3:]]
        return {
            "experiment": "workstation",
            "record": "training",
            "candidate": PLAIN if plain else AUTO,
            "world_size": dist.get_world_size(),
            "hosts": 1,
            "seconds": pooled[0].tolist(),
            "losses": (pooled[1] / dist.get_world_size()).tolist(),
            "evaluations": evaluations,
            "quality": sum(last) / len(last),
            "path": None if handle is None else handle.choice.path,
            "reason": None if handle is None else handle.choice.reason,
            "data": workload.source,
            "synthetic": workload.synthetic,
        }


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="plain DDP")
    parser.add_argument("--quick", action="store_true", help="a few steps: that it runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()

    def work() -> int:
        if not under_torchrun():
            raise ConfigError(
                "this is a script for torchrun; run torchrun --standalone --nproc-per-node=4 "
                "-m experiments.workstation"
            )
        with process_group() as rank:
            row = train(*((1, 4) if options.quick else (12, None)), plain=options.plain)
            if rank == 0:
                path = options.out / f"workstation{'.quick' if options.quick else ''}.jsonl"
                with RecordWriter(path) as writer:
                    writer.write({**row, "manifest": manifest()})
                why = "" if row["path"] is None else f" ({row['path']}: {row['reason']})"
                print(f"{row['candidate']}{why}: accuracy {row['quality']:.4f}, written: {path}")
        return 0

    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())
