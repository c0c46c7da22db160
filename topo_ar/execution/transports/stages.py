"""The hierarchical all-reduce as torch.distributed collectives issued inline, for NCCL.

A CUDA collective is ordered by streams, so no thread is needed: the calling thread enqueues
reduce-scatter inside the node, all-reduce between nodes and all-gather inside the node for every
chunk, in one order on every rank. Stages inside the node and between nodes have a side stream each,
so that neighbouring chunks overlap.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist


class StageGroups:
    """Process groups of this rank: the ranks of its node, and its rail across nodes.

    Creating them is collective over the default group: every rank makes all groups in one order.

    Parameters
    ----------
    nodes : sequence of tuple of int
        Global ranks of each node; equally many.
    backend : str
        ``nccl`` on CUDA; ``gloo`` runs the same stages on CPU tensors.
    timeout_s : float
        Deadline of every collective.
    """

    def __init__(self, nodes: Sequence[tuple[int, ...]], backend: str, timeout_s: float) -> None:
        rank = dist.get_rank()
        timeout = timedelta(seconds=timeout_s)
        self.local_size = len(nodes[0])
        self.num_nodes = len(nodes)
        for node in nodes:
            group = dist.new_group(list(node), timeout=timeout, backend=backend)
            if rank in node:
                self.intra = group
        for rail in zip(*nodes, strict=True):
            group = dist.new_group(list(rail), timeout=timeout, backend=backend)
            if rank in rail:
                self.inter = group

    def close(self) -> None:
        """Destroy the groups where torch still knows them."""
        if dist.is_initialized():
            dist.destroy_process_group(self.intra)
            dist.destroy_process_group(self.inter)


class InlineStages:
    """Runs hierarchical all-reduces of one device.

    Parameters
    ----------
    groups : StageGroups
        Where the stages run.
    device : torch.device
        A CUDA device, or ``cpu`` (then everything happens before `all_reduce` returns).
    chunk_nbytes : int
        Size of a chunk; a tensor is cut into chunks of this size.
    """

    def __init__(self, groups: StageGroups, device: torch.device, chunk_nbytes: int) -> None:
        self.groups = groups
        self.device = device
        self.chunk_nbytes = chunk_nbytes
        self._intra = self._inter = None
        if device.type == "cuda":
            self._intra = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._inter = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def all_reduce(
        self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType"
    ) -> "torch.futures.Future[torch.Tensor]":
        """Enqueue the all-reduce of a contiguous `tensor` in place; SUM or AVG.

        Returns a future that is complete as soon as everything is enqueued; on CUDA it carries the
        event that the waiting stream waits for. 16-bit averages are divided first, for a sum over
        many ranks not to overflow.
        """
        flat = tensor.view(-1)
        world = self.groups.local_size * self.groups.num_nodes
        if self._intra is not None:
            self._intra.wait_stream(torch.cuda.current_stream(self.device))
        with _on(self._intra):
            early = op == dist.ReduceOp.AVG and tensor.itemsize == 2
            if early:
                flat.div_(world)
            self._run_chunks(flat)
            if op == dist.ReduceOp.AVG and not early:
                flat.div_(world)
            return self._future(tensor)

    def _run_chunks(self, flat: torch.Tensor) -> None:
        per_chunk = max(1, self.chunk_nbytes // flat.itemsize)
        per_chunk -= per_chunk % self.groups.local_size
        whole = flat.numel() - flat.numel() % self.groups.local_size
        pending: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]] = []
        for begin in range(0, whole, max(per_chunk, self.groups.local_size)):
            chunk = flat[begin : min(begin + max(per_chunk, self.groups.local_size), whole)]
            shard = chunk.new_empty(chunk.numel() // self.groups.local_size)
            dist.reduce_scatter_tensor(shard, chunk, group=self.groups.intra)
            pending.append((chunk, shard, self._across(shard)))
            # One chunk stays between nodes while the next is scattered inside the node.
            if len(pending) > 1:
                self._gather(*pending.pop(0))
        for entry in pending:
            self._gather(*entry)
        if whole < flat.numel():
            # The remainder is smaller than one element per local rank.
            tail = flat[whole:]
            dist.all_reduce(tail, group=self.groups.intra)
            dist.all_reduce(tail, group=self.groups.inter)

    def _across(self, shard: torch.Tensor) -> "torch.cuda.Event | None":
        if self._inter is None or self._intra is None:
            dist.all_reduce(shard, group=self.groups.inter)
            return None
        self._inter.wait_stream(self._intra)
        with torch.cuda.stream(self._inter):
            dist.all_reduce(shard, group=self.groups.inter)
            shard.record_stream(self._inter)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._inter)
        return event

    def _gather(
        self, chunk: torch.Tensor, shard: torch.Tensor, event: "torch.cuda.Event | None"
    ) -> None:
        if event is not None and self._intra is not None:
            self._intra.wait_event(event)
        dist.all_gather_into_tensor(chunk, shard, group=self.groups.intra)

    def _future(self, tensor: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        devices: list[int | str | torch.device] = [self.device] if self._intra is not None else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if self._intra is not None:
            tensor.record_stream(self._intra)
        future.set_result(tensor)
        return future


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
