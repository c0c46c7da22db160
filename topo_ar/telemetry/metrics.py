"""The definitions of every derived figure, in one place. Bytes, seconds, bytes per second."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Begin and end, in seconds.
Interval = tuple[float, float]

_NUM_RESAMPLES = 9999
_SEED = 20_240_229
_MOST_PICKS = 2_000_000


def algbw(nbytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth, buffer size over time; 0 when nothing was timed.

    Source: nccl-tests, PERFORMANCE.md.
    """
    return nbytes / seconds if seconds else 0.0


def busbw_factor(num_ranks: int) -> float:
    """Return 2(n-1)/n: what each of `num_ranks` ranks must send, as a multiple of the buffer.

    One rank sends nothing, so its factor is 0. Source: nccl-tests, PERFORMANCE.md.
    """
    return 2 * (num_ranks - 1) / num_ranks


def busbw(nbytes: int, seconds: float, world_size: int) -> float:
    """Return the bus bandwidth of an all-reduce, ``algbw * 2(n-1)/n``.

    It is comparable over world sizes, but it is not the rate of any cable when the ranks share
    nodes: see :func:`slow_link_busbw`.
    """
    return algbw(nbytes, seconds) * busbw_factor(world_size)


def slow_link_busbw(nbytes: int, seconds: float, num_nodes: int) -> float | None:
    """Return the rate at which a node's NICs together send under a two-level plan.

    With k equal nodes of g ranks it is ``busbw * (k-1)/(n-1) * g``, which is
    ``algbw * 2(k-1)/k``. None on one node, where no slow link is used.
    """
    return busbw(nbytes, seconds, num_nodes) if num_nodes > 1 else None


def exposed_seconds(step: float, forward: float, backward: float, optimizer: float) -> float:
    """Return the part of a training step that waits for communication, never below 0.

    The compute times are those of a step without communication (``no_sync``).
    """
    return max(0.0, step - (forward + backward + optimizer))


def overlap_efficiency(exposed: float, communication: float) -> float | None:
    """Return ``1 - exposed / communication``: 1 is all hidden, 0 is none.

    None when there was no communication. Exposed time may exceed communication that was timed
    alone, because computing slows it down; the result is then negative.
    """
    return 1 - exposed / communication if communication else None


def communication_ratio(communication: float, forward: float, backward: float) -> float:
    """Return the communication-to-computation ratio ``T_comm / (T_forward + T_backward)``.

    Raises
    ------
    ConfigError
        If there was communication but no computation.
    """
    if not communication:
        return 0.0
    if not forward + backward:
        raise ConfigError("a ratio to computation needs a forward or backward time above 0 s")
    return communication / (forward + backward)


def hidden_at_best(communication: float, backward: float, first_ready: float) -> float:
    """Return how much communication backward can hide: what it takes after the first bucket.

    ``min(T_comm, T_backward - t_first_ready)``, at least 0; the last bucket, which ends backward,
    is never hidden.
    """
    return max(0.0, min(communication, backward - first_ready))


def overlapped_seconds(compute: Iterable[Interval], communication: Iterable[Interval]) -> float:
    """Return for how long a rank computes and communicates at once.

    ``compute + communication - active``, each the length of a union of intervals, the last of
    both; over ``communication`` it is the overlap efficiency of a trace. Waiting is no computing:
    leave out what only synchronises. Source: Holistic Trace Analysis, and its issue 162.

    Parameters
    ----------
    compute, communication : iterable of (float, float)
        Begins and ends, in seconds on one clock.
    """
    both = list(compute), list(communication)
    return sum(map(union_seconds, both)) - union_seconds([*both[0], *both[1]])


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Return the length of a union of intervals, given as begins and ends.

    Raises
    ------
    ConfigError
        If one ends before it begins.
    """
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        if not begin <= end:
            raise ConfigError(f"an interval ends at {end} s, before it begins at {begin} s")
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def check_reductions(planned: int, seen: int) -> None:
    """Refuse figures of a trace that lacks the communication that was planned.

    Raises
    ------
    ConfigError
        If reductions were planned and another number was seen.
    """
    if planned and seen != planned:
        raise ConfigError(
            f"the plan says {planned} reductions per step, the trace has {seen}; is it of this job?"
        )


def compression_ratio(sent: float, plain: float) -> float | None:
    """Return counted bytes over those of the plain plan, indices and scales included.

    None where the plain plan sends nothing.
    """
    return sent / plain if plain else None


def weak_scaling_efficiency(
    throughput: float, size: float, base_throughput: float, base_size: float = 1
) -> float:
    """Return ``X_n / (n / b X_b)``: throughput per accelerator over that of the base.

    The batch of each accelerator stays the same. Say what the base is: one accelerator, or one
    node (`base_size` its accelerators), which leaves out what is lost inside it.

    Raises
    ------
    ConfigError
        If a size or the base's throughput is not positive.
    """
    _check_positive(size=size, base_size=base_size, base_throughput=base_throughput)
    return throughput / base_throughput / (size / base_size)


def strong_scaling_efficiency(
    seconds: float, size: float, base_seconds: float, base_size: float = 1
) -> float:
    """Return ``b T_b / (n T_n)`` for the same work: the global batch stays the same.

    Raises
    ------
    ConfigError
        If a size or time is not positive.
    """
    _check_positive(seconds=seconds, size=size, base_size=base_size, base_seconds=base_seconds)
    return base_size * base_seconds / (size * seconds)


def time_to_accuracy(
    evaluations: Sequence[tuple[float, float]], target: float, *, falling: bool = False
) -> float:
    """Return when a run first reached a target that was set before it; infinite if it never did.

    Parameters
    ----------
    evaluations : sequence of (float, float)
        Seconds since step 0, rising, and the quality then; a quality that is not a number counts
        as not reached.
    target : float
        To be reached from below, or from above if `falling`, as a loss is.

    Raises
    ------
    ConfigError
        If the times fall.
    """
    if any(before > after for (before, _), (after, _) in pairwise(evaluations)):
        raise ConfigError("evaluations must be in the order of their times")
    for seconds, quality in evaluations:
        if quality <= target if falling else quality >= target:
            return seconds
    return math.inf


def median_time_to_accuracy(times: Sequence[float]) -> float:
    """Return the median over seeds; a run that failed counts as infinite, and so may the median.

    Raises
    ------
    ConfigError
        If there is no run.
    """
    if not times:
        raise ConfigError("a time to accuracy needs at least one run")
    return median(times)


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """A ratio of medians with its 95 % interval, over `num_samples` samples of each side."""

    ratio: float
    low: float
    high: float
    num_samples: int


def speedup_interval(baseline: Sequence[float], candidate: Sequence[float]) -> RatioInterval:
    """Return how many times faster `candidate` is: the ratio of medians, and where it may lie.

    The interval is the percentile bootstrap (Efron) with pairs resampled together, since
    interleaved samples taken next to each other share the machine's mood. Bias correction is left
    out: its jackknife is not consistent for medians. The same samples give the same interval.

    Parameters
    ----------
    baseline, candidate : sequence of float
        Seconds; the i-th of both were taken next to each other.

    Raises
    ------
    ConfigError
        If the numbers of samples differ or are below 2, or a sample is not above 0.
    """
    import numpy as np

    medians = _resampled_medians(baseline, candidate)
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    ratio = median(baseline) / median(candidate)
    return RatioInterval(ratio, float(low), float(high), len(baseline))


def slowdown_interval(before: Sequence[float], after: Sequence[float]) -> RatioInterval:
    """Return how many times as long `after` takes: the ratio of medians, and where it may lie.

    The samples are of two runs and nothing pairs them: each side is resampled by itself
    (percentile bootstrap), so their numbers may differ; `num_samples` is the smaller one. The
    interval knows how samples scatter within each run, not how runs differ from each other.

    Parameters
    ----------
    before, after : sequence of float
        Seconds.

    Raises
    ------
    ConfigError
        If a side has fewer than 2 samples, or one that is not above 0.
    """
    import numpy as np

    fewest = min(len(before), len(after))
    if fewest < 2:
        raise ConfigError(
            f"{len(before)} and {len(after)} samples cannot be compared; each run needs 2"
        )
    _check_samples(before, after)
    rng = np.random.default_rng(_SEED)
    medians = [_medians_of_resamples(row, rng) for row in (before, after)]
    low, high = np.quantile(medians[1] / medians[0], [0.025, 0.975])
    return RatioInterval(median(after) / median(before), float(low), float(high), fewest)


def exposed_interval(
    baseline: Sequence[float], candidate: Sequence[float], compute: Sequence[float]
) -> RatioInterval:
    """Return how many times less communication `candidate` exposes, and where that may lie.

    Exposed is what the median step takes longer than the median of `compute`. The interval is that
    of `speedup_interval`. It is infinite where nothing of the candidate's is exposed.

    Parameters
    ----------
    baseline, candidate, compute : sequence of float
        Seconds of a step, the last without communication; the i-th of all were taken next to each
        other.

    Raises
    ------
    ConfigError
        As `speedup_interval`, and if nothing of the baseline's is exposed.
    """
    import numpy as np

    whole = np.array([[median(each)] for each in (baseline, candidate, compute)])
    if whole[0] <= whole[2]:
        raise ConfigError("no communication of the baseline is exposed, so none can be saved")
    ratio = _exposed_ratios(whole)
    resampled = _exposed_ratios(_resampled_medians(baseline, candidate, compute))
    low, high = np.quantile(resampled, [0.025, 0.975], method="nearest")  # some may be infinite
    return RatioInterval(float(ratio[0]), float(low), float(high), len(baseline))


def _check_positive(**figures: float) -> None:
    for name, value in figures.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name.replace('_', ' ')} is {value}; it must be positive")


def _exposed_ratios(medians: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Return, of rows of medians of baseline, candidate and compute, how much less is exposed."""
    import numpy as np

    baseline, candidate = np.maximum(medians[:2] - medians[2], 0.0)
    ratios: NDArray[np.float64] = np.zeros_like(baseline)
    with np.errstate(divide="ignore"):
        np.divide(baseline, candidate, where=baseline > 0, out=ratios)
    return ratios


def _resampled_medians(*rows: Sequence[float]) -> "NDArray[np.float64]":
    """Return the medians of each row in every resample; the rows' i-th samples stay together."""
    import numpy as np

    counts = {len(row) for row in rows}
    if len(counts) > 1 or min(counts) < 2:
        raise ConfigError(
            f"{' and '.join(str(len(row)) for row in rows)} samples cannot be compared; "
            "interleave runs of at least 2 samples each"
        )
    _check_samples(*rows)
    samples = np.array(rows, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    picks = rng.integers(samples.shape[1], size=(_NUM_RESAMPLES, samples.shape[1]))
    medians: NDArray[np.float64] = np.median(samples[:, picks], axis=2)
    return medians


def _medians_of_resamples(
    row: Sequence[float], rng: "np.random.Generator"
) -> "NDArray[np.float64]":
    """Return the median of every resample of one row, in blocks that bound the memory."""
    import numpy as np

    samples = np.array(row, dtype=np.float64)
    block = max(1, _MOST_PICKS // len(row))
    return np.concatenate(
        [
            np.median(samples[rng.integers(len(row), size=(count, len(row)))], axis=1)
            for begin in range(0, _NUM_RESAMPLES, block)
            for count in [min(block, _NUM_RESAMPLES - begin)]
        ]
    )


def _check_samples(*rows: Sequence[float]) -> None:
    if min(map(min, rows)) <= 0:
        raise ConfigError("a sample of 0 seconds or less cannot be compared; repeat the timing")
