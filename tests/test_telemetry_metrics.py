import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.errors import ConfigError
from topo_ar.telemetry import metrics


@pytest.mark.parametrize(("n", "factor"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75), (16, 1.875)])
def test_busbw_is_the_factor_times_algbw(n, factor):
    assert metrics.busbw_factor(n) == factor
    assert metrics.algbw(25_000_000, 0.2) == 125e6
    assert metrics.busbw(25_000_000, 0.2, n) == pytest.approx(125e6 * factor)


def test_bus_bandwidth_above_what_the_cable_can_do():
    """Two hosts of four ranks at the limit of a 1 Gbit/s NIC: busbw 0.219, the cable 0.125 GB/s."""
    nbytes, seconds = 25_000_000, 25_000_000 / 125e6
    busbw = metrics.busbw(nbytes, seconds, 8)
    assert busbw == pytest.approx(0.21875e9)
    assert metrics.slow_link_busbw(nbytes, seconds, 2) == pytest.approx(busbw * 1 / 7 * 4)
    assert metrics.slow_link_busbw(nbytes, seconds, 2) == pytest.approx(0.125e9)
    assert metrics.slow_link_busbw(nbytes, seconds, 1) is None
    assert metrics.busbw(nbytes, seconds, 1) == 0.0


@given(st.integers(2, 16), st.integers(1, 16), st.floats(1e-6, 10.0))
def test_slow_link_rate_follows_from_busbw_for_equal_nodes(k, g, seconds):
    n = k * g
    expected = metrics.busbw(1 << 20, seconds, n) * (k - 1) / (n - 1) * g
    assert metrics.slow_link_busbw(1 << 20, seconds, k) == pytest.approx(expected)


def test_nothing_timed_is_no_bandwidth():
    assert metrics.algbw(1024, 0.0) == 0.0


def test_exposed_and_overlap():
    exposed = metrics.exposed_seconds(step=0.5, forward=0.1, backward=0.2, optimizer=0.05)
    assert exposed == pytest.approx(0.15)
    assert metrics.overlap_efficiency(exposed, 0.3) == pytest.approx(0.5)
    assert metrics.exposed_seconds(0.3, 0.1, 0.2, 0.05) == 0.0
    assert metrics.overlap_efficiency(0.4, 0.3) < 0
    assert metrics.communication_ratio(0.3, 0.1, 0.2) == pytest.approx(1.0)


def test_overlap_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metrics.overlap_efficiency(0.0, 0.0) is None
        assert metrics.communication_ratio(0.0, 0.0, 0.0) == 0.0
    with pytest.raises(ConfigError, match="forward or backward"):
        metrics.communication_ratio(1.0, 0.0, 0.0)


BASELINE = [2.0, 2.2, 2.1, 1.9, 2.05, 2.15, 1.95, 2.3, 2.0, 2.1]
CANDIDATE = [1.0, 1.1, 1.02, 0.98, 1.01, 1.05, 0.97, 1.12, 1.03, 1.04]


def test_speedup_interval_agrees_with_scipy():
    import numpy as np
    from scipy.stats import bootstrap

    mine = metrics.speedup_interval(BASELINE, CANDIDATE)
    assert mine.ratio == pytest.approx(2.075 / 1.025)
    assert mine.low <= mine.ratio <= mine.high
    assert mine.num_samples == 10

    def ratio(a, b, axis=-1):
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    theirs = bootstrap(
        (BASELINE, CANDIDATE), ratio, paired=True, method="percentile", rng=1
    ).confidence_interval
    assert mine.low == pytest.approx(theirs.low, rel=0.01)
    assert mine.high == pytest.approx(theirs.high, rel=0.01)


def test_speedup_interval_is_repeatable_and_exact_without_spread():
    assert metrics.speedup_interval(BASELINE, CANDIDATE) == metrics.speedup_interval(
        BASELINE, CANDIDATE
    )
    constant = metrics.speedup_interval([0.4] * 5, [0.2] * 5)
    assert (constant.ratio, constant.low, constant.high) == (2.0, 2.0, 2.0)


positive = st.floats(1e-3, 1e3, allow_nan=False)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=30), st.floats(0.1, 10))
def test_speedup_interval_scales_with_the_baseline(pairs, factor):
    baseline, candidate = zip(*pairs, strict=True)
    one = metrics.speedup_interval(baseline, candidate)
    scaled = metrics.speedup_interval([factor * b for b in baseline], candidate)
    assert one.low <= one.high
    for a, b in ((one.ratio, scaled.ratio), (one.low, scaled.low), (one.high, scaled.high)):
        assert math.isclose(a * factor, b, rel_tol=1e-9)


def test_exposed_interval_compares_what_comes_on_top_of_compute():
    compute = [1.0] * 5
    found = metrics.exposed_interval([1.4] * 5, [1.2] * 5, compute)
    assert (found.low, found.high) == (found.ratio, found.ratio)
    assert found.ratio == pytest.approx(2.0)
    assert metrics.exposed_interval([1.4] * 5, [0.9] * 5, compute).ratio == math.inf
    with pytest.raises(ConfigError, match="no communication of the baseline is exposed"):
        metrics.exposed_interval([0.9] * 5, [1.2] * 5, compute)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=30))
def test_without_compute_everything_is_exposed(pairs):
    baseline, candidate = zip(*pairs, strict=True)
    tiny = [1e-12] * len(pairs)
    one, other = (
        metrics.exposed_interval(baseline, candidate, tiny),
        metrics.speedup_interval(baseline, candidate),
    )
    assert one.ratio == pytest.approx(other.ratio, rel=1e-6)
    assert one.low <= one.high


@pytest.mark.parametrize(
    ("baseline", "candidate"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([], []), ([1, 2], [0, 1])]
)
def test_samples_that_cannot_be_compared(baseline, candidate):
    with pytest.raises(ConfigError, match="compared"):
        metrics.speedup_interval(baseline, candidate)
