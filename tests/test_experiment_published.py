"""The published measurements against bound and model, as the experiment compares them."""

import importlib

import pytest

from topo_ar.telemetry.records import read_records

published = importlib.import_module("experiments.10_published")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("published")
    assert published.run(out) == 0
    return read_records(out / "published.jsonl")


def of(rows, kind):
    return [row for row in rows if row.get("kind") == kind]


def test_no_measurement_beats_the_bound_of_its_switch_mode(rows):
    times = of(rows, "time")
    assert len(times) == 220  # all but the five whose source does not tell the NIC's rate
    for row in times:
        assert row["measured_seconds"] >= row["bound_seconds"]
    # On plain switches the bound of eight H200 would be beaten: NVLS is what makes it legal.
    fastest = max(
        row["nbytes"] / row["measured_seconds"] for row in times if row["system"] == "h200-1x8"
    )
    assert fastest > 450e9 * 8 / 14


def test_every_prediction_is_kept_with_its_null_models(rows):
    for row in of(rows, "score"):
        factors = [row[f"{model}_factor"] for model in ("nccl_model", "null_ring", "null_thumb")]
        assert min(factors) >= 1
    picks = of(rows, "choice")
    assert len(picks) == 14
    right = {
        name: sum(row[name] == row["chosen"] for row in picks)
        for name in ("nccl_model", "null_always_ring", "null_always_sharp")
    }
    assert right["nccl_model"] > max(right["null_always_ring"], right["null_always_sharp"])


def test_a_row_that_beats_its_bound_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(published, "bound_algbw", lambda case: 1e9)
    assert published.run(tmp_path) == 1
    assert "beats its bound: a100-1x8" in capsys.readouterr().out
