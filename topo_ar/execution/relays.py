"""The rounds of chunks whose sums are passed on between nodes; see `relay_program`.

Rounds of a chunk follow each other, and those of several chunks overlap: what arrives lets its
chunk go on at once, whichever chunk the lanes are at. Only the round that makes the result waits
for its turn in the lanes. A rank contributes to a chunk only when the one `SUM_SLOTS` before it is
added up and sent, so that everything for that one is on its way before.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from topo_ar.execution.flight import Chunk
from topo_ar.execution.kernels import Array
from topo_ar.execution.relay_program import Relay, Sending, Sum
from topo_ar.execution.transports.tcp import BadFrame, Flow, Kind

if TYPE_CHECKING:
    from topo_ar.execution.pipeline import Pipeline


class Relays:
    """Does for a pipeline what chunks with a `Relay` need.

    Parameters
    ----------
    pipeline : Pipeline
        Whose slots and flows are used.
    """

    def __init__(self, pipeline: "Pipeline") -> None:
        self._pipeline = pipeline

    def begin(self, index: int, chunk: Chunk, relay: Relay) -> None:
        """Send what is sent of the sum of the node, which is in its slot."""
        chunk.round = 0
        self._send_sums(index, chunk, relay.first)
        self._go_on(index, chunk, relay)

    def finish(self, index: int, chunk: Chunk, relay: Relay) -> None:
        """Make the results of this rank, if it owns any: all that they take is there."""
        if chunk.round < relay.adding:
            last = relay.rounds[chunk.round]
            for each in last.sums:
                self._add(index, chunk, relay, each, final=True)
            chunk.wire_begin = time.monotonic()
            chunk.round += 1
            self._send_results(index, chunk, last.sends)
        self._go_on(index, chunk, relay)

    def destination(
        self, flow: Flow, kind: int, index: int, chunk: Chunk, relay: Relay, number: int
    ) -> memoryview | None:
        """Return where a frame's payload belongs, or None until that place is free."""
        place = relay.places.get((flow.rank, number))
        if place is None or flow.outstanding <= 0 or place.result != (kind == Kind.RESULT):
            raise BadFrame(flow.rank, f"of chunk {index} that nobody waits for")
        pipeline = self._pipeline
        if place.result:
            if not pipeline.node.result_free(index):
                return None
            return pipeline.slots.result(index, chunk, place.begin, place.end).data.cast("B")
        if not pipeline.arrival_free(index):
            return None
        size = place.end - place.begin
        return self._arrival(flow.rank, index, chunk, relay, place.begin, size).data

    def arrived(self, flow: Flow, index: int, chunk: Chunk, relay: Relay) -> None:
        """Count a complete frame, and go on with what waited for it."""
        place = relay.places[flow.rank, flow.segment]
        at = relay.rounds[place.round]
        if at.final:
            chunk.awaited -= 1
            missing = chunk.awaited
        else:
            chunk.missing[place.round] -= 1
            missing = chunk.missing[place.round]
            self._go_on(index, chunk, relay)
        if not missing:
            self._pipeline.span(at.stage, index, "wire", chunk.wire_begin)

    def _go_on(self, index: int, chunk: Chunk, relay: Relay) -> None:
        """Do the rounds whose turn it is and for which everything has come."""
        rounds = relay.rounds
        while 0 <= chunk.round < len(rounds):
            at = rounds[chunk.round]
            if at.final or chunk.missing[chunk.round]:
                return
            if chunk.round < relay.adding:
                for each in at.sums:
                    self._add(index, chunk, relay, each, final=False)
                self._send_sums(index, chunk, at.sends)
                chunk.awaited -= 1
            else:
                self._send_results(index, chunk, at.sends)
                chunk.gathering -= 1
            chunk.round += 1

    def _add(self, index: int, chunk: Chunk, relay: Relay, each: Sum, *, final: bool) -> None:
        kernel, pipeline = chunk.collective.kernel, self._pipeline
        started = time.monotonic()
        own = self._own(index, chunk, each.begin, each.end)
        size = each.end - each.begin
        sources = [
            own
            if peer == pipeline.rank
            else self._arrival(peer, index, chunk, relay, each.arrive_begin, size).view(
                kernel.partial
            )
            for peer in each.members
        ]
        if final:
            result = pipeline.slots.result(index, chunk, each.begin, each.end)
            kernel.reduce_between(result, sources, each.members)
        else:
            kernel.reduce_partials(own, sources)
        pipeline.span(each.stage, index, "add", started)

    def _own(self, index: int, chunk: Chunk, begin: int, end: int) -> Array:
        first = chunk.program.shard_begin
        return self._pipeline.slots.partial(index, chunk)[begin - first : end - first]

    def _arrival(
        self, peer: int, index: int, chunk: Chunk, relay: Relay, begin: int, size: int
    ) -> NDArray[np.uint8]:
        itemsize = chunk.collective.kernel.itemsize
        slot = self._pipeline.slots.arrivals(peer, index, relay.arriving_numel * itemsize)
        return slot[begin * itemsize : (begin + size) * itemsize]

    def _send_sums(self, index: int, chunk: Chunk, sends: Sequence[Sending]) -> None:
        for each in sends:
            piece = self._own(index, chunk, each.begin, each.end)
            self._pipeline.send(each.peer, Kind.CONTRIBUTION, index, chunk, piece, each.number)

    def _send_results(self, index: int, chunk: Chunk, sends: Sequence[Sending]) -> None:
        for each in sends:
            piece = self._pipeline.slots.result(index, chunk, each.begin, each.end)
            self._pipeline.send(each.peer, Kind.RESULT, index, chunk, piece, each.number)
