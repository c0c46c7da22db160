import pytest

from experiments.compression_kernels_powersgd import powersgd_step_seconds
from experiments.compression_pitfalls import PITFALLS


@pytest.mark.parametrize("pitfall", PITFALLS, ids=lambda p: p.__name__)
def test_ours_is_right_where_torch_may_not_be(pitfall):
    row = pitfall()
    assert row.right, row


def test_both_sides_of_the_kernel_benchmark_run():
    for times in powersgd_step_seconds([(64, 64), (64,)], 2, 3):
        assert len(times) == 3
        assert all(seconds > 0 for seconds in times)
