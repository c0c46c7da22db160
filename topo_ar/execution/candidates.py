"""Ways to all-reduce that a benchmark times: calls of this job, or ranks of another library.

`Own` calls a function on every rank of the job; `topo_ar.execution.peer` asks a job beside it.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Run:
    """One sample to be taken: `calls` timed back to back, after a pause and `warmup` others."""

    nbytes: int
    calls: int
    warmup: int = 1
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds and CPU seconds of one call on this rank, the mean of a run."""

    seconds: float
    cpu_seconds: float


class CandidateLostError(Exception):
    """A candidate is gone for good, on every rank at once; says why on rank 0."""


class Candidate(Protocol):
    """What can be timed. Every method is collective over the job.

    Methods raise `CandidateLostError` when there will be no more answers, on all ranks or on none.
    """

    name: str

    def sample(self, run: Run) -> Sample:
        """Take one sample."""
        ...

    def wrong(self, nbytes: int) -> int:
        """All-reduce known numbers; return how many elements are wrong, over all ranks."""
        ...

    def close(self) -> None:
        """Give up what the candidate holds."""
        ...


class Own:
    """A call that every rank of the job makes on its own buffer.

    Parameters
    ----------
    name : str
        What rows call it.
    call : callable
        Reduces a tensor in place and returns when it is done.
    zeros : callable
        Returns the tensor of so many bytes that timed calls reduce.
    op : ReduceOp
        What `call` does: SUM or AVG.
    group : ProcessGroup
        The job's ranks, for barriers.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[torch.Tensor], object],
        zeros: Callable[[int], torch.Tensor],
        op: "dist.ReduceOp.RedOpType",
        group: "dist.ProcessGroup",
    ) -> None:
        self.name = name
        self._call = call
        self._zeros = zeros
        self._op = op
        self._group = group

    def sample(self, run: Run) -> Sample:
        """Take one sample between barriers."""
        tensor = self._zeros(run.nbytes)
        dist.barrier(group=self._group)
        if run.pause_seconds:
            time.sleep(run.pause_seconds)
            dist.barrier(group=self._group)
        for _ in range(run.warmup):
            self._call(tensor)
        cpu, begin = _cpu_seconds(), time.perf_counter()
        for _ in range(run.calls):
            self._call(tensor)
        seconds = time.perf_counter() - begin
        return Sample(seconds / run.calls, (_cpu_seconds() - cpu) / run.calls)

    def wrong(self, nbytes: int) -> int:
        """Count elements that differ from the exact sum of small integers, over all ranks."""
        zeros = self._zeros(nbytes)
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        pattern = torch.arange(zeros.numel()) % 7
        tensor = zeros.copy_(pattern + rank % 5)
        expected = (pattern * world_size + sum(rank % 5 for rank in range(world_size))).double()
        if self._op == dist.ReduceOp.AVG:
            expected /= world_size
        self._call(tensor)
        wrong = torch.tensor([int((tensor != expected.to(zeros.dtype)).sum())])
        tensor.zero_()
        dist.all_reduce(wrong, group=self._group)
        return int(wrong)

    def close(self) -> None:
        """Nothing is held."""


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
