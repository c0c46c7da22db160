"""Exposed communication: when the buckets of a backward pass are reduced, and what sticks out.

Buckets are reduced in one order. A plain all-reduce occupies everything (one queue). A hierarchy
has three: the ports inside the node, the codec and the wire between nodes; chunks pass through
reduce-scatter, codec, wire and all-gather in order, and the chunks of one bucket follow those of
the bucket before without a gap. The arithmetic is generic, so that tests can be exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """Seconds for which a chunk occupies the ports (twice), the codec and the wire.

    `lag` is for how long it is still under way when the next one may follow on the wire.
    """

    scatter: float
    codec: float
    wire: float
    gather: float
    lag: float = 0


@dataclass(frozen=True, slots=True)
class Job:
    """The reduction of one bucket.

    Attributes
    ----------
    ready : float
        Seconds after the begin of backward at which the hook is called.
    chunks : tuple of Chunk
        What it occupies, in order.
    alone : bool
        It shares nothing: it begins when all before it is done, and the next begins after it.
    """

    ready: float
    chunks: tuple[Chunk, ...]
    alone: bool = False

    @property
    def seconds_alone(self) -> float:
        """How long after 0 it is done with nothing before it."""
        return finish([self])[0]

    def scaled(self, scale: float, ready: float, codec: Sequence[float] = ()) -> "Job":
        """Return it with all times multiplied, `ready` added, and each chunk's `codec` seconds."""
        coded = codec or [chunk.codec * scale for chunk in self.chunks]
        chunks = (
            Chunk(c.scatter * scale, own, c.wire * scale, c.gather * scale, c.lag * scale)
            for c, own in zip(self.chunks, coded, strict=True)
        )
        return Job(ready + self.ready * scale, tuple(chunks), self.alone)


def one_queue(ready: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return when each bucket is done: ``end_i = max(ready_i, end_(i-1)) + seconds_i``."""
    ends: list[float] = []
    end: float = 0
    for begin, length in zip(ready, seconds, strict=True):
        end = max(begin, end) + length
        ends.append(end)
    return ends


def finish(jobs: Sequence[Job]) -> list[float]:
    """Return when each job is done, in seconds after the begin of backward.

    Codec and wire take chunks in order. The ports inside the node serve reduce-scatters first, and
    an all-gather in service waits for them: the wire is fed as early as it can be, and no order of
    service ends earlier. The end of the last job never grows when anything gets shorter.
    """
    ends: list[float] = []
    begin: float = 0
    waiting: list[Job] = []
    for job in jobs:
        if not job.alone:
            waiting.append(job)
            continue
        ends += _overlapped(waiting, begin)
        waiting = []
        (begin,) = _overlapped([job], max(job.ready, ends[-1] if ends else begin))
        ends.append(begin)
    return ends + _overlapped(waiting, begin)


def exposed_seconds(jobs: Sequence[Job], backward: float) -> float:
    """Return how long after `backward` seconds of backward the last job is done, at least 0."""
    return max(0, max(finish(jobs), default=0) - backward)


def _overlapped(jobs: Sequence[Job], begin: float) -> list[float]:
    """Return the ends of jobs that share the ports, the codec and the wire from `begin` on."""
    scatters: list[tuple[float, float]] = []
    arrivals: list[tuple[float, float]] = []
    ports = codec = wire = begin
    for job in jobs:
        for chunk in job.chunks:
            start = max(ports, job.ready)
            ports = start + chunk.scatter
            scatters.append((start, ports))
            codec = max(codec, ports) + chunk.codec
            wire = max(wire, codec) + chunk.wire
            arrivals.append((wire + chunk.lag, chunk.gather))
    gathered = iter(_gathers(scatters, arrivals))
    ends: list[float] = []
    for job in jobs:
        end = max(job.ready, ends[-1] if ends else begin)
        for _ in job.chunks:
            end = next(gathered)
        ends.append(end)
    return ends


def _gathers(
    scatters: Sequence[tuple[float, float]], arrivals: Sequence[tuple[float, float]]
) -> list[float]:
    """Return the ends of all-gathers that get the ports' time between the reduce-scatters."""
    ends: list[float] = []
    now: float = 0
    following = 0
    for arrival, length in arrivals:
        now = max(now, arrival)
        left = length
        while left > 0 and following < len(scatters):
            start, stop = scatters[following]
            if start > now and start - now >= left:
                break
            if stop > now:
                left -= max(0, start - now)
                now = stop
            following += 1
        now += left
        ends.append(now)
    return ends
