"""Trainings of ResNet-18 side by side on emulated hosts: plain DDP, codecs and torch's hooks."""

import copy
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from experiments.training import timed_step
from experiments.workloads.resnet import ImageSet, gratings, resnet18
from topo_ar.emulation.check import report
from topo_ar.emulation.launch import start
from topo_ar.emulation.loopback import open_cluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ExecutionError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.torch_private import GradBucket
from topo_ar.integrations.compression_choice import CompressionSettings
from topo_ar.integrations.ddp import Handle, make_handle
from topo_ar.planning.policy import parse_policy
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record, RecordWriter, manifest, read_records
from topo_ar.units import format_seconds, format_size

ROOT = Path(__file__).resolve().parent.parent
SETTINGS_ENV = "COMPRESSION_DDP_SETTINGS"
Hook = Callable[[GradBucket], torch.futures.Future[torch.Tensor]]
PLAIN, COMPUTE, AUTO = "plain DDP", "compute", "auto"
TORCH_FP16, TORCH_POWERSGD = "torch fp16", "torch PowerSGD"
_MARK = "@compression-ddp "
_DEADLINE_S = 3600.0
_ONE_BUCKET_MIB = 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to train; equal on all ranks. `batch` is per rank, `size` the side of an image."""

    optimizer: str = "sgd"
    codecs: tuple[str, ...] = ("fp16", "int8", "int4", "topk:0.01", "powersgd:1", "powersgd:4")
    policy: str = "lossy:1"
    warm_up: int = 2
    steps: int = 12
    batch: int = 2
    size: int = 16
    width: int = 64
    timeout_s: float = 120.0

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names of what is compared."""
        return (PLAIN, "none", *self.codecs, AUTO, TORCH_FP16, TORCH_POWERSGD)

    def compression(self, name: str) -> CompressionSettings:
        """Return what a candidate asks for."""
        return CompressionSettings(
            compression=name,
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
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: ImageSet) -> None:
        """Train one step. Collective."""
        self.trainee.hook = self.hook
        self.seconds.append(self.trainee.step(batch))


def run_rank() -> None:
    """Do one rank's part under torchrun's environment; rank 0 writes a marked line a candidate."""
    settings = msgspec.json.decode(os.environ[SETTINGS_ENV], type=Settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for row in train(settings):
            if dist.get_rank() == 0:
                print(_MARK + json.dumps(row, allow_nan=False), flush=True)
    finally:
        dist.destroy_process_group()


def train(settings: Settings) -> list[Record]:
    """Train all candidates in turns and return a row for each. Collective."""
    torch.manual_seed(0)
    module = resnet18(width=settings.width)
    num_steps = settings.warm_up + settings.steps
    images = gratings(settings.batch * num_steps, dist.get_rank(), settings.size)
    with ExitStack() as stack:
        candidates = _candidates(module, settings, stack)
        compute: list[float] = []
        turns = list(candidates)
        _let_auto_choose(candidates, images.take(range(settings.batch)))
        for step in range(num_steps):
            batch = images.take(range(step * settings.batch, (step + 1) * settings.batch))
            compute.append(candidates[0].trainee.step(batch, silent=True))
            for candidate in turns:
                candidate.step(batch)
            turns.append(turns.pop(0))  # going first is no candidate's privilege
        seconds = torch.tensor([compute, *(c.seconds for c in candidates)], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        measured = seconds[:, settings.warm_up :].tolist()
        return [
            {"candidate": COMPUTE, "seconds": measured[0]},
            *(
                {"candidate": c.name, "seconds": each, **_facts(c)}
                for c, each in zip(candidates, measured[1:], strict=True)
            ),
        ]


def _candidates(module: nn.Module, settings: Settings, stack: ExitStack) -> list[Candidate]:
    """Return all candidates in the order of their names. Collective."""
    world = dist.group.WORLD
    assert world is not None
    plain, shared = _trainee(module, settings), _trainee(module, settings)
    # Torch's PowerSGD hook hangs on gloo with more than one bucket.
    single = _trainee(module, settings, _ONE_BUCKET_MIB)
    state = powerSGD_hook.PowerSGDState(world, matrix_approximation_rank=4, start_powerSGD_iter=2)
    single.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    shared.model.register_comm_hook(None, shared.take)
    found = []
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
            handle = make_handle(shared.model, communicator, "auto", settings.compression(name))
            found.append(Candidate(name, shared, partial(handle.hook.hook, None), handle))
    return found


def _let_auto_choose(candidates: Sequence[Candidate], batch: ImageSet) -> None:
    """Train by ``auto`` alone until it has chosen: it times whole steps that follow each other."""
    auto = next(candidate for candidate in candidates if candidate.name == AUTO)
    assert auto.handle is not None
    compression = auto.handle.hook.compression
    assert compression is not None
    chooser = compression.auto
    while chooser is not None and not compression.why_not and not chooser.done:
        auto.step(batch)
    auto.seconds.clear()


def _trainee(module: nn.Module, settings: Settings, cap_mib: int | None = None) -> Trainee:
    model = DistributedDataParallel(
        copy.deepcopy(module), bucket_cap_mb=cap_mib, gradient_as_bucket_view=True
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


def run_cluster(
    nodes: int, ranks: int, nic: str, settings: Settings, writer: RecordWriter
) -> list[Record]:
    """Train on emulated hosts with NICs of rate `nic`, write a record a candidate, return them.

    Raises
    ------
    ExecutionError
        If a rank failed or was late.
    """
    rows: list[Record] = []

    def on_line(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if text.startswith(_MARK):
            rows.append(json.loads(text.removeprefix(_MARK)))
        else:
            sys.stderr.write(text)

    with open_cluster(ClusterSpec.uniform(nodes, ranks, [nic]), keep=[ROOT]) as cluster:
        links = report(cluster)
        command = [sys.executable, "-m", "experiments.05_compression"]
        env = {SETTINGS_ENV: msgspec.json.encode(settings).decode()}
        ended = start(cluster, command, env=env, cwd=ROOT, on_line=on_line).wait(_DEADLINE_S)
    if ended.exit_code or len(rows) != len(settings.candidates) + 1:
        raise ExecutionError(f"{nic}: ranks ended with {ended.returncodes}")
    context = {
        "experiment": "compression_ddp",
        "nodes": nodes,
        "ranks_per_node": ranks,
        "nic": nic,
        "emulated": links.emulated,
        "settings": msgspec.to_builtins(settings),
        "manifest": {
            **manifest("namespaces" if links.emulated else "loopback"),
            "links": msgspec.to_builtins(links),
        },
    }
    records = [{**context, **row} for row in _compared(rows)]
    for record in records:
        writer.write(record)
    return records


def _compared(rows: list[Record]) -> list[Record]:
    """Add medians, and how many times faster than plain DDP each is, with its 95 % interval."""
    plain = next(row["seconds"] for row in rows if row["candidate"] == PLAIN)
    compared = []
    for row in rows:
        found = speedup_interval(plain, row["seconds"])
        speedup = {"ratio": found.ratio, "low": found.low, "high": found.high}
        compared.append(
            {**row, "median_seconds": statistics.median(row["seconds"]), "speedup": speedup}
        )
    return compared


def run(
    out: Path, nodes: int, ranks: int, nics: tuple[str, ...], settings: Settings, *, quick: bool
) -> None:
    """Train at each rate that is not in the records yet, and print the tables."""
    path = out / ("compression_ddp.quick.jsonl" if quick else "compression_ddp.jsonl")
    wanted = json.loads(msgspec.json.encode(settings))
    with RecordWriter(path) as writer:
        for nic in nics:
            records = [
                record
                for record in read_records(path)
                if (record["nic"], record["nodes"], record["ranks_per_node"]) == (nic, nodes, ranks)
                and record["settings"] == wanted
            ]
            if len(records) != len(settings.candidates) + 1:
                records = run_cluster(nodes, ranks, nic, settings, writer)
            print_table(nic, records)


def print_table(nic: str, records: list[Record]) -> None:
    """Print a line for each candidate, and how near ``auto`` is to the best codec."""
    by_name: dict[str, Record] = {record["candidate"]: record for record in records}
    settings = records[0]["settings"]
    print(f"\n{nic} NICs, {settings['optimizer']}", flush=True)
    for record in records:
        speedup = record["speedup"]
        line = (
            f"{record['candidate']:16} {format_seconds(record['median_seconds']):>9} a step, "
            f"{speedup['ratio']:.2f} [{speedup['low']:.2f}, {speedup['high']:.2f}] x plain DDP"
        )
        if record.get("sent_nbytes"):
            line += (
                f", {format_size(record['sent_nbytes'])} of {format_size(record['dense_nbytes'])}"
            )
        print(line)
    _print_auto(by_name, settings)


def _print_auto(by_name: dict[str, Record], settings: Record) -> None:
    allowed = {str(c) for c in parse_policy(settings["policy"], settings["optimizer"]).allowed}
    admitted = ("none", *(name for name in settings["codecs"] if name in allowed))
    best = min((by_name[name] for name in admitted), key=lambda r: r["median_seconds"])
    found = speedup_interval(by_name[AUTO]["seconds"], best["seconds"])
    print(
        f"auto takes {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}] of the best admitted, "
        f"{best['candidate']}; it chose {by_name[AUTO]['codecs'] or 'none'}"
    )
    print(f"  {by_name[AUTO]['reason']}", flush=True)
