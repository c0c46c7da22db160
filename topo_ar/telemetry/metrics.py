"""The definitions of every derived figure, in one place. Bytes, seconds, bytes per second."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NUM_RESAMPLES = 9999
_SEED = 20_240_229


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
    if min(map(min, rows)) <= 0:
        raise ConfigError("a sample of 0 seconds or less cannot be compared; repeat the timing")
    samples = np.array(rows, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    picks = rng.integers(samples.shape[1], size=(_NUM_RESAMPLES, samples.shape[1]))
    medians: NDArray[np.float64] = np.median(samples[:, picks], axis=2)
    return medians
