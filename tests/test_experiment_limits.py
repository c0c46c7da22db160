"""The benchmark of record: its table from rows whose ratios are known."""

from importlib import import_module

import pytest

from experiments import bench_groups
from topo_ar.telemetry.records import RecordWriter

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


def _kept(folder, group: str) -> None:
    group = next(each for each in limits.GROUPS if each.name == group)
    with RecordWriter(limits.path_of(folder, group, quick=False)) as writer:
        for row in ROWS:
            writer.write(row)


def test_the_table_has_a_line_for_what_was_measured_and_counts_what_was_not(tmp_path) -> None:
    _kept(tmp_path, "fast")
    _kept(tmp_path, "slow-wire")
    lines = list(limits.table(tmp_path, quick=False))
    fast = [line.split() for line in lines if line.startswith("fast")]
    assert [line[-1] for line in fast] == ["PASS", "MISS", "NONE", "NONE"]
    assert fast[0][1:5] == ["25MB", "plan", "gloo", "1.6"]
    assert fast[0][5:8] == ["2.000", "[2.000,", "2.000]"]
    compared = [line.split() for line in lines if line.startswith("slow-wire") and "25MB" in line]
    assert [line[3:6] for line in compared] == [
        ["gloo", "-", "2.000"],
        ["openmpi-han", "-", "0.800"],
    ]
    assert lines[-1] == f"{len(limits.TARGETS)} targets: 1 PASS, 1 MISS, 21 not measured"


def test_what_the_machine_did_outranks_what_the_ranks_say() -> None:
    row = _row("plan", 0.25) | {"machine_cpu_share": 0.97}
    assert limits.cpu_share(row) == 0.97
    assert limits.cpu_share(row | {"machine_cpu_share": None}) == pytest.approx(0.016)


def test_the_list_names_every_group_and_all_minutes(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["02_limits", "--list"])
    assert limits.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*(g.name for g in limits.GROUPS), "all"]
    assert lines[-1].split() == ["all", f"{sum(g.minutes for g in limits.GROUPS):g}", "min"]


@pytest.mark.parametrize(("code", "left"), [(0, "wire_fast.jsonl"), (1, "wire_fast.partial")])
def test_only_a_whole_group_is_kept_and_a_failed_one_is_named(
    tmp_path, monkeypatch, capsys, code, left
) -> None:
    def measured(settings, spec, report) -> None:
        report.begin()
        report.event("row", _whole_row())
        report.ranks_ended(code)

    monkeypatch.setattr(bench_groups, "run_emulated", measured)
    command = ["02_limits", "--only", "fast", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    assert limits.main() == code
    assert [path.name for path in tmp_path.iterdir()] == [left]
    assert ("fast failed" in capsys.readouterr().err) == bool(code)


def _whole_row() -> dict[str, object]:
    return _row("plan", 0.25) | {
        "dtype": "float32",
        "redop": "sum",
        "median_seconds": 0.25,
        "algbw": 1e8,
        "busbw": 1.75e8,
        "slow_link_busbw": 1e8,
        "wrong": 0,
        "hosts": 2,
        "fraction": 0.8,
        "predicted_seconds": None,
        "marks": [],
    }
