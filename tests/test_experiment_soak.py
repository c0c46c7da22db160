"""What the soak calls flat."""

from dataclasses import replace

import pytest

from experiments.soak import SLACK_BLOCKS, SLACK_NBYTES, TRIMMED, Sample, judge

FIRST = Sample(0, 500, 1.0, 200 << 20, 90 << 20, 9 << 20, 600_000, 12, 56, 414, 0, "a")


def _run(name: str, values: list[object]) -> list[Sample]:
    return [
        replace(FIRST, step=500 * at, rank=rank, **({name: value} if rank else {}))
        for rank in range(2)
        for at, value in enumerate(values, 1)
    ]


def test_a_first_quarter_may_fill_caches_and_memory_may_waver() -> None:
    used = [50 << 20, 70 << 20, (90 << 20) - SLACK_NBYTES, 90 << 20, 89 << 20, 90 << 20]
    assert judge(_run("in_use_nbytes", [*used, 90 << 20, 90 << 20])) == []


def test_what_malloc_keeps_is_resident_and_not_in_use() -> None:
    grown = [*range(100 << 20, 300 << 20, 10 << 20)]
    assert judge(_run("rss_nbytes", grown)) == []
    assert judge([*_run("kept_nbytes", grown), replace(FIRST, step=TRIMMED, threads=99)]) == []


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("threads", [12, 12, 12, 12, 13, 13, 13, 13], "rank 1: threads grew from 12 to 13"),
        ("open_files", [56] * 6 + [57, 57], "rank 1: open_files grew from 56 to 57"),
        ("in_use_nbytes", [at * SLACK_NBYTES for at in range(8)], "rank 1: in_use_nbytes grew"),
        ("blocks", [at * SLACK_BLOCKS for at in range(8)], "rank 1: blocks grew"),
        ("wrong", [0] * 7 + [2], "rank 1: 2 wrong results"),
        ("digest", ["a"] * 7 + ["b"], "ranks have different bits at step 4000"),
        ("threads", [12, 13, 14], "3 samples are too few"),
    ],
)
def test_what_grows_or_is_wrong_is_said(name, values, sentence) -> None:
    assert any(sentence in fault for fault in judge(_run(name, values)))
