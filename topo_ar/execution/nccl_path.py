"""CUDA tensors by NCCL: the stages of a communicator, made when its first CUDA tensor comes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from topo_ar.errors import ExecutionError
from topo_ar.execution.transports.stages import InlineStages, StageGroups


class NcclPath:
    """All-reduces CUDA tensors on the streams of their devices.

    Parameters
    ----------
    nodes : sequence of tuple of int
        The ranks of each node.
    rank : int
        This one.
    name : str
        Of the communicator; never used twice in the store of the default group.
    timeout_s : float
        Deadline of every collective.
    backend : str
        ``nccl``, but for tests.

    Attributes
    ----------
    error : ExecutionError or None
        Why no tensor can be reduced any more.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[int, ...]],
        rank: int,
        name: str,
        timeout_s: float,
        backend: str = "nccl",
    ) -> None:
        self._arguments = (nodes, rank, f"{name}/{backend}", backend, timeout_s)
        self._rank = rank
        self._groups: StageGroups | None = None
        self._stages: dict[torch.device, InlineStages] = {}
        self.error: ExecutionError | None = None

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        chunk_nbytes: Sequence[int] | None,
    ) -> "torch.futures.Future[torch.Tensor]":
        """Enqueue an all-reduce; see `InlineStages.all_reduce`.

        Raises
        ------
        ExecutionError
            If NCCL failed, now or before. The groups are aborted then: the other ranks cannot go
            on without this one, and learn of it sooner so.
        """
        if self.error is not None:
            raise self.error
        try:
            stages = self._stages.get(tensor.device)
            if stages is None:
                # All ranks come here with the same tensor.
                if self._groups is None:
                    self._groups = StageGroups(*self._arguments)
                stages = self._stages[tensor.device] = InlineStages(self._groups, tensor.device)
            return stages.all_reduce(tensor, op, chunk_nbytes)
        except RuntimeError as error:
            self.error = ExecutionError(
                f"rank {self._rank}: all-reduce on {tensor.device} failed: {error}",
                ranks=(self._rank,),
                stage=self._arguments[3],
            )
            self.close()
            raise self.error from error

    def close(self) -> None:
        """Let the groups go."""
        groups, self._groups = self._groups, None
        self._stages.clear()
        if groups is not None:
            groups.close(broken=self.error is not None)

    def forget(self) -> None:
        """Leave everything as it is to the process that this one was forked from."""
        self._groups = None
