"""The pipeline of chunks in one rank: copy in, reduce, exchange, add, publish, copy out.

Chunks of all collectives form one endless sequence, so the first chunk of a bucket moves while the
tail of the one before is still on the wire. Each lane handles chunks in order and looks only at its
next one; memory is a few slots per lane, and a lane waits until its slot is free again.

What `recovery` relies on: a chunk of the caller's buffer is untouched input until `next_out` has
passed it, and the final result from then on; a result stays in its slot on every node that has had
it until all ranks of the job have copied it out (see `RESULT_SLOTS`).
"""

import os
import time
from collections.abc import Callable

import numpy as np

from topo_ar.errors import ExecutionError
from topo_ar.execution.errand import Errand
from topo_ar.execution.flight import Chunk, Collective, Span
from topo_ar.execution.kernels import Array
from topo_ar.execution.program import Segment
from topo_ar.execution.relays import Relays
from topo_ar.execution.shared_inputs import SharedInputs
from topo_ar.execution.slots import SUM_SLOTS, Slots
from topo_ar.execution.transports.segment import Counter
from topo_ar.execution.transports.shm import Node
from topo_ar.execution.transports.tcp import BadFrame, Flow, Kind
from topo_ar.planning.schedule import Stage


class Pipeline:
    """Moves chunks through the lanes of one rank; `turn` does what can be done now.

    Parameters
    ----------
    node : Node
        The co-located ranks.
    rank : int
        This rank in the schedule's numbering.
    flows : dict
        A flow to every peer on another node that a program may name.
    slot_nbytes : int
        Capacity of one slot.
    shared : SharedInputs
        Buffers that are read where they lie.
    """

    def __init__(
        self,
        node: Node,
        rank: int,
        flows: dict[int, Flow],
        slot_nbytes: int,
        shared: SharedInputs,
    ) -> None:
        self.node = node
        self.rank = rank
        self.flows = flows
        self.slots = Slots(node, rank, flows, slot_nbytes)
        self.end = 0
        self.next_in = self.next_reduce = self.next_add = self.next_publish = self.next_out = 0
        self.finished: Callable[[Collective], None] = lambda collective: None
        self.spans: list[Span] | None = None
        self.shared = shared
        self.errand: Errand | None = None
        self._used: dict[int, Flow] = {}  # flows that a program has named so far
        self._relays = Relays(self)
        self._next_free = 0
        self._frames = 0  # expected from peers or not yet sent to them
        self.chunks: dict[int, Chunk] = {}

    @property
    def busy(self) -> bool:
        """Whether a chunk is unfinished, bytes wait to be sent or an errand is under way."""
        return self.next_out < self.end or self._frames > 0 or self.errand is not None

    def enqueue(self, collective: Collective) -> None:
        """Append the chunks of `collective`; every rank does so in the same order."""
        collective.first = self.end
        for program in collective.program:
            chunk = Chunk(collective, program, program.awaited, program.gathering)
            if program.relay is not None:
                chunk.missing = [each.frames for each in program.relay.rounds]
            for peer, frames in program.expected:
                flow = self._used[peer] = self.flows[peer]
                flow.outstanding += frames
                self._frames += frames
            self.chunks[self.end] = chunk
            self.end += 1

    def skip(self) -> None:
        """Count a chunk that was done outside the lanes while they were idle."""
        self._pass(self.end + 1, published=True)
        self.end = self.next_out = self._next_free = self.end + 1

    def adopt(
        self, collective: Collective, *, reduced: bool = False, published: bool = False
    ) -> Chunk:
        """Take over a collective of one chunk that was begun outside the lanes.

        Its input is in the staging slot; `reduced` says that the sum of the node is in its slot and
        on its way, `published` that this rank has nothing left to do but to copy out.
        """
        index = self.end
        self.enqueue(collective)
        self.next_in = index + 1
        if reduced or published:
            self._pass(index + 1, published)
        return self.chunks[index]

    def _pass(self, index: int, published: bool) -> None:
        self.next_in = self.next_reduce = index
        if published:
            self.next_add = self.next_publish = index

    def abandon(self) -> None:
        """Forget every chunk, and what was still to come for it: the lanes run no more."""
        self.chunks.clear()
        self.next_in = self.next_reduce = self.next_add = self.next_publish = self.end
        self.next_out = self.end
        self._frames = 0

    def release(self) -> None:
        """Give slots back; nothing runs again."""
        self.chunks.clear()
        self.slots.release()

    def turn(self) -> bool:
        """Try every lane once, nearest to the wire first; return whether anything moved."""
        if self.errand is not None:
            return self.errand.turn()
        moved = False
        if self._frames:
            for flow in self._used.values():
                if flow.wants_out:
                    moved |= flow.flush()
                if flow.outstanding:
                    moved |= flow.receive(self)
        if self.next_out == self.end:
            return moved
        if self.next_add < self.next_reduce:
            moved |= self._add()
        if self.next_publish < self.next_add:
            moved |= self._publish()
        if self.next_reduce < self.end:
            moved |= self._reduce()
        if self.next_in < self.end:
            moved |= self._copy_in()
        if self.next_out < self.next_publish:
            moved |= self._copy_out()
        return moved

    def _copy_in(self) -> bool:
        index, node = self.next_in, self.node
        if not node.staging_free(index):
            return False
        chunk = self.chunks[index]
        if index == chunk.collective.first:
            collective = chunk.collective
            node.announce(collective.number, collective.fingerprint, collective.source)
        if node.peers and not chunk.collective.source:
            begin = time.monotonic()
            program = chunk.program
            self._stage(index, chunk, program.begin, program.shard_begin)
            self._stage(index, chunk, program.shard_end, program.end)
            self.span(Stage.INTRA_REDUCE_SCATTER, index, "copy in", begin)
        self.next_in = index + 1
        node.advance(Counter.COPIED_IN, self.next_in)
        if self.flows and node.least(Counter.COPIED_IN) <= index:
            # Ranks that share this core shall bring this chunk before this one brings the next, for
            # the wire not to wait.
            os.sched_yield()
        return True

    def _stage(self, index: int, chunk: Chunk, begin: int, end: int) -> None:
        """Copy a part of the input that is another rank's shard to where that rank reads it."""
        if end > begin:
            slot = self.slots.staged(index, chunk, begin, end)[self.node.local_rank]
            np.copyto(slot, chunk.collective.buffer[begin:end])

    def _reduce(self) -> bool:
        index, node = self.next_reduce, self.node
        chunk = self.chunks[index]
        program = chunk.program
        if program.shard_end > program.shard_begin:
            if node.least(Counter.COPIED_IN) <= index or not self._reducible(index, chunk):
                return False
            if chunk.collective.inputs is None:
                self.check_fingerprints(chunk.collective)
                chunk.collective.inputs = self._inputs(chunk.collective)
            begin = time.monotonic()
            self._reduce_shard(index, chunk)
            self.span(Stage.INTRA_REDUCE_SCATTER, index, "reduce", begin)
        self.next_reduce = index + 1
        node.advance(Counter.REDUCED, self.next_reduce)
        return True

    def _reducible(self, index: int, chunk: Chunk) -> bool:
        if chunk.program.is_inside:
            return self.node.result_free(index)
        before = self.chunks.get(index - SUM_SLOTS)
        return before is None or (before.added and before.unsent == 0)

    def _inputs(self, collective: Collective) -> dict[int, Array]:
        """Return the inputs that this rank reads where they lie, by local rank."""
        buffer = collective.buffer
        found = {
            local: self.shared.view(local, source, buffer.nbytes).view(buffer.dtype)
            for local, source in enumerate(self.node.sources(collective.number))
            if source and local != self.node.local_rank
        }
        found[self.node.local_rank] = buffer
        return found

    def check_fingerprints(self, collective: Collective) -> None:
        """Refuse a collective that co-located ranks take for another one."""
        wrong = self.node.differing(collective.number, collective.fingerprint)
        if wrong:
            raise ExecutionError(
                f"collective {collective.number}: ranks {list(wrong)} run another size, dtype, "
                f"operation or plan than rank {self.rank}; all ranks must call all_reduce with "
                "equal arguments in equal order",
                ranks=wrong,
                stage=Stage.INTRA_REDUCE_SCATTER,
            )

    def _reduce_shard(self, index: int, chunk: Chunk) -> None:
        program, collective = chunk.program, chunk.collective
        begin, end = program.shard_begin, program.shard_end
        kernel = collective.kernel
        assert collective.inputs is not None
        sources = list(self.slots.staged(index, chunk, begin, end))
        for local, whole in collective.inputs.items():
            sources[local] = whole[begin:end]
        if program.is_inside:
            out = self.slots.result(index, chunk, begin, end)
            kernel.reduce_all(out, sources)
            return
        partial = self.slots.partial(index, chunk)
        kernel.reduce_in_node(partial, sources)
        chunk.wire_begin = chunk.wire_begin or time.monotonic()
        if program.relay is not None:
            self._relays.begin(index, chunk, program.relay)
        for segment in program.segments:
            kind = Kind.CONTRIBUTION if segment.parts else Kind.EXCHANGE
            for peer, first, last in segment.outgoing:
                piece = kernel.piece(partial, first - begin, last - begin)
                self.send(peer, kind, index, chunk, piece, segment.number)

    def _add(self) -> bool:
        index = self.next_add
        chunk = self.chunks[index]
        # Also where this rank has no share: its next contribution must not come too early.
        if chunk.awaited or not self.node.result_free(index):
            return False
        for segment in chunk.program.segments:
            if segment.part[1] > segment.part[0]:
                self._add_segment(index, chunk, segment)
        if chunk.program.relay is not None:
            self._relays.finish(index, chunk, chunk.program.relay)
        chunk.added = True
        self.next_add = index + 1
        return True

    def _add_segment(self, index: int, chunk: Chunk, segment: Segment) -> None:
        kernel = chunk.collective.kernel
        begin, end = segment.part
        first = chunk.program.shard_begin
        started = time.monotonic()
        sources = [
            kernel.piece(self.slots.partial(index, chunk), begin - first, end - first)
            if peer == self.rank
            else self.slots.arrival(peer, index, chunk, segment).view(kernel.partial)
            for peer in segment.rail
        ]
        out = self.slots.result(index, chunk, begin, end)
        kernel.reduce_between(out, sources, segment.rail)
        self.span(segment.stage, index, "add", started)
        if segment.parts:
            chunk.wire_begin = time.monotonic()
            for peer in segment.rail:
                if peer != self.rank:
                    self.send(peer, Kind.RESULT, index, chunk, out, segment.number)

    def _publish(self) -> bool:
        index = self.next_publish
        if self.chunks[index].gathering:
            return False
        self.next_publish = index + 1
        self.node.advance(Counter.PUBLISHED, self.next_publish)
        return True

    def _copy_out(self) -> bool:
        index, node = self.next_out, self.node
        chunk = self.chunks[index]
        program = chunk.program
        for owner in program.owners:
            if node.value(Counter.PUBLISHED, owner) <= index:
                return False
        begin = time.monotonic()
        target = chunk.collective.buffer[program.begin : program.end]
        np.copyto(target, self.slots.result(index, chunk, program.begin, program.end))
        self.next_out = index + 1
        self.span(Stage.INTRA_ALL_GATHER, index, "copy out", begin)
        chunk.copied_out = True
        self._retire(index, chunk)
        if self.next_out == chunk.collective.end:
            self.finished(chunk.collective)
        return True

    def destination(
        self, flow: Flow, kind: int, index: int, fingerprint: int, segment: int
    ) -> memoryview | None:
        """Return where a frame's payload belongs, or None until that place is free."""
        if kind == Kind.GROUP:
            raise ExecutionError(
                f"rank {flow.rank} exchanges what is compressed where rank {self.rank} all-reduces;"
                " all ranks must make equal calls in equal order",
                ranks=(flow.rank,),
                stage=Stage.INTER_EXCHANGE,
            )
        if index >= self.end:
            return None
        chunk = self.chunks.get(index)
        if chunk is None:
            raise BadFrame(flow.rank, f"of chunk {index}, which is done")
        if fingerprint != chunk.collective.fingerprint:
            raise ExecutionError(
                f"collective {chunk.collective.number}: rank {flow.rank} runs another size, dtype, "
                f"operation or plan than rank {self.rank}; all ranks must call all_reduce with "
                "equal arguments in equal order",
                ranks=(flow.rank,),
                stage=Stage.INTER_EXCHANGE,
            )
        if not chunk.wire_begin:
            chunk.wire_begin = time.monotonic()
        if chunk.program.relay is not None:
            relay = chunk.program.relay
            return self._relays.destination(flow, kind, index, chunk, relay, segment)
        place = chunk.program.segment(segment, flow.rank)
        if place is None or flow.outstanding <= 0 or (kind == Kind.RESULT and not place.parts):
            raise BadFrame(flow.rank, f"of chunk {index} that nobody waits for")
        if kind == Kind.RESULT:
            if not self.node.result_free(index):
                return None
            begin, end = place.parts[place.rail.index(flow.rank)]
            return self.slots.result(index, chunk, begin, end).data.cast("B")
        if not self.arrival_free(index):
            return None
        return self.slots.arrival(flow.rank, index, chunk, place).data

    def arrived(self, flow: Flow, kind: int, index: int) -> None:
        """Count a complete frame."""
        self._frames -= 1
        chunk = self.chunks[index]
        if chunk.program.relay is not None:
            self._relays.arrived(flow, index, chunk, chunk.program.relay)
            return
        if kind == Kind.RESULT:
            chunk.gathering -= 1
            if not chunk.gathering:
                self.span(Stage.INTER_ALL_GATHER, index, "wire", chunk.wire_begin)
            return
        chunk.awaited -= 1
        if not chunk.awaited:
            self.span(chunk.program.segments[0].stage, index, "wire", chunk.wire_begin)

    def send(
        self, peer: int, kind: Kind, index: int, chunk: Chunk, payload: Array, segment: int
    ) -> None:
        """Queue a frame of a chunk; `payload` stays as it is until it has left."""
        self.frames_unsent(chunk, 1)

        def done() -> None:
            self.frame_sent(index, chunk)

        self.flows[peer].send(
            kind, index, chunk.collective.fingerprint, payload.data.cast("B"), done, segment
        )

    def frames_unsent(self, chunk: Chunk, count: int) -> None:
        """Count frames that are queued."""
        chunk.unsent += count
        self._frames += count

    def frame_sent(self, index: int, chunk: Chunk) -> None:
        """Count a frame that has left."""
        chunk.unsent -= 1
        self._frames -= 1
        self._retire(index, chunk)

    def _retire(self, index: int, chunk: Chunk) -> None:
        """Forget a chunk that is done; let the node write over results nobody needs any more."""
        if not chunk.copied_out:
            return
        if chunk.unsent == 0:
            self.chunks.pop(index, None)
        elif chunk.program.shares_results:
            # Shards of the slot's next chunk lie elsewhere: its owners would write over ours.
            return
        if index == self._next_free:
            self._free()

    def _free(self) -> None:
        """Free the results of the next chunk, and of those after it that were ready before it."""
        after = self._next_free + 1
        while after < self.next_out:
            unsent = self.chunks.get(after)
            if unsent is not None and unsent.program.shares_results:
                break
            after += 1
        self._next_free = after
        self.node.advance(Counter.COPIED_OUT, after)

    def arrival_free(self, index: int) -> bool:
        """Tell whether the slots for what arrives of chunk `index` to be added are free."""
        return index < self.next_add + SUM_SLOTS

    def span(self, stage: Stage, index: int, what: str, begin: float) -> None:
        """Record what was done since `begin`, if that is asked for."""
        if self.spans is not None:
            self.spans.append(Span(stage, index, what, begin, time.monotonic()))
