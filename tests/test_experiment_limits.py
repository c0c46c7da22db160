"""The benchmark of record: its table from rows whose ratios are known."""

from importlib import import_module

import pytest

limits = import_module("experiments.02_limits")


def _row(candidate: str, seconds: float, cpu_seconds: float = 0.001) -> dict[str, object]:
    return {
        "candidate": candidate,
        "nbytes": 25_000_000,
        "seconds": [seconds] * 4,
        "lone_seconds": [2 * seconds] * 4,
        "cpu_seconds": cpu_seconds,
        "world_size": 8,
        "wire_limit_seconds": 0.2,
        "manifest": {"cpu_count": 2},
    }


ROWS = [_row("plan", 0.25), _row("gloo", 0.5), _row("openmpi-han", 0.2, 0.0625)]


@pytest.mark.parametrize(
    ("theirs", "least", "ratio", "word"),
    [
        ("gloo", 2.0, 2.0, "PASS"),
        ("gloo", 2.1, 2.0, "MISS"),
        ("lone gloo", 1.5, 2.0, "PASS"),
        ("openmpi-han", 0.9, 0.8, "MISS"),
        ("CPU of openmpi-han", 3.0, 62.5, "PASS"),
        ("wire limit", 0.8, 0.8, "PASS"),
        ("openmpi", 1.0, None, "NONE"),
    ],
)
def test_targets_are_held_against_the_rows_of_their_size(theirs, least, ratio, word) -> None:
    verdict = limits.judge(limits.Target("large", "25MB", theirs, least), ROWS)
    assert verdict.word == word
    assert verdict.ratio == (None if ratio is None else pytest.approx(ratio))
    assert not verdict.busy


def test_rows_that_keep_the_cores_busy_are_marked() -> None:
    busy = [_row("plan", 0.25, 0.06), _row("gloo", 0.5)]
    assert limits.cpu_share(busy[0]) == pytest.approx(0.96)
    assert limits.judge(limits.Target("large", "25MB", "gloo", 1.0), busy).busy


def test_every_target_is_measured_by_its_group() -> None:
    groups = {group.name: group for group in limits.GROUPS}
    for target in limits.TARGETS:
        group = groups[target.group]
        assert target.size in group.sizes.split(",")
        plain = target.theirs.removeprefix("CPU of ").removeprefix("lone ")
        assert plain == "wire limit" or plain in ("gloo", *group.against)
        assert target.ours == "plan" or target.ours in group.against
    assert sum(group.minutes for group in limits.GROUPS) <= 40
