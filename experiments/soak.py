"""Do memory, threads and open files stay flat over many steps, and is every result right?

Command: python -m experiments.soak --steps 10000 --out results/
Minutes: 8 on two cores (2 nodes of 2 ranks on the loopback device, nothing shaped).

A step reduces the buckets of a model's gradients, of mixed sizes and dtypes, all in flight at once,
and some small tensors one by one; part of the buckets lies in shared memory. Every 1,000 steps the
ranks make new buckets and a new communicator. The control does the same by plain gloo, a new group
every 1,000 steps. Writes soak.jsonl, 21 rows for each job and rank, the last one after malloc_trim;
exit code 1 when a result was wrong, ranks ended with different bits, or something grew.

Flat is what is in use: threads, open files, mappings, what malloc and Python have handed out.
Resident memory also has what malloc was given back and keeps: it grows with every set of new
buckets, whoever reduces them, and is shown beside the control's, as it is and after malloc_trim.
"""

import argparse
import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Self

import torch
import torch.distributed as dist

from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.launch import start
from topo_ar.emulation.loopback import LoopbackCluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ExecutionError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.telemetry.records import Record, RecordWriter, manifest

ROOT = Path(__file__).resolve().parent.parent
BUCKETS = (
    (1_000, torch.float32),
    (65_537, torch.bfloat16),
    (262_144, torch.float32),
    (31, torch.float64),
    (700_001, torch.float32),
    (120_000, torch.float16),
)
NUM_SHARED = 3
NUM_SAMPLES = 20
CHECK_STEPS = 50
# What is in use may move by this much between quarters of a run.
SLACK_NBYTES = 1 << 20
SLACK_BLOCKS = 2_000
PLANNED, CONTROL = "planned", "plain gloo"
_MARK = "@soak "
# In place of the number of a step: after the last one, when malloc has given back what it can.
TRIMMED = -1
_AVG, _MAX, _BOR = dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.BOR


class _Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Heap


def heap_nbytes() -> tuple[int, int]:
    """Return what malloc has handed out, and what it was given back and keeps."""
    heap = _libc.mallinfo2()
    return heap.uordblks + heap.hblkhd, heap.fordblks


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How long, on how many nodes and ranks."""

    steps: int = 10_000
    remake_steps: int = 1_000
    nodes: int = 2
    ranks: int = 2
    out: Path = Path("results")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process holds after `step` steps.

    `in_use_nbytes` is what malloc has handed out, `kept_nbytes` what it was given back and keeps;
    resident memory has both, as far as they were touched, and what is mapped, shared or not.
    `blocks` are those of Python's own allocator.
    """

    rank: int
    step: int
    seconds: float
    rss_nbytes: int
    in_use_nbytes: int
    kept_nbytes: int
    blocks: int
    threads: int
    open_files: int
    mappings: int
    wrong: int
    digest: str


class Plain:
    """The control: a group of gloo with the methods of `Communicator` that a step needs."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def share(self, tensor: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        """Leave `tensor` where it is."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(tensor)
        return done

    def all_reduce(
        self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType"
    ) -> "torch.futures.Future[torch.Tensor]":
        """Reduce `tensor` in place; gloo knows no AVG."""
        average = op == _AVG
        work = dist.all_reduce(tensor, dist.ReduceOp.SUM if average else op, self._group, True)

        def finish(_: object) -> torch.Tensor:
            return tensor.div_(self.world_size) if average else tensor

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
        return future

    def all_reduce_sync(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> torch.Tensor:
        """Reduce `tensor` in place and return it."""
        return self.all_reduce(tensor, op).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group(self._group)


def run_rank(steps: int, remake_steps: int, *, control: bool) -> None:
    """Do one rank's part under torchrun's environment, writing a marked line for each sample."""
    torch.set_num_threads(1)
    os.environ[HOST_ID_ENV] = os.environ["GROUP_RANK"]
    # Torch's flight recorder keeps the last 2,000 calls to gloo, just under 1 kB each: it would
    # grow during most of the run, and then no more.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.init_process_group("gloo")
    begin, wrong = time.monotonic(), 0
    sample_steps = max(1, steps // NUM_SAMPLES)
    digest = hashlib.sha256()
    make: Callable[[], Communicator | Plain] = Plain
    if not control:
        make = partial(Communicator, plan="hierarchical", timeout_s=60.0)
    for first in range(1, steps + 1, remake_steps):
        buckets = [torch.empty(numel, dtype=dtype) for numel, dtype in BUCKETS]
        with make() as made:
            for bucket in buckets[:NUM_SHARED]:
                made.share(bucket).wait()
            for step in range(first, min(first + remake_steps, steps + 1)):
                wrong += _one_step(made, buckets, step)
                if step % CHECK_STEPS == 0:
                    for bucket in buckets:
                        digest.update(bucket.view(torch.uint8).numpy().tobytes())
                if step % sample_steps == 0:
                    _report(step, time.monotonic() - begin, wrong, digest.hexdigest())
    _libc.malloc_trim(0)
    _report(TRIMMED, time.monotonic() - begin, wrong, digest.hexdigest())
    dist.destroy_process_group()


def _one_step(made: Communicator | Plain, buckets: Sequence[torch.Tensor], step: int) -> int:
    """Reduce all buckets and return how many results are wrong."""
    rank, world_size = made.rank, made.world_size
    for bucket in buckets:
        bucket.fill_(rank + step % 7)
    futures = [made.all_reduce(bucket, _AVG) for bucket in buckets]
    most = made.all_reduce_sync(torch.tensor([float(rank)]), _MAX)
    for future in futures:
        future.wait()
    flags = made.all_reduce_sync(torch.tensor([1 << rank]), _BOR) if step % 10 == 0 else None
    expected = (world_size - 1) / 2 + step % 7
    whole = step % CHECK_STEPS == 0
    wrong = sum(
        not bool((bucket == expected).all() if whole else bucket[-1] == expected)
        for bucket in buckets
    )
    wrong += float(most) != world_size - 1
    return wrong + (flags is not None and int(flags) != (1 << world_size) - 1)


def _report(step: int, seconds: float, wrong: int, digest: str) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sample = Sample(
        dist.get_rank(),
        step,
        round(seconds, 3),
        pages * os.sysconf("SC_PAGE_SIZE"),
        *heap_nbytes(),
        sys.getallocatedblocks(),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        Path("/proc/self/maps").read_text().count("\n"),
        wrong,
        digest[:16],
    )
    print(_MARK + json.dumps(asdict(sample)), flush=True)


def run(config: Config) -> int:
    """Run both jobs, write the records, print what was found and return the exit code."""
    path = config.out / "soak.jsonl"
    path.unlink(missing_ok=True)
    faults: list[str] = []
    with RecordWriter(path) as writer:
        for job in (PLANNED, CONTROL):
            print(f"{job}:", flush=True)
            found = _run_job(config, job, writer)
            print(_memory(job, found), flush=True)
            if job == PLANNED:
                faults = judge(found)
    for fault in faults:
        print(f"FAIL {fault}")
    if not faults:
        print(f"flat: {config.nodes * config.ranks} ranks, {config.steps} steps, nothing wrong")
    return int(bool(faults))


def _run_job(config: Config, job: str, writer: RecordWriter) -> list[Sample]:
    found: list[Sample] = []
    said: list[str] = []
    block = manifest("loopback")

    def take(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not text.startswith(_MARK):
            said.append(f"rank {rank}: {text}")
            return
        sample = Sample(**json.loads(text.removeprefix(_MARK)))
        found.append(sample)
        writer.write(_record(sample, job, config, block))
        if sample.rank == 0:
            print(_line(sample), flush=True)

    command = [sys.executable, "-m", "experiments.soak", "--rank"]
    command += ["--control"] if job == CONTROL else []
    command += ["--steps", str(config.steps), "--remake-steps", str(config.remake_steps)]
    spec = ClusterSpec.uniform(config.nodes, config.ranks)
    with LoopbackCluster(spec) as cluster:
        results = start(cluster, command, cwd=ROOT, on_line=take).wait(None)
    if results.exit_code != 0:
        raise ExecutionError(f"{job}: a rank failed:\n" + "\n".join(said[-30:]))
    return found


def _memory(job: str, samples: Sequence[Sample]) -> str:
    """Say what the ranks' resident memory came to, the largest of each."""

    def most(name: str, step: int) -> float:
        return max(float(getattr(s, name)) for s in samples if s.step == step) / 1e6

    first, last = min(s.step for s in samples if s.step > 0), max(s.step for s in samples)
    return (
        f"{job}: resident {most('rss_nbytes', first):.1f} MB at step {first}, "
        f"{most('rss_nbytes', last):.1f} at {last}, {most('rss_nbytes', TRIMMED):.1f} after "
        f"malloc_trim; in use {most('in_use_nbytes', first):.1f} and "
        f"{most('in_use_nbytes', last):.1f}; kept by malloc {most('kept_nbytes', first):.1f} and "
        f"{most('kept_nbytes', last):.1f}"
    )


def judge(samples: Iterable[Sample]) -> list[str]:
    """Return what was wrong or grew, a sentence each.

    Threads, open files and mappings have to be the same, memory in use within `SLACK_NBYTES` and
    `SLACK_BLOCKS`, in the last quarter of a rank's samples as in the second; the first is left to
    caches that fill.
    """
    by_rank: dict[int, list[Sample]] = {}
    by_step: dict[int, set[str]] = {}
    for sample in samples:
        if sample.step == TRIMMED:
            continue
        by_rank.setdefault(sample.rank, []).append(sample)
        by_step.setdefault(sample.step, set()).add(sample.digest)
    faults = [
        f"ranks have different bits at step {step}"
        for step, digests in sorted(by_step.items())
        if len(digests) > 1
    ]
    for rank, row in sorted(by_rank.items()):
        if row[-1].wrong:
            faults.append(f"rank {rank}: {row[-1].wrong} wrong results")
        if len(row) < 4:
            faults.append(f"rank {rank}: {len(row)} samples are too few to tell whether it grows")
            continue
        quarter = len(row) // 4
        early, late = row[quarter : 2 * quarter], row[-quarter:]
        for name, slack in (
            ("threads", 0),
            ("open_files", 0),
            ("mappings", 16),
            ("in_use_nbytes", SLACK_NBYTES),
            ("blocks", SLACK_BLOCKS),
        ):
            before, after = (median(getattr(s, name) for s in part) for part in (early, late))
            if after > before + slack:
                faults.append(f"rank {rank}: {name} grew from {before:g} to {after:g}")
    return faults


def _record(sample: Sample, job: str, config: Config, block: Record) -> Record:
    size = {"nodes": config.nodes, "ranks_per_node": config.ranks, "steps": config.steps}
    return {"experiment": "soak", "job": job, **size, **asdict(sample), "manifest": block}


def _line(sample: Sample) -> str:
    return (
        f"step {sample.step:6d}  {sample.seconds:7.1f} s  rank 0: "
        f"{sample.rss_nbytes / 1e6:.1f} MB resident, {sample.in_use_nbytes / 1e6:.1f} in use, "
        f"{sample.kept_nbytes / 1e6:.1f} kept, {sample.blocks} blocks, "
        f"{sample.threads} threads, {sample.open_files} files, {sample.mappings} mappings, "
        f"{sample.wrong} wrong"
    )


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Config()
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--remake-steps", type=int, default=defaults.remake_steps)
    parser.add_argument("--nodes", type=int, default=defaults.nodes)
    parser.add_argument("--ranks", type=int, default=defaults.ranks)
    parser.add_argument("--out", type=Path, default=defaults.out)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    rank, control = options.pop("rank"), options.pop("control")
    if rank:
        run_rank(options["steps"], options["remake_steps"], control=control)
        return 0
    return exit_code_of(lambda: run(Config(**options)))


if __name__ == "__main__":
    sys.exit(main())
