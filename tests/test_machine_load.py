"""The share of a machine's cores that is busy, from texts of the kernel."""

import pytest

from topo_ar.execution.machine_load import CpuTicks, busy_share, cpu_ticks


def test_interrupts_and_stolen_time_are_busy_and_guests_are_counted_once(tmp_path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 1 5 100 20 2 3 4 9 1\ncpu0 1 1 1 1\n")
    assert cpu_ticks(stat) == CpuTicks(busy=25, total=145)


@pytest.mark.parametrize("text", ["", "intr 1 2 3 4 5 6", "cpu 1 2 3"])
def test_what_the_kernel_does_not_tell_is_not_known(tmp_path, text) -> None:
    (tmp_path / "stat").write_text(text)
    assert cpu_ticks(tmp_path / "stat") is None
    assert cpu_ticks(tmp_path / "missing") is None


def test_spans_count_by_their_length() -> None:
    spans = [(CpuTicks(0, 0), CpuTicks(10, 10)), (CpuTicks(10, 50), CpuTicks(20, 80))]
    assert busy_share(spans) == pytest.approx(0.5)
    assert busy_share([*spans, (None, CpuTicks(1, 1))]) is None
    assert busy_share([]) is None
