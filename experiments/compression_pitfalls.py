"""What do torch's PowerSGD hooks get wrong, and does topo_ar get it right?

Command: python -m experiments.compression_pitfalls --out results/
Minutes: under 1.

--table FILE prints the table of such a file for the documentation, and runs nothing.

Runs torch's own hooks and topo_ar's PowerSGD with error feedback side by side, on 4 simulated ranks
(threads) with the same gradients; in one row on 2 real ranks on gloo, with a deadline. Prints a
table, writes compression_pitfalls.jsonl, and ends with 0 if topo_ar is right in every row, whatever
torch does.
"""

import argparse
import copy
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

from experiments import compression_pitfalls_ranks as real
from experiments.torch_hooks import Bucket, Group, run_ranks, state, step
from topo_ar.cli.script import exit_code_of
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.powersgd import PowerSGD
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.errors import TopoError
from topo_ar.telemetry.records import Record, RecordWriter, manifest, read_records

RANKS = 4
RANK = 2
SHAPES = {"fc.weight": (64, 48), "fc.bias": (64,), "head.weight": (40, 64), "head.bias": (40,)}
NAMES = list(SHAPES)
ONE, TWO = [NAMES], [NAMES[:2], NAMES[2:]]

# Gradients by parameter, given the rank and the step.
Data = Callable[[int, int], dict[str, torch.Tensor]]
# For each step the mean of each parameter, as one rank sees it.
Means = list[dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Row:
    """One pitfall: what each side does, whether ours is right, and on which ranks that was."""

    name: str
    measure: str
    torch: float | str
    ours: float | str
    right: bool
    ranks: int = RANKS
    emulation: str = "threads"


class Torch:
    """torch's hook on the ranks of a job."""

    def __init__(self, group: Group, **options: Any) -> None:
        self.state = state(RANK, group.size, **options)
        self.hook: Any = None

    def step(
        self, gradients: dict[str, torch.Tensor], buckets: Sequence[Sequence[str]], when: int
    ) -> dict[str, torch.Tensor]:
        """Return the means."""
        made = []
        for number, names in enumerate(buckets):
            flat = torch.cat([gradients[name].reshape(-1) for name in names])
            shapes = [tuple(gradients[name].shape) for name in names]
            made.append(Bucket(flat, shapes, number, number == len(buckets) - 1))
        step(self.state, made, *([self.hook] if self.hook else []))
        return {
            name: value.clone()
            for names, bucket in zip(buckets, made, strict=True)
            for name, value in zip(names, bucket.gradients(), strict=True)
        }

    def resumed(self, group: Group) -> "Torch":
        """Return a new one with the state of this one, as its `__getstate__` saves it."""
        other = Torch(group)
        for slot, value in self.state.__getstate__().items():
            setattr(other.state, slot, copy.deepcopy(value))
        return other


class Ours:
    """PowerSGD within error feedback, each rank a node."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.feedback = ErrorFeedback(PowerSGD(RANK))
        self._layouts: dict[tuple[int, int], Layout] = {}

    def step(
        self, gradients: dict[str, torch.Tensor], buckets: Sequence[Sequence[str]], when: int
    ) -> dict[str, torch.Tensor]:
        """Return the means."""
        means = {}
        for number, names in enumerate(buckets):
            key = len(buckets), number
            layout = self._layouts.setdefault(key, _layout(number, names, gradients))
            shard = torch.cat([gradients[name].reshape(-1) for name in names])
            total = self.feedback.reduce(shard, layout, self.group, Group(), when).total
            for piece in layout.pieces:
                run = total[piece.offset : piece.offset + piece.end] / self.group.size
                means[piece.name] = run.view(piece.shape)
        return means

    def resumed(self, group: Group) -> "Ours":
        """Return a new one with the state of this one."""
        self.feedback.settle()
        other = Ours(group)
        other.feedback.compressor.load_state_dict(self.feedback.compressor.state_dict())
        for run in self.feedback.store.runs():
            other.feedback.store.add(replace(run, values=run.values.clone()))
        return other


def overflow() -> Row:
    """Give one rank an inf in step 2 of 8, as at a loss scale that is too high."""

    def data(rank: int, when: int) -> dict[str, torch.Tensor]:
        gradients = noise(rank, when)
        if (rank, when) == (1, 2):
            gradients["fc.weight"][3, 3] = math.inf
        return gradients

    theirs, ours = train(Torch, data, 8), train(Ours, data, 8)
    skipped = train(Ours, lambda rank, when: noise(rank, when + (when >= 2)), 7)
    same = all(
        torch.equal(found[name], right[name])
        for found, right in zip(ours[3:], skipped[2:], strict=True)
        for name in NAMES
    )
    known = not any(value.isfinite().all() for value in ours[2].values())
    bad = [sum(not _finite(m) for m in means[3:]) for means in (theirs, ours)]
    return Row(
        "inf in one gradient of one rank",
        "later steps that are NaN, of 5",
        bad[0],
        bad[1],
        same and known,
    )


def zeros() -> Row:
    """Give a layer a zero gradient in the first compressed step."""

    def data(rank: int, when: int) -> dict[str, torch.Tensor]:
        gradients = noise(rank, when)
        if when == 0:
            gradients["fc.weight"].zero_()
        return gradients

    bad = [sum(not _finite(m) for m in train(kind, data, 6)) for kind in (Torch, Ours)]
    return Row("zero gradient of a layer", "steps that are NaN, of 6", bad[0], bad[1], bad[1] == 0)


def batched() -> Row:
    """Run the hook for whole buckets in its first compressed step."""

    def work(group: Group) -> str:
        theirs = Torch(group)
        theirs.hook = hooks.batched_powerSGD_hook
        try:
            theirs.step(noise(group.index, 0), ONE, 0)
        except AssertionError:
            return "AssertionError"
        return "runs"

    ours = "runs" if _finite(train(Ours, noise, 1)[0]) else "NaN"
    found = run_ranks(RANKS, work)[0]
    return Row("batched_powerSGD_hook", "first compressed step", found, ours, ours == "runs")


def resume() -> Row:
    """Resume a job of two buckets; the first step has them in one, as DDP does."""

    def work(kind: type[Torch] | type[Ours]) -> Callable[[Group], tuple[Means, Means] | str]:
        def run(group: Group) -> tuple[Means, Means] | str:
            whole, right = kind(group), []
            for when in range(6):
                if when == 3:
                    again = whole.resumed(group)
                right.append(whole.step(noise(group.index, when), TWO, when))
            try:
                found = [
                    again.step(noise(group.index, when), ONE if when == 3 else TWO, when)
                    for when in range(3, 6)
                ]
            except RuntimeError as error:
                return type(error).__name__
            return right[3:], found

        return run

    theirs = run_ranks(RANKS, work(Torch))[0]
    right, found = run_ranks(RANKS, work(Ours))[0]
    same = all(
        torch.equal(a[name], b[name]) for a, b in zip(right, found, strict=True) for name in a
    )
    told = theirs if isinstance(theirs, str) else "resumes"
    return Row(
        "resume with two buckets",
        "first steps after",
        told,
        "as if uninterrupted, bit for bit" if same else "differs from uninterrupted",
        same,
    )


def deficient() -> Row:
    """Take rank-2 factors of gradients whose rank is 1: nothing should be lost."""
    worst = [0.0, 0.0]
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        row = torch.randn(1, 48, generator=random)
        columns = torch.randn(RANKS, 64, 1, generator=random)
        right = (columns @ row).mean(0)

        def data(
            rank: int, when: int, columns: torch.Tensor = columns, row: torch.Tensor = row
        ) -> dict[str, torch.Tensor]:
            return {**noise(rank, when), "fc.weight": columns[rank] @ row}

        for side, kind in enumerate((Torch, Ours)):
            for mean in train(kind, data, 3):
                error = ((mean["fc.weight"] - right).norm() / right.norm()).item()
                worst[side] = max(worst[side], error)
    return Row(
        "rank-deficient gradient", "largest relative error", worst[0], worst[1], worst[1] < 1e-5
    )


def vectors() -> Row:
    """Look at the residual of a bias, which is never compressed and has no error to feed back."""

    def work(kind: type[Torch] | type[Ours]) -> Callable[[Group], float]:
        def run(group: Group) -> float:
            side = kind(group)
            for when in range(50):
                side.step(noise(group.index, when), ONE, when)
            if isinstance(side, Torch):
                (error,) = side.state.error_dict.values()
                begin = math.prod(SHAPES["fc.weight"])
                return float(error[begin : begin + 64].norm())
            side.feedback.settle()
            return sum(
                float(r.values.norm()) for r in side.feedback.store.runs() if len(r.shape) == 1
            )

        return run

    kept = [max(run_ranks(RANKS, work(kind))) for kind in (Torch, Ours)]
    return Row("residual of a bias", "its norm after 50 steps", kept[0], kept[1], kept[1] == 0)


def two_buckets(silence_seconds: float = 15.0) -> Row:
    """Train on 2 real ranks on gloo, whose threads torch's hook keeps waiting for themselves."""
    found = [real.steps_finished(side, silence_seconds) for side in ("torch", "ours")]
    return Row(
        "two buckets, 2 processes on gloo",
        f"compressed steps until it dies or hangs for {silence_seconds:g} s, of {real.STEPS}",
        found[0],
        found[1],
        found[1] == real.STEPS,
        real.WORLD_SIZE,
        "loopback",
    )


def noise(rank: int, when: int) -> dict[str, torch.Tensor]:
    """Return Gaussian gradients with a mean that all ranks share."""
    random = torch.Generator().manual_seed(1000 * when + rank)
    return {name: 1 + torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def train(kind: type[Torch] | type[Ours], data: Data, steps: int) -> Means:
    """Return the means of each step, as rank 0 sees them."""

    def work(group: Group) -> Means:
        side = kind(group)
        return [side.step(data(group.index, when), ONE, when) for when in range(steps)]

    means: Means = run_ranks(RANKS, work)[0]
    return means


def _finite(mean: dict[str, torch.Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in mean.values())


def _layout(number: int, names: Sequence[str], gradients: dict[str, torch.Tensor]) -> Layout:
    pieces, offset = [], 0
    for name in names:
        shape = tuple(gradients[name].shape)
        pieces.append(Piece(name, shape, 0, math.prod(shape), offset))
        offset += math.prod(shape)
    return Layout(number, tuple(pieces))


def markdown(records: Sequence[Record]) -> str:
    """Return the table of records, for the documentation."""
    version = records[0]["manifest"]["torch"]
    lines = [f"| pitfall | measure | torch {version} | topo_ar |", "|---|---|---|---|"]
    lines += [
        f"| {r['name']} | {r['measure']} | {_shown(r['torch'])} | {_shown(r['ours'])} |"
        for r in records
    ]
    return "\n".join(lines) + "\n"


def _shown(value: float | str) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


PITFALLS = (overflow, zeros, batched, resume, deficient, vectors, two_buckets)


def _print_table(path: Path) -> int:
    print(markdown(read_records(path)), end="")
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a table of records")
    options = parser.parse_args()
    out = options.out
    if options.table is not None:
        return exit_code_of(lambda: _print_table(options.table))
    logging.getLogger(hooks.__name__).setLevel(logging.ERROR)
    rows = [pitfall() for pitfall in PITFALLS]
    table = Table("pitfall", "measure", f"torch {torch.__version__}", "topo_ar", "right")
    for row in rows:
        shown = map(_shown, (row.torch, row.ours))
        table.add_row(row.name, row.measure, *shown, "yes" if row.right else "NO")
    Console().print(table)
    try:
        with RecordWriter(out / "compression_pitfalls.jsonl") as writer:
            for row in rows:
                found = asdict(row)
                block = manifest(found.pop("emulation"))
                writer.write({"experiment": "compression_pitfalls", **found, "manifest": block})
    except TopoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
