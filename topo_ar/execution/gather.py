"""What the ranks of a job tell each other before the first collective.

Everything travels as bytes through an all-gather on a private gloo group; nothing is pickled.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from topo_ar.errors import ExecutionError
from topo_ar.execution.transports.rendezvous import NONCE_NBYTES
from topo_ar.execution.transports.segment import Card, Owned, Peer, open_peer


class Channel:
    """A private gloo group for set-up and for the plain path.

    Parameters
    ----------
    group : ProcessGroup or None
        The group whose ranks take part; None for the default group.
    timeout_s : float
        Deadline of each operation on the channel.
    """

    def __init__(self, group: "dist.ProcessGroup | None", timeout_s: float) -> None:
        ranks = self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            # Torch then names groups by their ranks and the number of groups alive: one made after
            # another was destroyed can find that one's addresses in the store.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        self.rank = dist.get_rank(self.group)
        self.world_size = len(ranks)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        longest = max(1, max(int(size) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self.group)
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(gathered, sizes, strict=True)
        ]

    def close(self) -> None:
        """Destroy the group where torch still knows it."""
        if dist.is_initialized():
            dist.destroy_process_group(self.group)


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
        if rank != channel.rank
        and (peer := open_peer(rank, card, owned.segment.slot_nbytes)) is not None
    }
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
    return Colocation(tuple(sorted(set(views))), peers)


def agree_on_nonce(channel: Channel) -> bytes:
    """Return random bytes of rank 0, the same on all ranks: the name of this job's flows."""
    return channel.all_gather(os.urandom(NONCE_NBYTES))[0]
