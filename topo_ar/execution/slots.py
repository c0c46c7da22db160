"""Where the chunks of one rank lie in memory, as arrays that are made once for each place.

Making an array costs a rank that shares its core as much as copying many kilobytes, because the
copies of a chunk leave the interpreter with a cold cache.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from topo_ar.execution.flight import Chunk
from topo_ar.execution.kernels import Array
from topo_ar.execution.program import Segment
from topo_ar.execution.transports.segment import RESULT_SLOTS, STAGING_SLOTS
from topo_ar.execution.transports.shm import Node

SUM_SLOTS = 4
_MOST_KEPT = 1024  # sizes may change all the time


class Slots:
    """The slots of chunks: inputs and results in the node's memory, sums in the rank's own.

    Parameters
    ----------
    node : Node
        The co-located ranks.
    rank : int
        This rank in the schedule's numbering.
    peers : iterable of int
        The ranks on other nodes that may send something to be added.
    slot_nbytes : int
        Capacity of one slot of the node's memory.

    Attributes
    ----------
    growths : int
        How often a slot of sums has moved because it was too small: views from before are stale.
    """

    def __init__(self, node: Node, rank: int, peers: Iterable[int], slot_nbytes: int) -> None:
        self.growths = 0
        self._node = node
        self._rank = rank
        self._slot_nbytes = slot_nbytes
        self._partials = [np.empty(0, np.uint8)] * SUM_SLOTS
        self._arrivals = {peer: [np.empty(0, np.uint8)] * SUM_SLOTS for peer in peers}
        self._staged: dict[object, tuple[Array, ...]] = {}
        self._results: dict[object, Array] = {}

    def staged(self, index: int, chunk: Chunk, begin: int, end: int) -> tuple[Array, ...]:
        """Return elements of a chunk of all co-located ranks, where they copy it to."""
        first, kernel = chunk.program.begin, chunk.collective.kernel
        key = (index % STAGING_SLOTS, begin - first, end - first, kernel.dtype)
        found = self._staged.get(key)
        if found is None:
            if len(self._staged) >= _MOST_KEPT:
                self._staged.clear()
            found = self._staged[key] = tuple(
                _elements(segment.staging(index), chunk, begin, end)
                for segment in self._node.segments
            )
        return found

    def result(self, index: int, chunk: Chunk, begin: int, end: int) -> Array:
        """Return elements of the result of a chunk, where the node has it."""
        first, kernel = chunk.program.begin, chunk.collective.kernel
        key = (index % RESULT_SLOTS, begin - first, end - first, kernel.dtype)
        found = self._results.get(key)
        if found is None:
            if len(self._results) >= _MOST_KEPT:
                self._results.clear()
            found = self._results[key] = _elements(self._node.result(index), chunk, begin, end)
        return found

    def partial(self, index: int, chunk: Chunk) -> Array:
        """Return the slot of the node's partial of a chunk, of this rank's shard."""
        kernel, program = chunk.collective.kernel, chunk.program
        nbytes = (program.shard_end - program.shard_begin) * kernel.partial_nbytes(self._rank)
        slot = self._grown(self._partials, index % SUM_SLOTS, max(nbytes, self._slot_nbytes))
        return slot[:nbytes].view(kernel.partial)

    def sum(self, index: int) -> NDArray[np.uint8]:
        """Return where the node's partial of chunk `index` is kept until it is sent."""
        return self._grown(self._partials, index % SUM_SLOTS, self._slot_nbytes)

    def arrival(self, peer: int, index: int, chunk: Chunk, segment: Segment) -> NDArray[np.uint8]:
        """Return the bytes for what `peer` sends of a segment to be added."""
        itemsize = chunk.collective.kernel.partial_nbytes(peer)
        # Room for all segments at once: growing would lose those that are here already.
        slot = self.arrivals(peer, index, chunk.program.arriving_numel * itemsize)
        return slot[segment.arrive_begin * itemsize : segment.arrive_end * itemsize]

    def arrivals(self, peer: int, index: int, nbytes: int) -> NDArray[np.uint8]:
        """Return at least `nbytes` bytes for what `peer` sends of chunk `index` to be added."""
        return self._grown(self._arrivals[peer], index % SUM_SLOTS, nbytes)

    def release(self) -> None:
        """Give memory back at once, not when the garbage collector comes to it.

        The node's and the peers' partials may be many megabytes, and views of the node's memory
        keep it mapped.
        """
        for kept in (self._partials, self._arrivals, self._staged, self._results):
            kept.clear()

    def _grown(self, slots: list[NDArray[np.uint8]], at: int, nbytes: int) -> NDArray[np.uint8]:
        if slots[at].nbytes < nbytes:
            slots[at] = np.empty(nbytes, np.uint8)
            self.growths += 1
        return slots[at]


def _elements(slot: NDArray[np.uint8], chunk: Chunk, begin: int, end: int) -> Array:
    kernel, first = chunk.collective.kernel, chunk.program.begin
    itemsize = kernel.itemsize
    return slot[(begin - first) * itemsize : (end - first) * itemsize].view(kernel.storage)
