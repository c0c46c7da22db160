"""What a codec costs a rank in time, and the wire below which that is worth it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from topo_ar.planning.codecs import Codec, parse_codec
from topo_ar.planning.runtime import Runtime

Points = Mapping[float, float]


class CodecCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a codec was measured to cost a rank.

    Attributes
    ----------
    seconds_per_byte : float
        kappa, for one byte of uncompressed gradient.
    launch_seconds : float
        What a step costs beside its bytes.
    """

    seconds_per_byte: float
    launch_seconds: float


@dataclass(frozen=True, slots=True)
class CodecCosts:
    """Seconds a rank spends on encoding and decoding together.

    Attributes
    ----------
    seconds_per_byte : dict
        By codec name, for one byte of uncompressed gradient.
    by_rank : dict
        The same for PowerSGD by rank; between two ranks a straight line.
    launch_seconds : dict
        What a message costs beside its bytes, such as the launches of kernels.
    source : str
        Where the figures come from.
    measured : tuple of str
        The codecs that were measured for this job; all others are assumed.
    """

    seconds_per_byte: Mapping[str, float]
    by_rank: Points
    source: str
    launch_seconds: Mapping[str, float] = field(default_factory=dict)
    measured: tuple[str, ...] = ()

    def per_byte(self, codec: Codec) -> float:
        """Return kappa, seconds per byte of uncompressed gradient on one rank."""
        if codec.name == "powersgd" and codec.argument is not None:
            return _line(self.by_rank, codec.argument)
        return self.seconds_per_byte.get(codec.name, 0.0)

    def launch(self, codec: Codec) -> float:
        """Return seconds for each message beside its bytes."""
        return self.launch_seconds.get(codec.name, 0.0)

    def with_measured(self, ranks: Sequence[Mapping[str, CodecCost]], source: str) -> "CodecCosts":
        """Return these costs with the slowest rank's measured ones in place of the assumed.

        Parameters
        ----------
        ranks : sequence of mapping
            What each rank measured, by codec such as ``topk:0.01``; the same codecs on all. Where
            several differ in their argument alone the slowest stands for all, but for PowerSGD.
        source : str
            Where they come from.

        Raises
        ------
        ConfigError
            If there is no such codec.
        """
        slopes, launches = dict(self.seconds_per_byte), dict(self.launch_seconds)
        by_rank: dict[float, float] = {}
        seen: set[str] = set()
        for text in ranks[0]:
            codec = parse_codec(text)
            slope = max(each[text].seconds_per_byte for each in ranks)
            launch = max(each[text].launch_seconds for each in ranks)
            if codec.name in seen:
                launch = max(launch, launches[codec.name])
                slope = max(slope, slopes.get(codec.name, 0.0))
            launches[codec.name] = launch
            if codec.name == "powersgd" and codec.argument is not None:
                by_rank[codec.argument] = slope
            else:
                slopes[codec.name] = slope
            seen.add(codec.name)
        return CodecCosts(
            slopes, by_rank or self.by_rank, source, launches, (*self.measured, *ranks[0])
        )


def _line(points: Points, at: float) -> float:
    """Return the value on straight lines through `points`; outside them the nearest line goes on.

    Below the first point the first value holds.
    """
    known = sorted(points)
    if at <= known[0] or len(known) == 1:
        return points[known[0]]
    right = next((i for i, x in enumerate(known) if x >= at), len(known) - 1)
    x0, x1 = known[right - 1], known[right]
    return points[x0] + (points[x1] - points[x0]) * (at - x0) / (x1 - x0)


# One core, fp32 input, error feedback where the codec has it. Casts: 26.2 MB down and up in
# 0.86 + 0.68 ms (bf16) and 0.78 + 0.69 ms (fp16). int8: two shots break even at 2.2 GB/s. int4 in
# the proportion of the kernels, 8.1 to 4.5 ms. sign: pack, unpack, pack 1/n, unpack, at n = 2.
# topk: selection, scatter and residual of 1 % break even at 4.6 GB/s. randomk: 0.13 ms gather,
# 1.2 ms scatter. powersgd: a whole step on 28.3 MB of BERT matrices in 6.1, 8.1, 10.1 and 13.0 ms.
CPU_COSTS = CodecCosts(
    seconds_per_byte={
        "fp16": 5.6e-11,
        "bf16": 5.9e-11,
        "int8": 3.37e-10,
        "int4": 6.07e-10,
        "sign": 2.4e-10,
        "topk": 2.13e-10,
        "randomk": 5.1e-11,
    },
    by_rank={1: 2.16e-10, 2: 2.86e-10, 4: 3.57e-10, 8: 4.59e-10},
    source="assumed from one x86-64 core with AVX-512, not measured here",
)

# Passes over memory at some 3 TB/s and launches of 5 us: nobody has measured them here.
GPU_COSTS = CodecCosts(
    seconds_per_byte={
        "fp16": 7.6e-13,
        "bf16": 7.6e-13,
        "int8": 1.5e-12,
        "int4": 1.5e-12,
        "sign": 1.5e-12,
        "topk": 1.2e-12,
        "randomk": 4e-13,
    },
    by_rank={1: 9e-13, 8: 1.2e-12},
    source="assumed from memory bandwidth and kernel launches, not measured here",
    launch_seconds={
        "fp16": 1e-5,
        "bf16": 1e-5,
        "int8": 2e-5,
        "int4": 2e-5,
        "sign": 2e-5,
        "topk": 5e-5,
        "randomk": 2e-5,
        "powersgd": 1e-4,
    },
)


def costs_of(runtime: Runtime) -> CodecCosts:
    """Return the starting values for the machine that `runtime` runs on."""
    # Only the engine for CPU tensors streams its chunks.
    return GPU_COSTS if runtime.chunk_seconds is None else CPU_COSTS


def overlapped_break_even(
    codec_slope: float, intra_slope: float, ratio: float, num_nodes: int
) -> float | None:
    """Return the rate of a node's NICs, in bytes/s, below which a pipelined codec pays.

    With everything overlapped a buffer of S bytes takes ``max(k1, rho k2, kappa) S`` in place of
    ``max(k1, k2) S``, which is less if ``max(k1, kappa) < k2 = 2 (n-1) / (n C)``.

    Parameters
    ----------
    codec_slope, intra_slope : float
        kappa of one of the ranks that share the work, and k1, in seconds per byte of the buffer.
    ratio : float
        rho; from 1 on a codec never pays, and the answer is None.
    num_nodes : int
        n; on one node nothing pays.
    """
    if num_nodes < 2 or ratio >= 1:
        return None
    slope = max(codec_slope, intra_slope)
    return 2 * (num_nodes - 1) / num_nodes / slope if slope else float("inf")


def sequential_break_even(codec_slope: float, ratio: float, num_nodes: int) -> float | None:
    """Return the same where nothing overlaps: ``kappa < (1 - rho) k2``; None if it never pays."""
    if num_nodes < 2 or ratio >= 1:
        return None
    if not codec_slope:
        return float("inf")
    return (1 - ratio) * 2 * (num_nodes - 1) / num_nodes / codec_slope
