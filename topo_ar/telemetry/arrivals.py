"""Waiting for the last rank and transfer, told apart in the times of all ranks.

Ranks stamp with clocks of their own when they call for a reduction and when they have its result.
Ranks of one node share a clock. Between nodes the offsets are bounded by a barrier, without a round
trip of its own: nobody leaves it before everybody has entered it, so for every rank s

    enter_0 - leave_s <= offset_s <= leave_0 - enter_s

where the offset is what is to be added to the clock of s to have that of rank 0. The middle of the
interval is taken; its half width is the uncertainty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Offsets:
    """What to add to each rank's clock to have the time of rank 0's, and how sure that is.

    Attributes
    ----------
    seconds : ndarray of float64, (ranks,)
        The offsets.
    uncertainty_seconds : float
        The largest half width of the intervals in which they lie; 0 on one node.
    """

    seconds: "Seconds"
    uncertainty_seconds: float


def clock_offsets(
    enter: Sequence[float], leave: Sequence[float], nodes: Sequence[Sequence[int]]
) -> Offsets:
    """Return the offsets of all clocks from one barrier.

    Parameters
    ----------
    enter, leave : sequence of float
        When each rank entered and left it, in seconds of its own clock.
    nodes : sequence of sequence of int
        The ranks of each node, which share a clock.
    """
    import numpy as np

    entered, left = np.asarray(enter, np.float64), np.asarray(leave, np.float64)
    home = next(list(node) for node in nodes if 0 in node)
    offsets, unsure = np.zeros(entered.size), 0.0
    for node in nodes:
        ranks = list(node)
        if 0 in ranks:
            continue
        low = entered[home].max() - left[ranks].min()
        high = left[home].min() - entered[ranks].max()
        offsets[ranks] = (low + high) / 2
        unsure = max(unsure, (high - low) / 2)
    return Offsets(offsets, float(unsure))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What the seconds of each bucket went into, on each rank; arrays of (ranks, steps, buckets).

    A bucket's seconds from call to result are the sum of the three.

    Attributes
    ----------
    queue : ndarray
        The bucket before was not yet reduced everywhere.
    wait : ndarray
        This rank and the network were ready, and the last rank had not called.
    transfer : ndarray
        From there to the result.
    last : ndarray of int, (steps, buckets)
        The rank that called last.
    late : ndarray
        How much later a rank called than half of the ranks had, where the network was ready.
    """

    queue: "Seconds"
    wait: "Seconds"
    transfer: "Seconds"
    last: "NDArray[np.intp]"
    late: "Seconds"


def split(calls: "Seconds", dones: "Seconds", offsets: Offsets) -> Arrivals:
    """Tell waiting for the last rank from transfer.

    Parameters
    ----------
    calls, dones : ndarray of float64, (ranks, steps, buckets)
        When each rank called for the reduction of a bucket and when it had the result, in seconds
        of its own clock; buckets in the order in which they are reduced.
    offsets : Offsets
        Of the clocks.
    """
    import numpy as np

    shift = offsets.seconds[:, None, None]
    called, done = calls + shift, dones + shift
    last_call = called.max(axis=0)
    # When the network has done with the bucket before; the first one finds it idle.
    free = np.full(last_call.shape, -np.inf)
    free[:, 1:] = done.max(axis=0)[:, :-1]
    begins = np.minimum(np.maximum(last_call, free), done)
    ready = np.minimum(np.maximum(called, free), begins)
    # Of an even number the lower one: where half of the ranks are late, half are not.
    usual = np.sort(called, axis=0)[(called.shape[0] - 1) // 2]
    return Arrivals(
        queue=ready - called,
        wait=begins - ready,
        transfer=done - begins,
        last=called.argmax(axis=0),
        late=np.maximum(called - np.maximum(usual, free), 0.0),
    )
