"""All-reduces of tensors on a device: by NCCL's stages, or through host memory."""

from functools import partial

import torch
import torch.distributed as dist

from topo_ar.execution.calls import Calls, OnDone
from topo_ar.execution.host_copies import HostCopies
from topo_ar.execution.loop import Loop
from topo_ar.execution.nccl_path import NcclPath
from topo_ar.execution.ticket import Pending, Ticket
from topo_ar.planning.plan import Family


class DeviceCalls:
    """The calls of one communicator for tensors that are not in host memory.

    Parameters
    ----------
    calls : Calls
        Those for tensors on the CPU, which copies in host memory join.
    loop : Loop
        As for `calls`.
    nccl : NcclPath or None
        Takes CUDA tensors, where the process group has NCCL.
    """

    def __init__(self, calls: Calls, loop: Loop, nccl: NcclPath | None) -> None:
        self._calls, self._loop, self.nccl = calls, loop, nccl
        self._host_copies: dict[torch.device, HostCopies] = {}

    def reduce(
        self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType", on_done: OnDone, *, plain: bool
    ) -> "torch.futures.Future[torch.Tensor]":
        """Reduce `tensor` after what its device has to do."""
        if self.nccl is None:
            return self.reduce_on_host(tensor, op, on_done, plain=plain)
        prepared = None if plain else self._calls.prepared(tensor, op)
        chunk_nbytes = None
        if prepared is not None and prepared.plan.family is not Family.FLAT_RING:
            chunk_nbytes = prepared.plan.chunk_nbytes
        future = self.nccl.all_reduce(tensor, op, chunk_nbytes)
        if on_done is not None:
            on_done()
        return future

    def reduce_on_host(
        self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType", on_done: OnDone, *, plain: bool
    ) -> Pending:
        """Reduce a copy of `tensor` in host memory, and bring it back."""
        copies = self._host_copies.get(tensor.device)
        if copies is None:
            copies = self._host_copies[tensor.device] = HostCopies(tensor.device)
        devices = [tensor.device] if tensor.is_cuda else []
        future = Pending(self._loop.drives_here, devices)
        theirs = Ticket(-1, tensor, future, lambda: None, on_done)
        # What can fail on one rank alone comes before its ticket.
        host = copies.empty_like(tensor)
        prepared = None if plain else self._calls.prepared(host, op)
        ready = copies.fetch(tensor, host)
        self._calls.reduce_when(ready, host, op, prepared, partial(copies.bring_back, theirs))
        return future
