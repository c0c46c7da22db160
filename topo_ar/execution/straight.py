"""A one-chunk all-reduce through one owner per node, done in a straight line.

Owners exchange directly, or round by round with one other at a time.

For a small tensor the turns of the pipeline's lanes cost far more than the message. This does the
same work on the same counters, slots and streams, so that other ranks may run the same chunk in
their lanes; where something does not come soon, the lanes take over at the point that was reached.
"""

import ctypes
import os
import select
from collections.abc import Sequence

import numpy as np

from topo_ar.execution.flight import Chunk, Collective
from topo_ar.execution.futex import Sleep
from topo_ar.execution.line import Line, collective_of
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.slots import SUM_SLOTS
from topo_ar.execution.transports.segment import (
    FINGERPRINT_SLOTS,
    FUTEX,
    RESULT_SLOTS,
    RESULT_WINDOW,
    STAGING_SLOTS,
    Counter,
)
from topo_ar.execution.transports.tcp import BadFrame, Flow, Kind, PeerGone, frame_header
from topo_ar.planning.schedule import Stage

_YIELDS = 20
# The lanes look for dead ranks; until they take over nobody does.
_NAP_S = 0.02
_PUBLISHED, _COPIED_IN, _REDUCED = Counter.PUBLISHED, Counter.COPIED_IN, Counter.REDUCED
_COPIED_OUT, _ASLEEP, _FINGERPRINTS = Counter.COPIED_OUT, Counter.ASLEEP, Counter.FINGERPRINTS
_memmove, _yield = ctypes.memmove, os.sched_yield


class Straight:
    """Runs lines on the thread that drives the loop, while the pipeline is idle.

    Parameters
    ----------
    pipeline : Pipeline
        Whose counters, slots and flows are used.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        node = self._node = pipeline.node
        self._words = [segment.words for segment in node.segments]
        self._others = [peer.segment.words for peer in node.peers]
        self._mine = node.owned.segment.words
        self._local_rank = node.local_rank
        self._nap = Sleep(_NAP_S)
        self._free = 0  # the slots of chunks before this one are free
        self._asleep_at = node.owned.segment.asleep_at

    def run(self, line: Line, number: int, pointer: int) -> Collective | None:
        """All-reduce the contiguous memory at `pointer`; return what the lanes have to finish.

        Parameters
        ----------
        line : Line
            What to do.
        number : int
            Of the collective.
        pointer : int
            Address of the tensor; it must stay valid until the collective is done.

        Raises
        ------
        ExecutionError
            If a peer is gone or runs another collective.
        """
        pipeline = self._pipeline
        index = pipeline.end
        if (index >= self._free and not self._frees(index)) or pipeline.spans is not None:
            collective = collective_of(line, number, pointer)
            pipeline.enqueue(collective)
            return collective
        if line.growths != pipeline.slots.growths:
            line.look(pipeline)
        mine, after = self._mine, index + 1
        mine[_FINGERPRINTS + number % FINGERPRINT_SLOTS] = line.fingerprint
        mine[Counter.SOURCES + number % FINGERPRINT_SLOTS] = 0
        _memmove(line.staging[index % STAGING_SLOTS], pointer, line.nbytes)
        if line.owner == self._local_rank:
            mine[_COPIED_IN] = after
            left = self._own(line, index, number, pointer)
            if left is not None:
                return left
        else:
            # Published before, for the owner to be the last, who wakes the others.
            mine[_PUBLISHED] = mine[_REDUCED] = mine[_COPIED_IN] = after
            for words in self._others:
                if words[_ASLEEP]:
                    self._rouse(after, _COPIED_IN, _REDUCED)
                    break
            owner = self._words[line.owner]
            for _ in range(_YIELDS):
                if owner[_PUBLISHED] > index:
                    break
                _yield()
            else:
                if not self._sleeps_until(_PUBLISHED, index, [owner]):
                    collective = collective_of(line, number, pointer)
                    pipeline.adopt(collective, published=True)
                    return collective
            _memmove(pointer, line.result[index % RESULT_SLOTS], line.nbytes)
        pipeline.skip()
        mine[_COPIED_OUT] = after
        for words in self._others:
            if words[_ASLEEP] & 1 << _COPIED_OUT:
                self._rouse(after, _COPIED_OUT)
                break
        return None

    def _frees(self, index: int) -> bool:
        """Tell whether the slots of chunk `index` are free, as the lanes would."""
        least = self._node.least
        self._free = min(least(_REDUCED) + STAGING_SLOTS, least(_COPIED_OUT) + RESULT_WINDOW)
        return index < self._free

    def _rouse(self, after: int, *counters: int) -> None:
        """Wake those who sleep for one of `counters` that this rank has moved, as a lane would."""
        for counter in counters:
            self._node.advance(counter, after)

    def _own(self, line: Line, index: int, number: int, pointer: int) -> Collective | None:
        pipeline, mine, kernel = self._pipeline, self._mine, line.kernel
        after = index + 1
        if not self._brought(index):
            collective = collective_of(line, number, pointer)
            pipeline.adopt(collective)
            return collective
        if self._node.differing(number, line.fingerprint):
            pipeline.check_fingerprints(collective_of(line, number, pointer))
        sources = line.sources[index % STAGING_SLOTS]
        result = line.results[index % RESULT_SLOTS]
        with np.errstate(all="ignore"):
            if line.flows or line.legs:
                kernel.reduce_in_node(line.totals[index % SUM_SLOTS], sources)
                mine[_REDUCED] = after
                exchange = self._exchange if line.flows else self._relay
                left = exchange(line, index, number, pointer)
                if left is not None:
                    return left
                if line.flows:
                    kernel.reduce_between(result, line.terms[index % SUM_SLOTS], line.rail)
            else:
                kernel.reduce_all(result, sources)
                mine[_REDUCED] = after
        mine[_PUBLISHED] = after
        for words in self._others:
            if words[_ASLEEP]:
                self._rouse(after, _PUBLISHED, _REDUCED)
                break
        _memmove(pointer, line.result[index % RESULT_SLOTS], line.nbytes)
        return None

    def _exchange(self, line: Line, index: int, number: int, pointer: int) -> Collective | None:
        """Send the node's sum to the others and read theirs; return what the lanes took over."""
        pipeline = self._pipeline
        slot = index % SUM_SLOTS
        header = frame_header(Kind.EXCHANGE, line.number, index, line.fingerprint, line.nbytes)
        adopted: list[Chunk] = []

        def sent() -> None:
            if adopted:
                pipeline.frame_sent(index, adopted[0])

        unsent = 0
        for flow in line.flows:
            flow.queue(header, line.payloads[slot], sent)
            flow.flush()
            unsent += flow.wants_out
        arrived = 0
        if not unsent:
            for flow, target in zip(line.flows, line.arrivals[slot], strict=True):
                if not _arrives(flow, header, target):
                    break
                arrived += 1
        if arrived == len(line.flows):
            return None
        collective = collective_of(line, number, pointer)
        chunk = pipeline.adopt(collective, reduced=True)
        adopted.append(chunk)
        pipeline.frames_unsent(chunk, unsent)
        for flow in line.flows[:arrived]:
            flow.outstanding -= 1
            pipeline.arrived(flow, Kind.EXCHANGE, index)
        return collective

    def _relay(self, line: Line, index: int, number: int, pointer: int) -> Collective | None:
        """Go from leg to leg; return what the lanes took over."""
        pipeline, fingerprint = self._pipeline, line.fingerprint
        legs = line.legs[index % RESULT_SLOTS]
        adopted: list[Chunk] = []
        arrived: list[Flow] = []
        unsent = 0

        def sent() -> None:
            nonlocal unsent
            unsent -= 1
            if adopted:
                pipeline.frame_sent(index, adopted[0])

        for leg in legs:
            for flow, kind, segment, payload in leg.sends:
                unsent += 1
                header = frame_header(kind, segment, index, fingerprint, payload.nbytes)
                flow.queue(header, payload, sent)
                flow.flush()
            if not unsent:
                if leg.comes is None:
                    return None
                flow, kind, segment, target = leg.comes
                header = frame_header(kind, segment, index, fingerprint, target.nbytes)
                if _arrives(flow, header, target):
                    arrived.append(flow)
                    if leg.add is not None:
                        leg.add()
                    continue
            break
        collective = collective_of(line, number, pointer)
        chunk = pipeline.adopt(collective, reduced=True)
        adopted.append(chunk)
        pipeline.frames_unsent(chunk, unsent)
        relay = line.program[0].relay
        assert relay is not None
        pipeline.relays.resume(chunk, relay, arrived)
        return collective

    def _brought(self, index: int) -> bool:
        """Wait until all co-located ranks have brought their input, not for long."""
        for _ in range(_YIELDS):
            for words in self._others:
                if words[_COPIED_IN] <= index:
                    break
            else:
                return True
            _yield()
        return self._sleeps_until(_COPIED_IN, index, self._others)

    def _sleeps_until(self, counter: int, index: int, words: "Sequence[memoryview[int]]") -> bool:
        mine, mask = self._mine, FUTEX | 1 << counter
        mine[_ASLEEP] = mask
        if not _passed(counter, index, words):
            self._nap.while_equal(self._asleep_at, mask)
        mine[_ASLEEP] = 0
        return _passed(counter, index, words)


def _passed(counter: int, index: int, words: "Sequence[memoryview[int]]") -> bool:
    for each in words:  # noqa: SIM110 - a generator costs more than the loop
        if each[counter] <= index:
            return False
    return True


def _arrives(flow: Flow, header: bytes, target: memoryview) -> bool:
    """Read a frame; return False when it does not come soon, or is another one."""
    for _ in range(_YIELDS):
        if flow.receive_known(header, target):
            return True
        if flow.unexpected:
            return False
        _yield()
    poll = select.poll()
    poll.register(flow.sock, select.POLLIN)
    while poll.poll(1e3 * _NAP_S):
        if flow.receive_known(header, target):
            return True
        if flow.unexpected:
            return False
    return False


def stage_of(error: BaseException) -> Stage:
    """Return in which stage of a line an exception was met."""
    between = isinstance(error, PeerGone | BadFrame)
    return Stage.INTER_EXCHANGE if between else Stage.INTRA_REDUCE_SCATTER
