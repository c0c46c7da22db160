"""Trainings with compressed gradients on simulated ranks, 2 nodes of 4."""

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from experiments.simulated_ranks import RankGroup, SimulatedJob
from experiments.workloads.small import Task
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.parts import part_of
from topo_ar.compression.protocol import Compressor, Layout, Piece
from topo_ar.compression.registry import make
from topo_ar.planning.codecs import NONE, parse_codec

NUM_NODES, NUM_LOCAL = 2, 4
_BATCH = 8
# Every training begins without compression, as torch's hooks do.
_DENSE_STEPS = 10
_MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained: a codec by name, with or without error feedback, by an optimizer."""

    task: str
    optimizer: str
    codec: str
    feedback: bool
    seed: int

    def key(self) -> tuple[Any, ...]:
        """Return what tells it from others in records."""
        return (self.task, self.optimizer, self.codec, self.feedback, self.seed)


TABLE = (
    ("none", False),
    ("bf16", True),
    ("int8", True),
    ("int4", True),
    ("int4", False),
    ("sign", True),
    ("sign", False),
    ("topk:0.05", True),
    ("topk:0.01", True),
    ("topk:0.01", False),
    ("topk:0.001", True),
    ("randomk:0.01", True),
    ("powersgd:1", True),
    ("powersgd:2", True),
    ("powersgd:2", False),
    ("powersgd:4", True),
)


def trainings(tasks: list[str], seeds: int) -> list[Training]:
    """Return the whole table, seeds outermost, so that an early end leaves whole tables."""
    return [
        Training(task, optimizer, codec, feedback, seed)
        for seed in range(seeds)
        for task in tasks
        for optimizer in ("sgd", "adam")
        for codec, feedback in TABLE
    ]


def train(training: Training, task: Task, steps: int) -> dict[str, Any]:
    """Train and return the row of a record: accuracy, bytes of a node, the last loss.

    Every rank takes its own batch of 8; node sums are exact, the four rails of a node reduce a
    quarter of the elements each. A training that is not finite has a null accuracy.
    """
    model = task.model(training.seed)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    weights = torch.cat([p.flatten() for p in parameters.values()]).requires_grad_()
    optimizer = _optimizer(training.optimizer, weights, task)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.rates[training.optimizer], total_steps=steps, cycle_momentum=False
    )

    def loss(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model, _split(flat, shapes), (x,)), y)

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    reduction = _Reduction(training, shapes)
    generator = torch.Generator().manual_seed(training.seed)
    begin, sent = time.perf_counter(), 0
    world = NUM_NODES * NUM_LOCAL
    finite = True
    with SimulatedJob(NUM_NODES, NUM_LOCAL) as job:
        for step in range(steps):
            picks = torch.randint(len(task.train_y), (world, _BATCH), generator=generator)
            each = gradients(weights.detach(), task.train_x[picks], task.train_y[picks])
            total, nbytes = reduction.reduce(job, each.view(NUM_NODES, NUM_LOCAL, -1).sum(1), step)
            weights.grad = total / world
            optimizer.step()
            schedule.step()
            finite = bool(weights.detach().sum().isfinite())
            if not finite:
                break
            sent += nbytes if step >= _DENSE_STEPS else 0
    with torch.no_grad():
        logits = functional_call(model, _split(weights, shapes), (task.test_x,))
        accuracy = (logits.argmax(1) == task.test_y).double().mean().item()
    compressed = max(steps - _DENSE_STEPS, 1)
    dense = NUM_LOCAL * 4 * weights.numel() / NUM_LOCAL  # 2 (n - 1) / n of the buffer, n = 2
    return {
        "experiment": "compression_accuracy",
        "task": training.task,
        "optimizer": training.optimizer,
        "codec": training.codec,
        "feedback": training.feedback,
        "seed": training.seed,
        "steps": steps,
        "accuracy": accuracy if finite else None,
        "node_sent_nbytes_per_step": sent / compressed if finite else None,
        "dense_nbytes_per_step": dense,
        "seconds": time.perf_counter() - begin,
    }


class _Reduction:
    """All ranks' compressors, without compression in the first steps."""

    def __init__(self, training: Training, shapes: dict[str, tuple[int, ...]]) -> None:
        pieces, offset = [], 0
        for name, shape in shapes.items():
            pieces.append(Piece(name, shape, 0, math.prod(shape), offset))
            offset += math.prod(shape)
        whole = Layout(0, tuple(pieces))
        cuts = _cuts(whole)
        self._parts = [slice(a, b) for a, b in pairwise(cuts)]
        self._layouts = [part_of(whole, p.start, p.stop) for p in self._parts]
        codec = parse_codec(training.codec)
        world = NUM_NODES * NUM_LOCAL
        self._plain = [make(NONE) for _ in range(world)]
        coders = [make(codec, training.seed) for _ in range(world)]
        self._coders: list[Compressor] | list[ErrorFeedback] = (
            [ErrorFeedback(coder) for coder in coders] if training.feedback else coders
        )

    def reduce(self, job: SimulatedJob, sums: torch.Tensor, step: int) -> tuple[torch.Tensor, int]:
        """Return the total of the nodes' sums and the bytes that the first node sent."""
        coders = self._plain if step < _DENSE_STEPS else self._coders

        def work(v: int, k: int, rail: RankGroup, node: RankGroup) -> tuple[torch.Tensor, int]:
            coder = coders[v * NUM_LOCAL + k]
            shard = sums[v, self._parts[k]]
            reduced = coder.reduce(shard, self._layouts[k], rail, node, step)
            if not isinstance(coder, ErrorFeedback):
                coder.commit(self._layouts[k])
            return reduced.total, reduced.sent_nbytes

        first = job.run(work)[:NUM_LOCAL]
        return torch.cat([total for total, _ in first]), sum(nbytes for _, nbytes in first)


def _cuts(whole: Layout) -> list[int]:
    """Return where local ranks' shards end: nearly equal, between rows, as PowerSGD needs them."""
    ends = {0, whole.numel}
    for piece in whole.pieces:
        row = math.prod(piece.shape[1:])
        ends.update(range(piece.offset, piece.offset + piece.end - piece.begin + 1, row))
    ideal = (whole.numel * k // NUM_LOCAL for k in range(NUM_LOCAL + 1))
    return [min(ends, key=lambda end: abs(end - place)) for place in ideal]


def _optimizer(name: str, weights: torch.Tensor, task: Task) -> torch.optim.Optimizer:
    rate = task.rates[name]
    if name == "adam":
        return torch.optim.Adam([weights], rate)
    return torch.optim.SGD([weights], rate, momentum=_MOMENTUM)


def _split(flat: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = flat[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
    return found
