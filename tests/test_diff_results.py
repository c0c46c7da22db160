"""``topo-ar diff`` of two sets of results: ratios, intervals, what stands on one side only."""

import json
import shutil
import sys

import pytest

from tests.figure_checks import ROOT
from topo_ar.cli import main as cli
from topo_ar.errors import ConfigError
from topo_ar.telemetry.metrics import slowdown_interval
from topo_ar.telemetry.records import read_records
from topo_ar.telemetry.result_sets import Verdict, compare, identity, read_set

RESULTS = ROOT / "experiments" / "results"
BENCH = RESULTS / "allreduce_size.jsonl"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed(number, **fields):
    """The committed benchmark with some fields of one row replaced; a callable gets the old."""
    rows = read_records(BENCH)
    for name, value in fields.items():
        rows[number][name] = value(rows[number][name]) if callable(value) else value
    return rows


def times(factor):
    return lambda seconds: [factor * each for each in seconds]


def row(candidate="plan", seconds=(1.0, 1.1, 1.2), **more):
    return {"candidate": candidate, "nbytes": 1024, "seconds": list(seconds), **more}


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["topo-ar", "diff", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_committed_results_did_not_change_against_themselves(tmp_path):
    """The slice of the records that is fast to resample, with every kind of file."""
    for path in RESULTS.glob("*.jsonl"):
        if path.name != "scaling.jsonl":
            shutil.copy(path, tmp_path)
    found = compare(read_set(tmp_path), read_set(tmp_path))
    assert len(found.changes) > 300
    assert {change.verdict for change in found.changes} == {Verdict.UNCHANGED}
    assert all(change.found.ratio == 1 for change in found.changes)
    assert [found.only_a, found.only_b, found.measured, found.not_compared] == [[]] * 4


def test_one_row_that_takes_longer_is_found(monkeypatch, capsys, tmp_path):
    slow = write(tmp_path / "slow.jsonl", changed(3, seconds=times(1.5)))
    assert run(monkeypatch, BENCH, slow) == 1
    out = capsys.readouterr().out
    head = f"{slow} against {BENCH}: 1 slower, 0 faster, 11 unchanged"
    assert " ".join(out.split()).startswith(head)
    line = next(line for line in out.splitlines() if line.startswith("  slower"))
    assert "1.500 (" in line
    assert line.endswith("plan, 64 KiB")
    assert run(monkeypatch, slow, BENCH) == 0
    assert "0 slower, 1 faster, 11 unchanged" in " ".join(capsys.readouterr().out.split())
    assert run(monkeypatch, BENCH, BENCH) == 0


def test_json_has_a_line_for_each_row(monkeypatch, capsys, tmp_path):
    slow = write(tmp_path / "slow.jsonl", changed(3, seconds=times(1.5))[1:])
    assert run(monkeypatch, BENCH, slow, "--json") == 1
    first, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"what": "sets", "a": str(BENCH), "b": str(slow), "measured_differently": []}
    slower = next(line for line in lines if line["what"] == "slower")
    assert slower["ratio"] == pytest.approx(1.5)
    assert slower["low"] < 1.5 < slower["high"]
    assert slower["b_median_seconds"] == pytest.approx(1.5 * slower["a_median_seconds"])
    assert (slower["row"]["candidate"], slower["row"]["nbytes"]) == ("plan", 65536)
    only = [line for line in lines if line["what"] == "only in a"]
    assert [(each["row"]["candidate"], each["row"]["nbytes"]) for each in only] == [("gloo", 4096)]
    assert len(lines) == 12


def test_what_stands_on_one_side_only_is_named(monkeypatch, capsys, tmp_path):
    a = write(tmp_path / "a.jsonl", [row(), row("gloo")])
    b = write(tmp_path / "b.jsonl", [row(), row("openmpi"), {"candidate": "plan", "nbytes": 1}])
    assert run(monkeypatch, a, b) == 0
    out = capsys.readouterr().out
    out = " ".join(out.split())
    assert f"only in {a}: 1 row - gloo" in out
    assert f"only in {b}: 1 row - openmpi" in out
    assert f"which are not compared: 0 in {a}, 1 in {b}" in out


def test_rows_of_folders_are_told_apart_by_file(tmp_path):
    for folder, factor in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "one.jsonl", [row()])
        write(tmp_path / folder / "two.jsonl", [row(seconds=[factor, factor])])
    found = compare(read_set(tmp_path / "a"), read_set(tmp_path / "b"))
    assert [(change.key[0], change.found.ratio, change.verdict) for change in found.changes] == [
        ("one.jsonl", 1.0, Verdict.UNCHANGED),
        ("two.jsonl", 2.0, Verdict.SLOWER),
    ]


def test_settings_tell_rows_apart_and_results_do_not():
    small, large = (row(settings={"width": width, "samples": 3}) for width in (16, 64))
    assert identity(small) != identity(large)
    assert identity(row(wrong=1, plan_hash="x", median_seconds=1.0)) == identity(row())
    assert identity(row(nic=None)) == identity(row())


def test_records_that_nothing_tells_apart_are_put_together(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(seconds=[1.0]), row(seconds=[3.0, 2.0])])
    (only,) = read_set(path).rows.values()
    assert (only.seconds, only.pieces) == ([1.0, 3.0, 2.0], 2)


def test_how_it_was_measured_differently_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    about = {"torch": "1", "commit": "a" * 40, "machine": "x", "links": {"nics": [1], "pairs": 1}}
    other = {**about, "torch": "2", "commit": "b" * 40, "links": {"nics": [2], "pairs": 2}}
    same = {**about, "links": {"nics": [1], "pairs": 3}}
    a = write(tmp_path / "a.jsonl", [row(manifest=about), row("gloo", manifest=about)])
    b = write(tmp_path / "b.jsonl", [row(manifest=other), row("gloo", manifest=same)])
    assert run(monkeypatch, a, b) == 0
    said = "torch 1 / 2 (1 of 2 rows), commit aaaaaaa / bbbbbbb (1 of 2 rows), links (1 of 2 rows)"
    assert f"Measured differently: {said}." in " ".join(capsys.readouterr().out.split())


def test_samples_that_make_no_ratio_are_named(monkeypatch, capsys, tmp_path):
    a = write(tmp_path / "a.jsonl", [row(), row("gloo", [1.0])])
    b = write(tmp_path / "b.jsonl", [row(seconds=[0.0, 1.0]), row("gloo", [1.0, 2.0])])
    assert run(monkeypatch, a, b) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "0 slower, 0 faster, 0 unchanged not compared: 2 rows" in out
    assert "gloo: 1 and 2 samples cannot be compared" in out
    assert "plan: a sample of 0 seconds or less cannot be compared" in out


def test_runs_are_resampled_each_by_itself():
    found = slowdown_interval([1.0, 2.0, 3.0], [4.0] * 5)
    assert (found.ratio, found.low, found.high, found.num_samples) == (2.0, 4 / 3, 4.0, 3)
    assert found == slowdown_interval([1.0, 2.0, 3.0], [4.0] * 5)
    with pytest.raises(ConfigError, match="1 and 2 samples"):
        slowdown_interval([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: (BENCH,), "diff compares two"),
        (lambda tmp: (BENCH, "cpu-host"), "cpu-host is not (it is no folder"),
        (lambda tmp: ("cpu-host", RESULTS), "cpu-host is not (it is no folder"),
        (lambda tmp: (BENCH, RESULTS), "is a folder of results and"),
        (lambda tmp: (tmp, tmp), "holds no records"),
        (lambda tmp: (BENCH, tmp / "none.jsonl"), "cannot read records from"),
        (lambda tmp: (BENCH, write(tmp / "a.jsonl", [row()])), "no row with raw samples stands in"),
        (lambda tmp: (BENCH, BENCH, BENCH), "two sets of results, not 3"),
        (lambda tmp: (BENCH, BENCH, "--nodes", "a", "b"), "--nodes compares two nodes of one"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, make, message):
    assert run(monkeypatch, *make(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
