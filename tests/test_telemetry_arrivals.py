"""Waiting for the last rank against transfer: what stamps of clocks that differ can tell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.telemetry.arrivals import clock_offsets, split
from topo_ar.telemetry.window_figures import (
    BucketPlan,
    Figures,
    Stamps,
    figures,
    late_ranks,
    slow_nics,
)

NODES = ((0, 1), (2, 3))
STEP_S, TRANSFER_S = 0.1, 0.01
NO_SKEW = clock_offsets([0.0] * 4, [1e-4] * 4, NODES)
GBIT = 1e9 / 8


@given(
    st.floats(-1e4, 1e4),
    st.lists(st.floats(0.0, 0.01), min_size=4, max_size=4),
    st.floats(1e-5, 0.01),
)
def test_the_offset_lies_where_a_barrier_says(skew, enters, latency) -> None:
    # Times of rank 0's clock; nobody leaves before the last one has entered.
    left = [max(enters) + latency * (1 + rank) / 4 for rank in range(4)]
    theirs = [0.0, 0.0, skew, skew]
    found = clock_offsets(
        [t + s for t, s in zip(enters, theirs, strict=True)],
        [t + s for t, s in zip(left, theirs, strict=True)],
        NODES,
    )
    assert found.seconds[:2].tolist() == [0.0, 0.0]
    assert found.seconds[2] == found.seconds[3]
    assert abs(found.seconds[2] + skew) <= found.uncertainty_seconds + 1e-9
    assert found.uncertainty_seconds <= max(enters) - min(enters) + latency + 1e-9


def test_clocks_of_one_node_are_one_clock() -> None:
    found = clock_offsets([0.0, 5.0], [6.0, 6.0], [(0, 1)])
    assert found.seconds.tolist() == [0.0, 0.0]
    assert found.uncertainty_seconds == 0


def _stamps(late=(0.0, 0.0, 0.0, 0.0), transfer=TRANSFER_S, skew=(0.0, 0.0, 0.0, 0.0), buckets=3):
    """Return stamps of 8 steps in which ranks call `late` and the network serves one by one."""
    steps = 8
    calls, dones = np.zeros((2, 4, steps, buckets))
    free = 0.0
    for s in range(steps):
        begin = max(s * STEP_S, free)  # a step ends when all its buckets are reduced
        for b in range(buckets):
            at = begin + np.array(late) * (b + 1) / buckets + b * STEP_S / buckets / 2
            free = max(at.max(), free) + transfer
            calls[:, s, b], dones[:, s, b] = at + skew, free + np.array(skew)
    exposed = dones[:, :, -1] - calls[:, :, -1]
    return Stamps(np.full((4, steps), STEP_S + max(late)), exposed, calls, dones)


@given(
    st.lists(st.floats(0.0, 0.05), min_size=4, max_size=4),
    st.floats(1e-4, 0.05),
    st.floats(-1e4, 1e4),
)
def test_queue_wait_and_transfer_are_all_there_is(late, transfer, skew) -> None:
    shifts = (0.0, 0.0, skew, skew)
    stamps = _stamps(late, transfer, shifts)
    offsets = clock_offsets(shifts, [1e-4 + s for s in shifts], NODES)
    found = split(stamps.calls, stamps.dones, offsets)
    whole = stamps.dones - stamps.calls
    assert np.allclose(found.queue + found.wait + found.transfer, whole, atol=1e-9)
    assert min(each.min() for each in (found.queue, found.wait, found.transfer)) >= -1e-9
    assert np.allclose(found.transfer, transfer, atol=2 * offsets.uncertainty_seconds)


def _figures(stamps: Stamps, offsets=NO_SKEW) -> Figures:
    plans = [BucketPlan(b, 1 << 20, "float32", "plain", "", None) for b in range(3)]
    return figures(stamps, offsets, plans)


def test_a_late_rank_is_waiting_and_not_transfer() -> None:
    found = _figures(_stamps(late=(0.0, 0.0, 0.02, 0.0)))
    assert found.ranks.last_share == (0.0, 0.0, 1.0, 0.0)
    assert [bucket.last_rank for bucket in found.buckets] == [2, 2, 2]
    assert [round(b.transfer_seconds, 6) for b in found.buckets] == [TRANSFER_S] * 3
    assert found.ranks.wait_seconds[2] == 0
    assert found.ranks.wait_seconds[0] > 0.02
    assert found.ranks.late_seconds[0] == 0
    [cause] = late_ranks(found)
    assert cause.ranks == (2,)


def test_a_slow_network_is_transfer_and_nobody_is_late() -> None:
    found = _figures(_stamps(transfer=5 * TRANSFER_S))
    assert found.ranks.last_share == (0.0,) * 4
    assert found.ranks.wait_seconds == (0.0,) * 4
    assert [bucket.last_rank for bucket in found.buckets] == [None] * 3
    assert round(found.buckets[0].transfer_seconds, 6) == 5 * TRANSFER_S
    assert found.buckets[2].queue_seconds > 0
    assert late_ranks(found) == []


def test_who_gets_its_results_late_is_not_called_late() -> None:
    """A rank that computes as long as the others is a victim, however late it calls."""
    stamps = _stamps(late=(0.0, 0.0, 0.02, 0.0))
    # It computes 80 ms as all do; the rest of its step it waited for the wire.
    exposed = np.full((4, 8), 0.04)
    found = _figures(Stamps(stamps.step_seconds, exposed, stamps.calls, stamps.dones))
    assert found.ranks.last_share[2] == 1.0
    assert late_ranks(found) == []


def test_waiting_that_clocks_cannot_tell_is_not_counted() -> None:
    unsure = clock_offsets([0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1], NODES)
    assert unsure.uncertainty_seconds == pytest.approx(0.1)
    found = _figures(_stamps(late=(0.0, 0.0, 0.02, 0.0)), unsure)
    assert found.ranks.last_share == (0.0,) * 4


@pytest.mark.parametrize(
    ("rates", "said", "nodes"),
    [
        ([GBIT, GBIT / 2, GBIT / 2], [GBIT] * 3, [1]),
        ([GBIT / 2, GBIT, GBIT / 2], [GBIT] * 3, [2]),
        ([GBIT / 2] * 2, [GBIT] * 2, []),  # of two nodes the slower one cannot be told
        ([GBIT, 0.9 * GBIT, 0.9 * GBIT], [GBIT] * 3, []),
        ([GBIT, GBIT / 2, GBIT / 2], [GBIT, GBIT / 2, GBIT], []),  # as slow as it is said to be
        ([20 * GBIT, 10 * GBIT, 10 * GBIT], [100 * GBIT] * 3, []),  # one flow does not fill it
    ],
)
def test_a_slow_nic_is_known_by_both_of_its_flows(rates, said, nodes) -> None:
    ranks = tuple((2 * node, 2 * node + 1) for node in range(len(rates)))
    assert [cause.ranks for cause in slow_nics(rates, said, ranks)] == [ranks[i] for i in nodes]
