"""What the ranks of a job tell each other before the first collective.

Everything travels as bytes through an all-gather on a private gloo group; nothing is pickled.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from topo_ar.errors import ExecutionError
from topo_ar.execution.bootstrap import Bootstrap
from topo_ar.execution.network import local_address
from topo_ar.execution.transports.rendezvous import NONCE_NBYTES
from topo_ar.execution.transports.segment import Card, Owned, Peer, open_peer


class Unreachable(ExecutionError):  # noqa: N818 - an event that the loop turns into a message
    """A rank of a channel is gone or late."""


class Channel:
    """A private gloo group for set-up and for the plain path.

    Making one is collective over the ranks of `bootstrap` alone. It works until it is closed, even
    where torch's own groups are destroyed before.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks that take part.
    timeout_s : float
        Deadline of each operation on the channel.
    name : str
        Tells the channels of one bootstrap apart.

    Attributes
    ----------
    rank, world_size : int
        In the numbering of `group`.
    ranks : tuple of int
        Global ranks.
    name : str
        Equal on all ranks, and never used twice in a store.
    address : str
        Where this rank's flows are reached.

    Raises
    ------
    ConfigError
        If ``GLOO_SOCKET_IFNAME`` is not usable.
    ExecutionError
        If the ranks do not meet.
    """

    def __init__(self, bootstrap: Bootstrap, timeout_s: float, name: str = "channel") -> None:
        self.rank, self.world_size = bootstrap.rank, bootstrap.world_size
        self.ranks, self.name = bootstrap.ranks, bootstrap.name
        self.address = local_address(self.rank)
        self._made: dist.ProcessGroup | None = bootstrap.gloo(name, timeout_s)
        # Who left at once would break off the connections that others still make.
        self.all_gather_words([self.rank])

    @property
    def _group(self) -> "dist.ProcessGroup":
        if self._made is None:
            raise ExecutionError("the communicator is closed")
        return self._made

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order.

        Raises
        ------
        ExecutionError
            If a rank is gone or late.
        """
        size = torch.tensor([len(data)], device="cpu")
        sizes = [int(each) for each in self._gather_equal(size)]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device="cpu")
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = self._gather_equal(padded)
        return [part[:size].numpy().tobytes() for part, size in zip(gathered, sizes, strict=True)]

    def all_gather_words(
        self, words: Sequence[int], timeout_s: float | None = None
    ) -> list[list[int]]:
        """Return the integers of every rank, in rank order; all ranks give equally many.

        Raises
        ------
        ExecutionError
            If a rank is gone or late; after `timeout_s`, where given, the channel is at its end.
        """
        mine = torch.tensor(words, dtype=torch.int64, device="cpu")
        return [gathered.tolist() for gathered in self._gather_equal(mine, timeout_s)]

    def gather_rows(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the `row` of every rank to `rows`, one below the other.

        Raises
        ------
        ExecutionError
            If a rank is gone or late.
        """
        torch.stack(self._gather_equal(row), out=rows)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of rank `root`.

        Raises
        ------
        ExecutionError
            If a rank is gone or late.
        """
        options = dist.BroadcastOptions()
        options.rootRank = root
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise Unreachable(f"rank {self.rank} cannot reach all others: {error}") from None

    def _gather_equal(
        self, tensor: torch.Tensor, timeout_s: float | None = None
    ) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        try:
            work = self._group.allgather([gathered], [tensor])
            if timeout_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise Unreachable(f"rank {self.rank} cannot reach all others: {error}") from None
        return gathered

    def all_reduce(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
        """Reduce `tensor` in place over all ranks, by gloo.

        Raises
        ------
        RuntimeError
            If a rank is gone or late, or gloo does not know `op` for the dtype.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        self._group.allreduce([tensor], options).wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._group.barrier().wait()

    def send(self, tensor: torch.Tensor, to: int) -> "dist.Work":
        """Start to send `tensor` to a rank."""
        return self._group.send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, sender: int) -> "dist.Work":
        """Start to receive `tensor` from a rank."""
        return self._group.recv([tensor], sender, 0)

    def close(self) -> None:
        """Let the group go, with its threads and sockets; ranks that wait in it learn of it."""
        self._made = None


@dataclass(frozen=True, slots=True)
class Colocation:
    """Which ranks share a host: every node's ranks, and the opened segments of one's own node."""

    nodes: tuple[tuple[int, ...], ...]
    peers: dict[int, Peer]


def find_colocated(channel: Channel, owned: Owned) -> Colocation:
    """Group the ranks of `channel` by host, proved by opening each other's memory.

    Raises
    ------
    ExecutionError
        If the relation is not the same seen from every rank, for example when one rank may read
        another's /proc entry but not the other way round.
    """
    cards = [
        msgspec.json.decode(data, type=Card)
        for data in channel.all_gather(msgspec.json.encode(owned.card))
    ]
    peers = {
        rank: peer
        for rank, card in enumerate(cards)
        if rank != channel.rank and (peer := open_peer(rank, card, owned.slot_nbytes)) is not None
    }
    try:
        return Colocation(_agreed(channel, peers), peers)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise


def _agreed(channel: Channel, peers: Collection[int]) -> tuple[tuple[int, ...], ...]:
    seen = msgspec.json.encode(sorted([channel.rank, *peers]))
    views = [tuple(msgspec.json.decode(data, type=list[int])) for data in channel.all_gather(seen)]
    for rank, view in enumerate(views):
        for other in view:
            if views[other] != view:
                raise ExecutionError(
                    f"rank {rank} shares memory with ranks {list(view)} but rank {other} with "
                    f"{list(views[other])}; start all ranks of a host as one user in one pid "
                    "namespace",
                    ranks=(rank, other),
                )
    return tuple(sorted(set(views)))


def agree_on_nonce(channel: Channel) -> bytes:
    """Return random bytes of rank 0, the same on all ranks: the name of this job's flows."""
    return channel.all_gather(os.urandom(NONCE_NBYTES))[0]
