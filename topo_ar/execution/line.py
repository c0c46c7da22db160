"""What a small all-reduce past the lanes needs: one program with its views of all slots.

Everything that does not change from call to call is made once, because eight ranks that share two
cores run each line of Python with a cold cache.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from topo_ar.execution.flight import Collective
from topo_ar.execution.kernels import Array, Kernel
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.program import ChunkProgram
from topo_ar.execution.relay_program import Relay, Sending, Sum
from topo_ar.execution.slots import SUM_SLOTS
from topo_ar.execution.transports.segment import RESULT_SLOTS, STAGING_SLOTS
from topo_ar.execution.transports.tcp import Flow, Kind


def is_straight(program: Sequence[ChunkProgram]) -> bool:
    """Tell whether a program is one chunk that one rank of the node sums up and exchanges whole."""
    if len(program) != 1 or len(program[0].owners) != 1:
        return False
    relay = program[0].relay
    if relay is not None:
        return all(each.frames == 1 for each in relay.rounds)
    segments = program[0].segments
    return not segments or (len(segments) == 1 and not segments[0].parts)


@dataclass(frozen=True, slots=True)
class Leg:
    """What an owner sends, the frame that comes then, and what it adds up of it.

    Frames are a flow, a kind, the number of their step, and their payload or its place. Of a last
    leg nothing comes.
    """

    sends: tuple[tuple[Flow, Kind, int, memoryview], ...]
    comes: tuple[Flow, Kind, int, memoryview] | None
    add: Callable[[], None] | None


class Line:
    """One program with its views of all slots; made by `Loop.line`.

    Parameters
    ----------
    pipeline : Pipeline
        Whose slots and flows are used.
    program : tuple of ChunkProgram
        For which `is_straight` is true.
    kernel : Kernel
        What sums.
    fingerprint : int
        Of the collective.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        program: tuple[ChunkProgram, ...],
        kernel: Kernel,
        fingerprint: int,
    ) -> None:
        self.program, self.kernel, self.fingerprint = program, kernel, fingerprint
        self.nbytes = (program[0].end - program[0].begin) * kernel.itemsize
        self.owner = program[0].owners[0]
        self.flows: list[Flow] = []
        self.legs: list[tuple[Leg, ...]] = []
        if self.owner == pipeline.node.local_rank and program[0].segments:
            segment = program[0].segments[0]
            self.number, self.rail = segment.number, segment.rail
            self.flows = [pipeline.flows[p] for p in segment.rail if p != pipeline.rank]
        # Lines are made while others are in flight, for which slots must not grow.
        self.growths = -1

    def look(self, pipeline: Pipeline) -> None:
        """Take views of the slots; those between the nodes grow with the largest collective."""

        def view(slot: NDArray[np.uint8]) -> Array:
            return slot[: self.nbytes].view(self.kernel.storage)

        node = pipeline.node
        mine = node.owned.segment
        self.staging = [mine.staging(slot).ctypes.data for slot in range(STAGING_SLOTS)]
        self.sources = [
            [view(segment.staging(slot)) for segment in node.segments]
            for slot in range(STAGING_SLOTS)
        ]
        self.results = [view(node.result(slot)) for slot in range(RESULT_SLOTS)]
        self.result = [array.ctypes.data for array in self.results]
        self.totals: list[Array] = []
        self.terms: list[list[Array]] = []
        self.payloads: list[memoryview] = []
        self.arrivals: list[list[memoryview]] = []
        for slot in range(SUM_SLOTS if self.flows else 0):
            total = view(pipeline.slots.sum(slot))
            places = {
                f.rank: view(pipeline.slots.arrivals(f.rank, slot, self.nbytes)) for f in self.flows
            }
            self.totals.append(total)
            self.terms.append([places.get(peer, total) for peer in self.rail])
            self.payloads.append(total.data.cast("B"))
            self.arrivals.append([places[f.rank].data.cast("B") for f in self.flows])
        relay = self.program[0].relay
        if relay is not None:
            self.legs = [self._legs(pipeline, relay, slot) for slot in range(RESULT_SLOTS)]
        self.growths = pipeline.slots.growths

    def _legs(self, pipeline: Pipeline, relay: Relay, slot: int) -> tuple[Leg, ...]:
        """Return the legs of a relay for the chunks of one slot of results."""
        kernel, size = self.kernel, self.kernel.itemsize
        total = pipeline.slots.sum(slot)[: self.nbytes].view(kernel.storage)
        if slot < SUM_SLOTS:
            self.totals.append(total)
        result = self.results[slot]

        def arrival(peer: int, begin: int, end: int) -> Array:
            memory = pipeline.slots.arrivals(peer, slot, relay.arriving_numel * size)
            return memory[begin * size : end * size].view(kernel.storage)

        def own(each: Sum | Sending) -> Array:
            if each.held is None:
                return total[each.begin : each.end]
            return arrival(each.held.peer, each.held.begin, each.held.begin + each.end - each.begin)

        def sending(each: Sending, *, final: bool) -> tuple[Flow, Kind, int, memoryview]:
            payload = result[each.begin : each.end] if final else own(each)
            kind = Kind.RESULT if final else Kind.CONTRIBUTION
            return pipeline.flows[each.peer], kind, each.number, payload.data.cast("B")

        def adding(each: Sum, *, final: bool) -> Callable[[], None]:
            mine, length = own(each), each.end - each.begin
            sources = [
                mine
                if peer == pipeline.rank
                else arrival(peer, each.arrive_begin, each.arrive_begin + length)
                for peer in each.members
            ]
            if final:
                out = result[each.begin : each.end]
                return partial(kernel.reduce_between, out, sources, each.members)
            into = next(s for s in sources if (s is mine) is not each.exchange)
            return partial(kernel.reduce_partials, into, sources)

        legs, sends = [], tuple(sending(each, final=False) for each in relay.first)
        for at, now in enumerate(relay.rounds):
            (peer, number), place = next(
                (key, place) for key, place in relay.places.items() if place.round == at
            )
            target = (
                result[place.begin : place.end]
                if place.result
                else arrival(peer, place.begin, place.end)
            )
            kind = Kind.RESULT if place.result else Kind.CONTRIBUTION
            comes = (pipeline.flows[peer], kind, number, target.data.cast("B"))
            add = adding(now.sums[0], final=now.final) if now.sums else None
            legs.append(Leg(sends, comes, add))
            done = now.final or at >= relay.adding
            sends = tuple(sending(each, final=done) for each in now.sends)
        return (*legs, Leg(sends, None, None))


def collective_of(line: Line, number: int, pointer: int) -> Collective:
    """Return the collective of a line for the lanes."""
    memory = memoryview((ctypes.c_char * line.nbytes).from_address(pointer)).cast("B")
    return Collective(
        number=number,
        fingerprint=line.fingerprint,
        program=line.program,
        kernel=line.kernel,
        buffer=np.frombuffer(memory, line.kernel.storage),
    )
