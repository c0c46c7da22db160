"""``topo-ar simulate`` from the command line: results, text, traces, complaints."""

import json
import subprocess
import sys

import pytest

from topo_ar.telemetry.records import read_records
from topo_ar.telemetry.trace import read_trace

TRACE = "experiments/results/ddp_parity.buckets.json"


def simulate(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "topo_ar", "simulate", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_sizes_are_simulated_beside_prediction_and_bound(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        json.loads(line)
        for line in simulate(
            "cpu-host", "--nodes", "2", "-s", "64K,25MB", "--json", "-o", str(path)
        ).splitlines()
    ]
    assert [row["nbytes"] for row in rows] == [65536, 25_000_000]
    for row in rows:
        assert row["simulated"] is True
        assert row["median_seconds"] >= row["bound_seconds"]
        assert row["links"][0]["busy"] <= 1
    assert rows[1]["median_seconds"] == pytest.approx(rows[1]["model_seconds"], rel=1e-6)
    kept = read_records(path)
    assert [row["median_seconds"] for row in kept] == [row["median_seconds"] for row in rows]
    assert kept[0]["manifest"]["schema"] == 1
    text = simulate("cpu-host", "--nodes", "2", "-s", "25MB", "--family", "flat_ring")
    assert "flat_ring" in text
    assert "8 ranks on 2 nodes, simulated" in text


def test_a_measured_trace_is_simulated_and_drawn_beside_it(tmp_path):
    path = tmp_path / "step.json"
    options = ["cpu-host", "--nodes", "2", "--trace", TRACE, "--perfetto", str(path), "--json"]
    row = json.loads(simulate(*options, "--jitter", "0.05", "--steps", "4"))
    assert len(row["seconds"]) == 4
    assert len(set(row["seconds"])) == 4
    assert row["exposed_seconds"] > 0
    assert row["nbytes_between"] == 2 * sum(bucket["nbytes"] for bucket in row["buckets"])
    spans = read_trace(path)
    measured = [span for span in spans if span.lane.startswith("measured")]
    assert len(measured) == len(row["buckets"])
    assert {span.lane for span in spans} >= {"compute", "inter", "intra"}


def test_a_hybrid_job_is_said_for_a_person(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "EUR"\nnode_hour = 9\n')
    text = simulate(
        "dgx-h100",
        "--nodes",
        "4",
        "--params",
        "340M",
        "--backward-seconds",
        "0.1",
        "--tensor",
        "8:32MB:24",
        "--pipeline",
        "2:8MB:8",
        "--sharded",
        "16MB:2",
        "--straggler",
        "3:1.1",
        "--prices",
        str(prices),
    )
    assert "32 ranks on 4 nodes" in text
    assert "exposed communication" in text
    assert "other dimensions" in text
    # Four nodes at 1 cent a second, and a step of at least 0.15 s.
    (cost,) = (line for line in text.splitlines() if "million steps" in line)
    assert float(cost.split()[-2].replace(",", "")) > 1e6 * 0.15 * 0.01
    assert cost.endswith("EUR")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give all-reduce sizes with --size, or a training step"),
        (["-s", "1M", "--jitter", "0.1"], "only --family goes with it"),
        (["--params", "1M", "--family", "direct"], "choose with --mode"),
        (["--params", "1M", "--mode", "fast"], "mode 'fast' is unknown"),
        (["--params", "1M", "--straggler", "x"], "'x' is no straggler"),
        (["--params", "1M", "--tensor", "3:1M:1"], "8 ranks cannot be divided"),
        (["--params", "1M", "--tensor", "2:1M"], "is not ranks, bytes and operations"),
        (["-s", "6"], "whole fp32 elements"),
        (["-s", "1M", "--family", "magic"], "is no algorithm"),
    ],
)
def test_bad_options_are_one_line(arguments, message):
    said = simulate("cpu-host", "--nodes", "2", *arguments, code=2)
    assert message in said
    assert len(said.splitlines()) == 1
