"""The hierarchical all-reduce as collectives of process groups issued inline, for NCCL.

A CUDA collective is ordered by streams, so no thread is needed: the calling thread enqueues
reduce-scatter inside the node, all-reduce between nodes and all-gather inside the node for every
chunk, in one order on every rank. Stages inside the node and between nodes have a side stream each,
so that neighbouring chunks overlap. All of it happens in the caller's tensor: nothing is allocated
that one rank could lack the memory for when the others are on their way.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from topo_ar.execution.torch_private import (
    all_gather_in,
    all_reduce_in,
    gloo_group,
    nccl_group,
    reduce_scatter_in,
)

_MAKERS = {"gloo": gloo_group, "nccl": nccl_group}


class StageGroups:
    """Process groups of one rank: all ranks, the ranks of its node, and its rail across nodes.

    Creating them is collective over those ranks.

    Parameters
    ----------
    nodes : sequence of tuple of int
        The ranks of each node, which together are 0 to the number of ranks.
    rank : int
        This one.
    name : str
        Equal on all ranks, and never used twice in the store of the default group.
    backend : str
        ``nccl`` on CUDA; ``gloo`` runs the same stages on CPU tensors.
    timeout_s : float
        Deadline of every collective.

    Attributes
    ----------
    equal : bool
        Whether all nodes have equally many ranks; only then are there stages.
    everyone, intra, inter : ProcessGroup
        All ranks; with equal nodes those of the node and of the rail.

    Raises
    ------
    RuntimeError
        If gloo's ranks do not meet, or there is no such backend here.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[int, ...]],
        rank: int,
        name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        node = next(node for node in nodes if rank in node)
        self.local_size = len(node)
        self.num_nodes = len(nodes)
        self.equal = len({len(node) for node in nodes}) == 1
        make = _MAKERS[backend]

        def group(label: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            return make(f"{name}/{label}", ranks.index(rank), len(ranks), timeout_s)

        self.everyone = group("everyone", sorted(each for node in nodes for each in node))
        self.intra = self.inter = self.everyone
        if self.equal:
            place = node.index(rank)
            self.intra = group(f"node{nodes.index(node)}", node)
            self.inter = group(f"rail{place}", [other[place] for other in nodes])

    def close(self, *, broken: bool = False) -> None:
        """Let the groups go; `broken` ones without waiting for the other ranks."""
        for group in (self.inter, self.intra, self.everyone) if self.equal else (self.everyone,):
            with suppress(RuntimeError):  # one that fails now was of no use any more
                if broken:
                    group.abort()
                else:
                    group.shutdown()


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
            On this object's device. It may be dropped at once: its memory is not given to
            others before the stages are through with it.
        op : ReduceOp
            SUM or AVG for the hierarchy; anything that the backend knows for the flat form.
        chunk_nbytes : sequence of int or None
            The plan's chunks; None for one flat all-reduce.

        Returns
        -------
        Future
            Complete as soon as everything is enqueued; on CUDA it carries the event that a waiting
            stream waits for. 16-bit averages are divided first: their sum may overflow.

        Raises
        ------
        RuntimeError
            If the backend fails; what was enqueued before is then ahead of whatever the current
            stream does next.
        """
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = flat.detach().view(-1)
        if self._intra is None or self._inter is None:
            self._reduce(flat, op, chunk_nbytes)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(tensor)
            return done
        current = torch.cuda.current_stream(self.device)
        self._intra.wait_stream(current)
        for stream in (self._intra, self._inter):
            flat.record_stream(stream)
        try:
            with torch.cuda.stream(self._intra):
                self._reduce(flat, op, chunk_nbytes)
                future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                    devices=[self.device]
                )
                future.set_result(tensor)
                return future
        except BaseException:
            current.wait_stream(self._inter)
            current.wait_stream(self._intra)
            raise

    def _reduce(
        self,
        flat: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        chunk_nbytes: Sequence[int] | None,
    ) -> None:
        if chunk_nbytes is None:
            all_reduce_in(self.groups.everyone, flat, op)
            return
        world_size = self.groups.local_size * self.groups.num_nodes
        early = op == dist.ReduceOp.AVG and flat.itemsize == 2
        if early:
            flat.div_(world_size)
        self._run_chunks(flat, chunk_nbytes)
        if op == dist.ReduceOp.AVG and not early:
            flat.div_(world_size)

    def _run_chunks(self, flat: torch.Tensor, chunk_nbytes: Sequence[int]) -> None:
        pending: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]] = []
        local, place = self.groups.local_size, self.groups.intra.rank()
        begin = 0
        for nbytes in chunk_nbytes:
            end = begin + nbytes // flat.itemsize
            whole = end - (end - begin) % local
            self._small(flat[whole:end])
            if whole > begin:
                chunk = flat[begin:whole]
                shard = chunk.view(local, -1)[place]
                reduce_scatter_in(self.groups.intra, shard, chunk)
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
            all_reduce_in(self.groups.everyone, rest, dist.ReduceOp.SUM)

    def _across(self, shard: torch.Tensor) -> "torch.cuda.Event | None":
        if self._inter is None or self._intra is None:
            all_reduce_in(self.groups.inter, shard, dist.ReduceOp.SUM)
            return None
        self._inter.wait_stream(self._intra)
        with torch.cuda.stream(self._inter):
            all_reduce_in(self.groups.inter, shard, dist.ReduceOp.SUM)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._inter)
        return event

    def _gather(
        self, chunk: torch.Tensor, shard: torch.Tensor, event: "torch.cuda.Event | None"
    ) -> None:
        if event is not None and self._intra is not None:
            self._intra.wait_event(event)
        all_gather_in(self.groups.intra, chunk, shard)
