"""The figures of a window from what all ranks stamped, and what they say is wrong."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from topo_ar.telemetry.arrivals import Arrivals, Offsets, split
from topo_ar.telemetry.job_windows import BucketFigures, Cause, Ranks, shares_of
from topo_ar.telemetry.metrics import algbw, busbw
from topo_ar.units import format_rate, format_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]

# Who makes others wait for less than this share of a step is not named.
LATE_SHARE = 0.05
_WAITED_SHARE = 0.01
# A transfer that takes this many times as long as it did is a reason to look at the NICs.
GREW = 1.3
# A NIC that carries less than this share of what others do, of what each is said to carry.
SLOW_SHARE = 0.7
# A NIC from here on may not be filled by one flow, and is not judged.
ONE_FLOW_BYTES_PER_S = 0.5e9
_MOST_SPANS = 4096


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """What is known of a bucket beforehand; see `BucketFigures`."""

    index: int
    nbytes: int
    dtype: str
    path: str
    plan_hash: str
    predicted_seconds: float | None


@dataclass(frozen=True, slots=True)
class Stamps:
    """What the ranks stamped in some steps, each by its own clock.

    Attributes
    ----------
    step_seconds, exposed_seconds : ndarray of float64, (ranks, steps)
        What steps took, and from a rank's last call to its last result.
    calls, dones : ndarray of float64, (ranks, steps, buckets)
        When each rank called and had the result.
    """

    step_seconds: "Seconds"
    exposed_seconds: "Seconds"
    calls: "Seconds"
    dones: "Seconds"


@dataclass(frozen=True, slots=True)
class Figures:
    """What stamps say; see `Window`."""

    step_seconds: float
    step_seconds_max: float
    exposed_seconds: float
    ranks: Ranks
    buckets: tuple[BucketFigures, ...]
    steps: tuple[tuple[float, float], ...]
    spans: tuple[tuple[tuple[float, float, float], ...], ...]
    uncertainty_seconds: float

    @property
    def transfer_seconds(self) -> float:
        """What the transfers of a step take together."""
        return sum(bucket.transfer_seconds for bucket in self.buckets)


def figures(stamps: Stamps, offsets: Offsets, plans: Sequence[BucketPlan]) -> Figures:
    """Return the figures of a window.

    Parameters
    ----------
    stamps : Stamps
        Of at least one step.
    offsets : Offsets
        Of the ranks' clocks.
    plans : sequence of BucketPlan
        Of the buckets, in the order of the stamps.
    """
    import numpy as np

    found = split(stamps.calls, stamps.dones, offsets)
    seconds = stamps.step_seconds.mean(axis=0)
    exposed = stamps.exposed_seconds.mean(axis=0)
    step = float(np.median(seconds))
    # Less than the clocks can tell apart is no waiting.
    least = max(_WAITED_SHARE * step, offsets.uncertainty_seconds)
    compute = np.median(stamps.step_seconds - stamps.exposed_seconds, axis=1)
    return Figures(
        step_seconds=step,
        step_seconds_max=float(seconds.max()),
        exposed_seconds=float(np.median(exposed)),
        ranks=Ranks(
            compute_seconds=_plain(compute),
            wait_seconds=_plain(found.wait.sum(axis=2).mean(axis=1)),
            late_seconds=_plain(found.late.sum(axis=2).mean(axis=1)),
            last_share=_last_shares(found, least),
        ),
        buckets=tuple(_bucket(plan, found, b, least) for b, plan in enumerate(plans)),
        steps=tuple(zip(_plain(seconds), _plain(exposed), strict=True)),
        spans=_spans(stamps, found, offsets),
        uncertainty_seconds=offsets.uncertainty_seconds,
    )


def _plain(values: "Seconds") -> tuple[float, ...]:
    return tuple(float(f"{value:.7g}") for value in values)


def _last_shares(found: Arrivals, least: float) -> tuple[float, ...]:
    """Return how often each rank was the one that its step waited for longest."""
    waited = found.wait.max(axis=0)  # (steps, buckets)
    longest = waited.argmax(axis=1)
    counts: Counter[int] = Counter(
        int(found.last[step, bucket])
        for step, bucket in enumerate(longest)
        if waited[step, bucket] > least
    )
    num_ranks, num_steps = found.wait.shape[:2]
    return tuple(counts[rank] / num_steps for rank in range(num_ranks))


def _bucket(plan: BucketPlan, found: Arrivals, b: int, least: float) -> BucketFigures:
    import numpy as np

    queue, wait, transfer = (
        float(np.median(each[:, :, b].mean(axis=0)))
        for each in (found.queue, found.wait, found.transfer)
    )
    num_ranks, num_steps = found.wait.shape[:2]
    waited = found.wait[:, :, b].max(axis=0) > least
    counts = Counter(int(rank) for rank in found.last[waited, b])
    last_rank, last_share = shares_of(counts, num_steps)
    return BucketFigures(
        index=plan.index,
        nbytes=plan.nbytes,
        dtype=plan.dtype,
        path=plan.path,
        plan_hash=plan.plan_hash,
        queue_seconds=queue,
        wait_seconds=wait,
        transfer_seconds=transfer,
        predicted_seconds=plan.predicted_seconds,
        algbw=algbw(plan.nbytes, transfer),
        busbw=busbw(plan.nbytes, transfer, num_ranks),
        last_rank=last_rank,
        last_share=last_share,
    )


def _spans(
    stamps: Stamps, found: Arrivals, offsets: Offsets
) -> tuple[tuple[tuple[float, float, float], ...], ...]:
    num_ranks, _, num_buckets = stamps.calls.shape
    if num_ranks * num_buckets > _MOST_SPANS:
        return ()
    shift = offsets.seconds[:, None]
    calls, dones = stamps.calls[:, -1] + shift, stamps.dones[:, -1] + shift
    begins = dones - found.transfer[:, -1]
    origin = calls.min()
    return tuple(
        tuple(
            (float(f"{a - origin:.7g}"), float(f"{b - origin:.7g}"), float(f"{c - origin:.7g}"))
            for a, b, c in zip(*rows, strict=True)
        )
        for rows in zip(calls, begins, dones, strict=True)
    )


def late_ranks(found: Figures) -> list[Cause]:
    """Return the ranks that are late because they compute longer than others.

    A rank is named when it computes longer than half of the ranks by 5 % of the step, was last in
    half of the steps, and is waited for.
    """
    ranks, step = found.ranks, found.step_seconds
    compute = ranks.compute_seconds
    usual = sorted(compute)[(len(compute) - 1) // 2]
    return [
        Cause(
            "late rank",
            f"rank {rank} computes {format_seconds(seconds)} a step where half of the ranks take "
            f"{format_seconds(usual)}, and was the last in {ranks.last_share[rank]:.0%} of the "
            "steps; the others wait for it: look at its host's load, clocks and data loader",
            (rank,),
        )
        for rank, seconds in enumerate(compute)
        if seconds - usual >= LATE_SHARE * step
        and ranks.last_share[rank] >= 1 / 2
        and max(ranks.wait_seconds) >= LATE_SHARE * step
    ]


def slow_nics(
    rates: Sequence[float], said: Sequence[float], nodes: Sequence[Sequence[int]]
) -> list[Cause]:
    """Return the nodes whose NICs carry less than those of the others, of what they are said to.

    Parameters
    ----------
    rates : sequence of float
        The rate of the flow into each node from the node before it, in a ring, in bytes/s.
    said : sequence of float
        What the NICs of each node are said to carry, in bytes/s.
    nodes : sequence of sequence of int
        The ranks of each node.
    """
    count = len(rates)
    # A flow is as fast as the slower of its ends, so the better of a node's two shows its own.
    carried = [max(rate, rates[(i + 1) % count]) for i, rate in enumerate(rates)]
    shares = [rate / most for rate, most in zip(carried, said, strict=True)]
    best = max(shares)
    return [
        Cause(
            "slow NIC",
            f"the NIC of node {i} (ranks {_range(nodes[i])}) carries {format_rate(carried[i])}, "
            f"{share / best:.2f} of what the best one does for its size: look at its cable, port "
            "and speed",
            tuple(nodes[i]),
        )
        for i, share in enumerate(shares)
        if share < SLOW_SHARE * best and carried[i] < ONE_FLOW_BYTES_PER_S
    ]


def _range(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} - {ranks[-1]}"
    return ", ".join(map(str, ranks))
