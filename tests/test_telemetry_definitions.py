"""The definitions of scaling, overlap of traces, time to accuracy and cost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.errors import ConfigError
from topo_ar.telemetry import metrics
from topo_ar.telemetry.prices import PriceList, read_prices

_INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1])), max_size=6
)


def brute(intervals):
    return len({second for begin, end in intervals for second in range(begin, end)})


@given(_INTERVALS, _INTERVALS)
def test_overlap_of_a_trace_is_what_both_cover(compute, communication):
    assert metrics.union_seconds(compute) == brute(compute)
    both = {s for b, e in compute for s in range(b, e)} & {
        s for b, e in communication for s in range(b, e)
    }
    assert metrics.overlapped_seconds(compute, communication) == len(both)


def test_an_interval_that_ends_before_it_begins_is_refused():
    with pytest.raises(ConfigError, match=r"ends at 1 s, before it begins at 2 s"):
        metrics.union_seconds([(2, 1)])


@pytest.mark.parametrize(
    ("communication", "backward", "first", "hidden"),
    [(5, 10, 2, 5), (50, 10, 2, 8), (5, 10, 10, 0), (5, 10, 12, 0), (0, 10, 2, 0)],
)
def test_backward_hides_what_comes_after_the_first_bucket(communication, backward, first, hidden):
    assert metrics.hidden_at_best(communication, backward, first) == hidden


def test_communication_that_was_planned_and_not_seen_is_an_error():
    metrics.check_reductions(6, 6)
    metrics.check_reductions(0, 0)
    with pytest.raises(ConfigError, match="plan says 6 reductions per step, the trace has 0"):
        metrics.check_reductions(6, 0)


def test_published_efficiencies():
    # BERT-large on DGX A100, mixed precision: 4553 sequences/s on 8 GPUs, 9191 on 16.
    assert metrics.weak_scaling_efficiency(9191, 16, 4553, 8) == pytest.approx(1.00933, abs=1e-5)
    # ResNet-50 on AWS: 372 minutes on 8 V100, 54 on 64.
    assert metrics.strong_scaling_efficiency(54, 64, 372, 8) == pytest.approx(372 / 54 / 8)
    assert metrics.weak_scaling_efficiency(100, 1, 100) == 1
    assert metrics.strong_scaling_efficiency(100, 2, 200) == 1


@given(st.floats(0.1, 100), st.integers(1, 64))
def test_both_efficiencies_agree_where_the_work_is_the_same(seconds, n):
    weak = metrics.weak_scaling_efficiency(1 / seconds, n, 2.0)
    assert weak == pytest.approx(metrics.strong_scaling_efficiency(seconds, n, 0.5))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (metrics.weak_scaling_efficiency, (1, 0, 1)),
        (metrics.weak_scaling_efficiency, (1, 2, 0)),
        (metrics.strong_scaling_efficiency, (0, 2, 1)),
        (metrics.strong_scaling_efficiency, (1, 2, math.inf)),
    ],
)
def test_nothing_is_no_base(function, arguments):
    with pytest.raises(ConfigError, match="must be positive"):
        function(*arguments)


def test_the_first_evaluation_that_reaches_the_target_counts():
    runs = [(10, 0.5), (20, 0.97), (30, 0.96), (40, 0.98)]
    assert metrics.time_to_accuracy(runs, 0.97) == 20
    assert metrics.time_to_accuracy(runs, 0.99) == math.inf
    assert metrics.time_to_accuracy([(5, math.nan), (9, 2.0)], 2.5, falling=True) == 9
    assert metrics.time_to_accuracy([], 0.5) == math.inf
    with pytest.raises(ConfigError, match="order of their times"):
        metrics.time_to_accuracy([(2, 0), (1, 0)], 1)


def test_a_run_that_failed_counts_as_infinite():
    assert metrics.median_time_to_accuracy([20, math.inf, 10]) == 20
    assert metrics.median_time_to_accuracy([20, math.inf, math.inf]) == math.inf
    with pytest.raises(ConfigError, match="at least one run"):
        metrics.median_time_to_accuracy([])


def test_compression_is_counted_bytes_over_plain_ones():
    assert metrics.compression_ratio(25, 100) == 0.25
    assert metrics.compression_ratio(0, 0) is None


def test_a_step_and_a_run_cost_what_the_list_says(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text('currency = "EUR"\nnode_hour = 18\naccelerator_hour = 2.25\n')
    prices = read_prices(path)
    # Two nodes of 8: 36 + 36 an hour, 2 cents a second.
    assert prices.cost(0.5, 2, 16) == pytest.approx(0.01)
    assert prices.cost_of_run(1000, 0.5, 2, 16, other_seconds=100) == pytest.approx(12)
    sending = PriceList("EUR", sent_gigabyte=0.02)
    assert sending.cost(1, 2, 16, nbytes_between=5e8) == pytest.approx(0.01)
    assert sending.cost_of_run(10, 1, 2, 16, 5e8) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('currency = "EUR"\n', "holds no price"),
        ("node_hour = 1\n", "missing required field `currency`"),
        ('currency = "EUR"\ngpu_hour = 1\n', "gpu_hour"),
        ('currency = "EUR"\nnode_hour = -1\n', "node_hour is -1.0"),
        ('currency = "EUR"\nnode_hour = "1"\n', "node_hour"),
        ("=", "no price list"),
    ],
)
def test_what_is_no_price_list_is_refused(tmp_path, text, message):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prices(path)
    assert "prices.toml" in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_prices(tmp_path / "none.toml")
