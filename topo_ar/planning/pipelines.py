"""Chunks that pass through stages one behind the other, and how many of them are best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that every chunk passes on its way in and once more on its way out.

    Attributes
    ----------
    alpha : float
        Seconds of latency each way.
    slope : float
        Seconds per byte of the buffer each way.
    adding : float
        Seconds per byte more on the way in, where what arrives is added.
    """

    alpha: float
    slope: float
    adding: float = 0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A hierarchy of stages as a pipeline of chunks.

    Attributes
    ----------
    outer : tuple of Stage
        The stages around the middle one, outermost first.
    alpha, slope : float
        Seconds of latency of the middle stage, and seconds per byte for which it is occupied.
    trailing : float
        Seconds per byte for which a chunk is still under way in the middle stage when the next one
        may follow: the two phases of unequal shares use opposite directions of the same ports.
    chunk_seconds : float or None
        As in `Runtime`: latencies are waited for once and each chunk costs every stage this much.
    once : float
        Seconds of latency that chunks pass without occupying anything.
    network : float
        Seconds per byte for which the busiest NICs or uplink are at work.
    message_seconds : float
        What the further messages of a chunk cost the middle stage beside `chunk_seconds`.
    """

    outer: tuple[Stage, ...]
    alpha: float
    slope: float
    trailing: float = 0
    chunk_seconds: float | None = None
    once: float = 0
    network: float = 0
    message_seconds: float = 0

    def with_calls(self, call_seconds: float) -> "Pipeline":
        """Return the pipeline with `call_seconds` more for each stage, each way."""
        if not call_seconds:
            return self
        outer = tuple(replace(stage, alpha=stage.alpha + call_seconds) for stage in self.outer)
        return replace(self, outer=outer, alpha=self.alpha + call_seconds)

    def seconds(self, chunk_nbytes: Sequence[float]) -> float:
        """Return when the last chunk is done."""
        alphas = [stage.alpha for stage in self.outer]
        alpha = self.alpha
        once = self.once
        if self.chunk_seconds is not None:
            once += 2 * sum(alphas) + alpha
            alphas = [self.chunk_seconds] * len(alphas)
            alpha = self.chunk_seconds + self.message_seconds
        pairs = list(zip(self.outer, alphas, strict=True))
        return once + end_of_chunks(
            [[a + size * (s.slope + s.adding) for size in chunk_nbytes] for s, a in pairs],
            [alpha + size * self.slope for size in chunk_nbytes],
            [[a + size * s.slope for size in chunk_nbytes] for s, a in pairs],
            [size * self.trailing for size in chunk_nbytes],
        )

    def best_chunk_count(self, nbytes: float) -> int:
        """Return the number of equal chunks at which latency and overlap balance, at least 1.

        ``c* = sqrt((K - k_m) S / a_m)`` minimises ``K S / c + A + (c-1) (a_m + k_m S / c)`` with K
        the sum of all slopes, k_m the largest and a_m the latencies of that stage. Without latency
        there is no optimum: more is better, and the answer is `nbytes`.
        """
        stages = [(2 * stage.slope + stage.adding, 2 * stage.alpha) for stage in self.outer]
        stages.append((self.slope, self.alpha))
        if self.chunk_seconds is not None:
            stages = [(slope, 2 * self.chunk_seconds) for slope, _ in stages[:-1]]
            stages.append((self.slope, self.chunk_seconds + self.message_seconds))
        slope, alpha = max(stages)
        other = sum(each for each, _ in stages) + self.trailing - slope
        if other == 0 or nbytes == 0:
            return 1
        return max(1, round(math.sqrt(other * nbytes / alpha)) if alpha else int(nbytes))

    def limit_slope(self) -> float:
        """Return the seconds per byte that infinitely many chunks without latency approach."""
        return max([self.slope, *(2 * stage.slope + stage.adding for stage in self.outer)])


def end_of_chunks(
    inwards: Sequence[Sequence[float]],
    middle: Sequence[float],
    outwards: Sequence[Sequence[float]],
    trailing: Sequence[float],
) -> float:
    """Return the end of a pipeline of chunks.

    Chunk i takes ``inwards[k][i]`` in each outer stage k, outermost first, ``middle[i]`` in the
    middle one, which it leaves ``trailing[i]`` later, and ``outwards[k][i]`` on its way back. Both
    ways of an outer stage share its ports, and chunks on their way in go first. With one outer
    stage and a middle at least twice as long this is ``2 a + c t2`` for c equal chunks.
    """
    ready: list[float] = [0] * len(middle)
    free: list[float] = []
    for times in (*inwards, middle):
        clock: float = 0
        for i, seconds in enumerate(times):
            clock = ready[i] = max(clock, ready[i]) + seconds
        free.append(clock)
    ready = [at + late for at, late in zip(ready, trailing, strict=True)]
    for times, clock in zip(reversed(outwards), reversed(free[:-1]), strict=True):
        for i, seconds in enumerate(times):
            clock = ready[i] = max(clock, ready[i]) + seconds
    return max(ready, default=0)
