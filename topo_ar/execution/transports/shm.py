"""The ranks of one node as seen by one of them: shared counters, slots, and wake-ups.

Counters rely on stores becoming visible in order, which x86-64 guarantees; other machines take the
plain path (see `ordered_stores`).
"""

import contextlib
import os
import platform

import numpy as np
from numpy.typing import NDArray

from topo_ar.execution.futex import wake
from topo_ar.execution.transports.segment import (
    FINGERPRINT_SLOTS,
    FUTEX,
    RESULT_WINDOW,
    STAGING_SLOTS,
    Counter,
    Owned,
    Peer,
    Segment,
)


def ordered_stores() -> bool:
    """Tell whether this machine keeps the order of plain stores, as the counters need."""
    return platform.machine().lower() in {"x86_64", "amd64"}


class Node:
    """All co-located ranks of one communicator, in rank order.

    Parameters
    ----------
    ranks : tuple of int
        The ranks of this node, ascending; this rank among them.
    rank : int
        This rank.
    owned : Owned
        This rank's segment.
    peers : dict
        The other ranks' segments by rank.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank: int, owned: Owned, peers: dict[int, Peer]
    ) -> None:
        self.ranks = ranks
        self.local_rank = ranks.index(rank)
        self.owned = owned
        self.peers = [peers[r] for r in ranks if r != rank]
        self.segments: list[Segment] = [
            owned.segment if r == rank else peers[r].segment for r in ranks
        ]
        self._words = [segment.words for segment in self.segments]
        self._mine = owned.segment.words
        self._asleep_at = {peer.rank: peer.segment.asleep_at for peer in self.peers}

    def least(self, counter: int) -> int:
        """Return the smallest value of a growing counter over the node."""
        least = self._mine[counter]
        for words in self._words:
            if words[counter] < least:
                least = words[counter]
        return least

    def value(self, counter: int, local_rank: int) -> int:
        """Return the counter of one local rank."""
        return self._words[local_rank][counter]

    def advance(self, counter: int, value: int) -> None:
        """Publish this rank's counter; the last to get there wakes those who sleep for it."""
        self._mine[counter] = value
        for words in self._words:
            if words[counter] < value:
                return
        bit = 1 << counter
        for peer in self.peers:
            words = peer.segment.words
            mask = words[Counter.ASLEEP]
            if mask & bit:
                words[Counter.ASLEEP] = 0
                if mask & FUTEX:
                    wake(self._asleep_at[peer.rank])
                else:
                    _ring(peer)

    def wake_everyone(self) -> None:
        """Wake all peers, whatever they wait for."""
        for peer in self.peers:
            _ring(peer)

    def sleep_for(self, counters: int) -> None:
        """Say which counters this rank is about to block for: a mask of ``1 << counter``."""
        self._mine[Counter.ASLEEP] = counters

    def announce(self, ticket: int, fingerprint: int, source: int) -> None:
        """Say what this rank believes ticket number `ticket` to be, and where its input lies."""
        self._mine[Counter.FINGERPRINTS + ticket % FINGERPRINT_SLOTS] = fingerprint
        self._mine[Counter.SOURCES + ticket % FINGERPRINT_SLOTS] = source

    def sources(self, ticket: int) -> list[int]:
        """Return where the inputs of all local ranks lie, as they announced it."""
        at = Counter.SOURCES + ticket % FINGERPRINT_SLOTS
        return [words[at] for words in self._words]

    def differing(self, ticket: int, fingerprint: int) -> tuple[int, ...]:
        """Return the ranks whose announced fingerprint of `ticket` is another one."""
        at = Counter.FINGERPRINTS + ticket % FINGERPRINT_SLOTS
        return tuple(
            rank
            for rank, words in zip(self.ranks, self._words, strict=True)
            if words[at] != fingerprint
        )

    def staging_free(self, index: int) -> bool:
        """Tell whether chunk `index` may be copied in: every rank has reduced the slot's last."""
        return index < self.least(Counter.REDUCED) + STAGING_SLOTS

    def result_free(self, index: int) -> bool:
        """Tell whether chunk `index` may be written: it is in the window of every rank."""
        return index < self.least(Counter.COPIED_OUT) + RESULT_WINDOW

    def result(self, index: int) -> NDArray[np.uint8]:
        """Return the node's result slot of chunk `index`; it lies with the lowest rank."""
        return self.segments[0].result(index)

    def failures(self) -> list[tuple[int, bytes]]:
        """Return rank and report of every peer that has raised its FAILED flag."""
        return [
            (peer.rank, data)
            for peer in self.peers
            if (data := peer.segment.read_failure()) is not None
        ]


def _ring(peer: Peer) -> None:
    with contextlib.suppress(OSError):  # a full pipe wakes as well; a dead peer is seen by pidfd
        os.write(peer.wake_fd, b"\0")
