"""Targets judged from rows whose figures are known; what a fault has to leave behind."""

import importlib

import pytest

from topo_ar.errors import ConfigError
from topo_ar.telemetry.records import RecordWriter, read_records

targets = importlib.import_module("experiments.13_targets")
faults = importlib.import_module("experiments.12_faults")

PRICES = targets.PriceList("EUR", node_hour=1.0, accelerator_hour=2.0)


def _target(measure, least, theirs=None, **options):
    return targets.Target("latency", "", "x_*.jsonl", measure, "ours", least, theirs, **options)


def _training(candidate, seed, reached, quality=0.9):
    return {
        "candidate": candidate, "seed": seed, "reached_seconds": reached, "quality": quality,
        "baseline": {"quality": 1.0}, "hosts": 2, "world_size": 8,
    }  # fmt: skip


def test_a_speedup_is_that_of_interleaved_samples():
    rows = [
        {"candidate": "ours", "seconds": [1.0, 1.0]},
        {"candidate": "other", "seconds": [2.0, 2.0]},
    ]
    found = targets.judge(_target("speedup", 2.0, "other"), rows, PRICES)
    assert (found["value"], found["low"], found["high"]) == (2.0, 2.0, 2.0)
    assert found["verdict"] == "PASS"
    assert targets.judge(_target("speedup", 2.1, "other"), rows, PRICES)["verdict"] == "MISS"
    assert targets.judge(_target("speedup", 2.1, "nobody"), rows, PRICES)["verdict"] == "NONE"


def test_quality_is_the_mean_over_seeds_and_times_are_compared_seed_by_seed():
    rows = [
        *(_training("ours", seed, 10.0 + seed, 0.9 + seed / 100) for seed in range(3)),
        *(_training("other", seed, 20.0 + 2 * seed) for seed in range(3)),
    ]
    quality = targets.judge(_target("quality", 0.91), rows, PRICES)
    assert quality["value"] == pytest.approx(0.91)
    assert (quality["low"], quality["high"]) == (0.9, 0.92)
    below = targets.judge(_target("below_baseline", 0.1), rows, PRICES)
    assert below["value"] == pytest.approx(0.09)
    for measure in ("time_to_accuracy", "cost_to_accuracy"):
        found = targets.judge(_target(measure, 2.0, "other"), rows, PRICES)
        assert found["value"] == pytest.approx(2.0)
        assert found["num_samples"] == 3
    rows[0]["reached_seconds"] = None
    never = targets.judge(_target("time_to_accuracy", 2.0, "other"), rows, PRICES)
    assert (never["value"], never["verdict"]) == (None, "NONE")


def test_the_targets_are_judged_from_the_files_they_name(tmp_path, capsys):
    with RecordWriter(tmp_path / "comm_compute_ratio_50mbit.jsonl") as writer:
        for batch, other in ((2, 4.0), (16, 1.0)):
            for name, seconds in (("hook", 1.0), ("plain DDP", other), ("int8", 0.5)):
                writer.write({"candidate": name, "batch": batch, "seconds": [seconds] * 3})
    assert targets.run(tmp_path, tmp_path) == 0
    rows = read_records(tmp_path / "targets.jsonl")
    measured = [(row["value"], row["verdict"]) for row in rows if row["value"] is not None]
    assert measured == [(4.0, "PASS"), (8.0, "PASS")]
    assert {row["kind"] for row in rows} == {"latency", "quality", "cost"}
    assert capsys.readouterr().out.count("NONE") == len(rows) - 2


def test_a_measure_that_is_none_is_refused(tmp_path):
    path = tmp_path / "targets.toml"
    path.write_text(
        'currency = "EUR"\n[[target]]\nkind = "cost"\nabout = ""\nrecords = ""\n'
        'measure = "luck"\nours = ""\nleast = 1.0\n'
    )
    with pytest.raises(ConfigError, match="'luck' is no measure"):
        targets.read_targets(path)


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        ({"expected": "ends", "ended": True, "named": 1.0, "digest": "a"}, True),
        ({"expected": "ends", "ended": True, "named": 0.5, "digest": "a"}, False),
        ({"expected": "ends", "ended": False, "named": None, "digest": "a"}, False),
        ({"expected": "goes on", "ended": False, "named": None, "digest": "a"}, True),
        ({"expected": "goes on", "ended": False, "named": None, "digest": "b"}, False),
        ({"expected": "goes on", "ended": True, "named": 1.0, "digest": "a"}, False),
        ({"expected": "goes on", "ended": False, "named": None, "digest": None}, False),
    ],
)
def test_a_fault_passes_when_the_job_did_what_it_must_and_the_weights_are_right(row, passed):
    assert faults.judged(row, "a")["passed"] is passed
