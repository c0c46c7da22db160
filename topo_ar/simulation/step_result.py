"""What comes out of a simulated training step, and its form as a record."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from topo_ar.planning.plan import Family
from topo_ar.simulation.templates import LinkUse, link_rows
from topo_ar.telemetry.metrics import communication_ratio
from topo_ar.telemetry.records import Record
from topo_ar.telemetry.trace import Span


@dataclass(frozen=True, slots=True)
class SimulatedBucket:
    """One bucket: when the slowest rank had it, when all had its sum, and what it took alone."""

    nbytes: int
    ready_seconds: float
    done_seconds: float
    seconds_alone: float
    family: Family
    num_chunks: int
    codec: str


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that was simulated; seconds count from the begin of forward.

    Attributes
    ----------
    seconds : float
        When the last rank is done.
    compute_seconds : float
        What the slowest rank takes without communication.
    communication_seconds : float
        All buckets alone, one after the other.
    exposed_seconds, overlap_efficiency
        As `telemetry.metrics` defines them.
    buckets : tuple of SimulatedBucket
        In the order of the hook's calls.
    links : tuple of LinkUse
        What the links carried, the busiest first.
    sent_inside, sent_between : tuple of float
        Bytes that each rank sent to ranks of its node and of others, as counted message by message.
    spans : tuple of Span
        What one rank of each kind did.
    num_kinds : int
        Into how many kinds the ranks fell.
    exact : bool
        Whether all ranks of a kind do the same; with jitter the slowest stands for its kind, and
        times are what they are at most.
    """

    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    overlap_efficiency: float | None
    buckets: tuple[SimulatedBucket, ...]
    links: tuple[LinkUse, ...]
    sent_inside: tuple[float, ...]
    sent_between: tuple[float, ...]
    spans: tuple[Span, ...]
    num_kinds: int
    exact: bool


def step_record(
    steps: Sequence[SimulatedStep], candidate: str, hosts: int, forward_backward_seconds: float
) -> Record:
    """Return a record of simulated steps with the keys of a measured training, and more.

    Parameters
    ----------
    steps : sequence of SimulatedStep
        Of one job.
    candidate : str
        What is being simulated, as figures name it.
    hosts : int
        Nodes of the job.
    forward_backward_seconds : float
        Computation of a rank of normal speed, for the ratio.
    """
    first = steps[0]
    exposed = median(step.exposed_seconds for step in steps)
    return {
        "record": "training",
        "simulated": True,
        "candidate": candidate,
        "world_size": len(first.sent_inside),
        "hosts": hosts,
        "seconds": [step.seconds for step in steps],
        "median_seconds": median(step.seconds for step in steps),
        "median_compute_seconds": median(step.compute_seconds for step in steps),
        "communication_seconds": first.communication_seconds,
        "exposed_seconds": exposed,
        "overlap_efficiency": median(
            step.overlap_efficiency for step in steps if step.overlap_efficiency is not None
        )
        if first.communication_seconds
        else None,
        "communication_ratio": communication_ratio(
            first.communication_seconds, forward_backward_seconds, 0
        )
        if forward_backward_seconds
        else None,
        "nbytes_inside": sum(first.sent_inside),
        "nbytes_between": sum(first.sent_between),
        "buckets": [
            {
                "nbytes": bucket.nbytes,
                "ready_seconds": bucket.ready_seconds,
                "done_seconds": bucket.done_seconds,
                "seconds_alone": bucket.seconds_alone,
                "family": bucket.family,
                "chunks": bucket.num_chunks,
                "codec": bucket.codec,
            }
            for bucket in first.buckets
        ],
        "links": link_rows(first.links),
        "kinds_of_ranks": first.num_kinds,
        "exact": first.exact,
    }
