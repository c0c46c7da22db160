"""What the soak calls flat."""

from dataclasses import replace

import pytest

from experiments.soak import SLACK_NBYTES, Sample, judge

FIRST = Sample(0, 500, 1.0, 200 << 20, 12, 56, 414, 0, "a")


def _run(name: str, values: list[object]) -> list[Sample]:
    return [
        replace(FIRST, step=500 * at, rank=rank, **({name: value} if rank else {}))
        for rank in range(2)
        for at, value in enumerate(values, 1)
    ]


def test_a_first_quarter_may_fill_caches_and_memory_may_waver() -> None:
    rss = [100 << 20, 150 << 20, (200 << 20) - SLACK_NBYTES, 200 << 20, 199 << 20, 200 << 20]
    assert judge(_run("rss_nbytes", [*rss, 200 << 20, 200 << 20])) == []


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("threads", [12, 12, 12, 12, 13, 13, 13, 13], "rank 1: threads grew from 12 to 13"),
        ("open_files", [56] * 6 + [57, 57], "rank 1: open_files grew from 56 to 57"),
        ("rss_nbytes", [at << 24 for at in range(8)], "rank 1: rss_nbytes grew"),
        ("wrong", [0] * 7 + [2], "rank 1: 2 wrong results"),
        ("digest", ["a"] * 7 + ["b"], "ranks have different bits at step 4000"),
        ("threads", [12, 13, 14], "3 samples are too few"),
    ],
)
def test_what_grows_or_is_wrong_is_said(name, values, sentence) -> None:
    assert any(sentence in fault for fault in judge(_run(name, values)))
