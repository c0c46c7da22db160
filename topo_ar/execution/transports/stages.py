"""The hierarchical all-reduce as torch.distributed collectives issued inline, for NCCL.

A CUDA collective is ordered by streams, so no thread is needed: the calling thread enqueues
reduce-scatter inside the node, all-reduce between nodes and all-gather inside the node for every
chunk, in one order on every rank. Stages inside the node and between nodes have a side stream each,
so that neighbouring chunks overlap.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist


class StageGroups:
    """Process groups of one rank: all ranks, the ranks of its node, and its rail across nodes.

    Creating them is collective over those ranks, in the same order on all.

    Parameters
    ----------
    nodes : sequence of tuple of int
        Global ranks of each node.
    backend : str
        ``nccl`` on CUDA; ``gloo`` runs the same stages on CPU tensors.
    timeout_s : float
        Deadline of every collective.
    """

    def __init__(self, nodes: Sequence[tuple[int, ...]], backend: str, timeout_s: float) -> None:
        rank = dist.get_rank()
        node = next(node for node in nodes if rank in node)
        self.local_size = len(node)
        self.num_nodes = len(nodes)

        def group(ranks: Sequence[int]) -> dist.ProcessGroup:
            made: dist.ProcessGroup = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=True,
            )
            return made

        self.everyone = group(sorted(rank for node in nodes for rank in node))
        self.intra = self.inter = self.everyone
        self.equal = len({len(node) for node in nodes}) == 1
        if self.equal:
            self.intra = group(node)
            self.inter = group([other[node.index(rank)] for other in nodes])

    def close(self) -> None:
        """Destroy the groups where torch still knows them."""
        if not dist.is_initialized():
            return
        groups = [self.intra, self.inter] if self.equal else []
        for group in [*groups, self.everyone]:
            with suppress(ValueError):  # the default group went, and all others with it
                dist.destroy_process_group(group)


class InlineStages:
    """Runs all-reduces of one device's tensors.

    Parameters
    ----------
    groups : StageGroups
        Where the stages run.
    device : torch.device
        A CUDA device, or ``cpu`` (then everything has happened when `all_reduce` returns).
    """

    def __init__(self, groups: StageGroups, device: torch.device) -> None:
        self.groups = groups
        self.device = device
        self._intra: torch.cuda.Stream | None = None
        self._inter: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._intra = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._inter = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        chunk_nbytes: Sequence[int] | None,
    ) -> "torch.futures.Future[torch.Tensor]":
        """Enqueue the all-reduce of a contiguous `tensor` in place.

        Parameters
        ----------
        tensor : Tensor
            On this object's device.
        op : ReduceOp
            SUM or AVG for the hierarchy; anything that the backend knows for the flat form.
        chunk_nbytes : sequence of int or None
            The plan's chunks; None for one flat all-reduce.

        Returns
        -------
        Future
            Complete as soon as everything is enqueued; on CUDA it carries the event that a waiting
            stream waits for. 16-bit averages are divided first: their sum may overflow.
        """
        world = self.groups.local_size * self.groups.num_nodes
        if self._intra is not None:
            self._intra.wait_stream(torch.cuda.current_stream(self.device))
        with _on(self._intra):
            if chunk_nbytes is None:
                dist.all_reduce(tensor, op=op, group=self.groups.everyone)
            else:
                flat = tensor.detach().view(-1)
                early = op == dist.ReduceOp.AVG and tensor.itemsize == 2
                if early:
                    flat.div_(world)
                self._run_chunks(flat, chunk_nbytes)
                if op == dist.ReduceOp.AVG and not early:
                    flat.div_(world)
            return self._future(tensor)

    def _run_chunks(self, flat: torch.Tensor, chunk_nbytes: Sequence[int]) -> None:
        pending: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]] = []
        begin = 0
        for nbytes in chunk_nbytes:
            end = begin + nbytes // flat.itemsize
            whole = end - (end - begin) % self.groups.local_size
            self._small(flat[whole:end])
            if whole > begin:
                chunk = flat[begin:whole]
                shard = chunk.new_empty(chunk.numel() // self.groups.local_size)
                dist.reduce_scatter_tensor(shard, chunk, group=self.groups.intra)
                pending.append((chunk, shard, self._across(shard)))
            # One chunk stays between nodes while the next is scattered inside the node.
            if len(pending) > 1:
                self._gather(*pending.pop(0))
            begin = end
        for entry in pending:
            self._gather(*entry)

    def _small(self, rest: torch.Tensor) -> None:
        """Reduce the elements that do not divide among the local ranks."""
        if rest.numel():
            dist.all_reduce(rest, group=self.groups.everyone)

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
        devices: list[int | str | torch.device] = []
        if self._intra is not None:
            devices = [self.device]
            tensor.record_stream(self._intra)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(tensor)
        return future


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
