"""``topo-ar bench``: what it prints, what it keeps, how it ends."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts import skip_without_hosts, wait_until_gone
from tests.jobs import blocks, communicator
from topo_ar.cli.bench_events import EventReader, write_event
from topo_ar.execution.benchmark import BenchConfig, calibration_sizes, run_benchmark

BENCH = [sys.executable, "-m", "topo_ar", "bench"]
KEYS = {
    "collective",
    "candidate",
    "dtype",
    "nbytes",
    "world_size",
    "hosts",
    "iterations",
    "warmup",
    "seconds",
    "median_seconds",
    "algbw",
    "busbw",
    "wrong",
    "bound_seconds",
    "wire_limit_seconds",
    "predicted_seconds",
    "manifest",
}


def strict(line):
    def refuse(constant):
        raise AssertionError(f"{constant} in {line}")

    return json.loads(line, parse_constant=refuse)


def bench(*arguments, env=None, timeout=50, **options):
    return subprocess.run(
        [*BENCH, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
        **options,
    )


def measure(rank, world_size, hosts, settings):
    events = []
    with communicator(rank, hosts) as made:
        rows = list(
            run_benchmark(
                BenchConfig(**settings), made, lambda name, data: events.append((name, data))
            )
        )
    return rows, events


def rows_of(ranks, hosts, **settings):
    results = ranks.run(measure, len(hosts), hosts, settings)
    assert all(result == ([], []) for result in results[1:])
    return results[0]


@pytest.mark.parametrize(
    ("hosts", "factor"), [(blocks(2, 4), 1.75), (blocks(2, 1), 1.0), (blocks(1, 1), 0.0)]
)
def test_busbw_is_algbw_times_a_factor_of_the_ranks_alone(ranks, hosts, factor):
    rows, _ = rows_of(ranks, hosts, sizes=(4000, 256_000), iterations=2)
    assert [(row["nbytes"], row["candidate"]) for row in rows] == [
        (size, name) for size in (4000, 256_000) for name in ("gloo", "plan")
    ]
    for row in rows:
        assert KEYS - {"manifest"} <= row.keys()
        assert row["busbw"] == pytest.approx(factor * row["algbw"], rel=1e-12)
        assert row["algbw"] == row["nbytes"] / row["median_seconds"]
        assert (row["world_size"], row["hosts"]) == (len(hosts), len(set(hosts)))
        assert (row["wrong"], len(row["seconds"]), len(row["lone_seconds"])) == (0, 2, 2)
    slow = [row["slow_link_busbw"] for row in rows]
    assert slow == [row["algbw"] if len(set(hosts)) == 2 else None for row in rows]


def test_predictions_come_before_the_row_and_from_other_sizes(ranks):
    rows, events = rows_of(ranks, blocks(2, 1), sizes=(64_000, 640_000), iterations=1)
    assert [name for name, _ in events] == ["calibration", *["plan", "prediction"] * 2]
    calibrated = {nbytes for points in events[0][1]["points"].values() for nbytes, _ in points}
    assert calibrated
    assert calibrated.isdisjoint({64_000, 640_000})
    assert all(row["predicted_seconds"] > 0 for row in rows)
    predicted = [data["predicted_seconds"] for name, data in events if name == "prediction"]
    assert [row["predicted_seconds"] for row in rows] == [
        guess[name] for guess in predicted for name in ("gloo", "plan")
    ]


def test_other_plans_are_measured_beside_the_plan(ranks):
    against = ("plan:equal", "plan:flat")
    rows, _ = rows_of(ranks, [0, 0, 1], sizes=(40_000,), iterations=1, against=against)
    assert [(row["candidate"], row["family"], row["wrong"]) for row in rows] == [
        ("plan", rows[0]["family"], 0),
        ("plan:equal", "hierarchical_weighted", 0),
        ("plan:flat", "flat_ring", 0),
    ]
    assert len({row["plan_hash"] for row in rows[1:]}) == 2
    assert all(row["model_seconds"] > 0 for row in rows)


def test_the_plan_without_shared_memory_takes_every_rank_for_a_node(ranks):
    separate = "plan:no-shared-memory"
    rows, _ = rows_of(ranks, blocks(1, 2), sizes=(40_000,), iterations=1, against=(separate,))
    assert [(row["candidate"], row["wrong"]) for row in rows] == [("plan", 0), (separate, 0)]
    assert rows[1]["family"] != rows[0]["family"]
    assert rows[1]["plan_hash"] != rows[0]["plan_hash"]


def test_a_plan_that_cannot_be_asked_for_is_named():
    ended = bench("--emulate", "1x2", "--against", "plan:tree")
    assert ended.returncode == 2
    assert "'plan:tree' is not one of gloo, openmpi, openmpi-han, plan:auto" in ended.stderr


def test_marked_rows_carry_no_share(ranks):
    # Two hosts with one NIC each send S bytes: 16 bursts of 1000 bytes are 16,000.
    rows, _ = rows_of(
        ranks, blocks(2, 1), sizes=(15_996, 16_000), iterations=1, burst_nbytes=1000, check=False
    )
    assert [(row["marks"], row["fraction"] is None) for row in rows] == [
        (["burst"], True),
        (["burst"], True),
        ([], False),
        ([], False),
    ]
    assert all(row["wrong"] is None for row in rows)


@given(st.lists(st.integers(min_value=1, max_value=1 << 33), min_size=1, max_size=8))
def test_calibration_sizes_are_others_and_not_the_largest(sizes):
    chosen = calibration_sizes(sizes)
    assert len(set(chosen)) == len(chosen) >= 2
    assert set(chosen).isdisjoint(sizes)
    assert min(chosen) > 0
    assert max(chosen) <= max(40_000_000, max(sizes) / 3)


def test_calibration_sizes_reach_what_is_asked_for():
    assert calibration_sizes([0]) == []
    assert calibration_sizes([25_000_000]) == [20_000_000, 6_666_624]
    assert calibration_sizes([100_000_000]) == [33_333_312, 11_111_104]


def test_events_survive_what_else_a_rank_prints():
    events, texts = [], []
    reader = EventReader(lambda name, data: events.append((name, data)), texts.append)
    stream = io.StringIO()
    long = {"seconds": [0.1234567890123] * 1000}
    write_event(stream, "row", long)
    lines = stream.getvalue().encode().splitlines(keepends=True)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 4096
    reader.feed(b"a warning\n")
    reader.feed(b"begun but " + lines[0])
    reader.feed(b"in between\n")
    for line in lines[1:]:
        reader.feed(line)
    assert events == [("row", long)]
    assert texts == ["a warning\n", "begun but ", "in between\n"]
    reader.feed(lines[0][:100])
    assert len(events) == 1


@pytest.fixture(scope="module")
def debugged(tmp_path_factory):
    """A run as somebody with a script and a question starts it."""
    skip_without_hosts()
    folder = tmp_path_factory.mktemp("bench")
    command = [*BENCH, "--emulate", "2x2", "-b", "1K", "-e", "1M", "-f", "4", "-n", "2"]
    with open(folder / "table.txt", "w") as table, open(folder / "log.txt", "w") as log:
        done = subprocess.run(
            [*command, "--json", "out.jsonl", "--trace", "trace.json"],
            stdout=table,
            stderr=log,
            cwd=folder,
            timeout=55,
            env={**os.environ, "TOPO_AR_LOG": "debug", "NCCL_DEBUG": "INFO"},
        )
    assert done.returncode == 0, (folder / "log.txt").read_text()
    return folder


@pytest.mark.netns
def test_every_line_of_the_results_is_a_whole_row(debugged):
    rows = [strict(line) for line in (debugged / "out.jsonl").read_text().splitlines()]
    assert [(row["nbytes"], row["candidate"]) for row in rows] == [
        (1 << power, name) for power in range(10, 21, 2) for name in ("gloo", "plan")
    ]
    for row in rows:
        assert row.keys() >= KEYS
        assert (row["collective"], row["dtype"], row["wrong"]) == ("all_reduce", "float32", 0)
        assert (row["world_size"], row["hosts"], row["iterations"]) == (4, 2, 2)
        assert row["manifest"]["emulation"] == "namespaces"
        assert row["manifest"]["links"]["nics"] == [[125e6], [125e6]]
        # 16 bursts of 128 KiB are more than any of these sizes.
        assert (row["marks"], row["fraction"]) == (["burst"], None)
    assert json.loads((debugged / "trace.json").read_text())["traceEvents"]


@pytest.mark.netns
def test_the_table_holds_no_log_and_the_log_no_table(debugged):
    table = (debugged / "table.txt").read_text().splitlines()
    data = [line.split() for line in table if not line.startswith("#")]
    assert data[0][:4] == ["size", "count", "type", "redop"]
    assert [line[4] for line in data[2:]] == ["gloo", "plan"] * 6
    assert any("busbw" in line and "not the rate of a NIC" in line for line in table)
    log = (debugged / "log.txt").read_text()
    assert "DEBUG: 2 hosts up in" in log
    assert "topo-ar rank 0" in log
    assert "topo-ar rank 3" not in log  # equal plans are told once
    assert "@topo-ar-bench" not in log
    predictions = (debugged / "out.predictions.jsonl").read_text().splitlines()
    assert [strict(line)["event"] for line in predictions] == ["calibration"] + ["prediction"] * 6


@pytest.mark.netns
def test_json_on_stdout_is_alone_there_and_the_slow_link_is_not_beaten():
    skip_without_hosts()
    size = ["-b", "25000000", "-e", "25000000", "-n", "2"]
    done = bench("--emulate", "2x1", "--nic", "1gbit", *size, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = [strict(line) for line in done.stdout.splitlines()]
    assert [row["candidate"] for row in rows] == ["gloo", "plan"]
    for row in rows:
        assert row["busbw"] == row["algbw"]
        # What the token buckets have saved up passes unshaped.
        credit = 25e6 / (25e6 - 2 * row["manifest"]["links"]["burst"])
        assert row["slow_link_busbw"] <= 0.125e9 * 1.01 * credit
        assert row["algbw"] <= 0.125e9 * credit


@pytest.mark.slow
@pytest.mark.netns
def test_eight_ranks_on_two_hosts_do_not_beat_the_slow_link():
    skip_without_hosts()
    size = ["-b", "25000000", "-e", "25000000", "-n", "3"]
    done = bench("--emulate", "2x4", "--nic", "1gbit", *size, "--json", "-")
    assert done.returncode == 0, done.stderr
    for row in map(strict, done.stdout.splitlines()):
        assert row["busbw"] == 1.75 * row["algbw"]
        assert row["slow_link_busbw"] == row["algbw"]
        assert row["slow_link_busbw"] <= 0.125e9 * 1.01


def test_help_says_what_busbw_is():
    done = bench("--help")
    assert "it is not the rate of a NIC" in " ".join(done.stdout.split())


@pytest.mark.netns
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_rows_are_whole_and_nothing_is_left_when_it_is_ended(tmp_path, number):
    skip_without_hosts()
    token = f"topo-ar-test-{uuid.uuid4().hex}"
    path = tmp_path / "out.jsonl"
    with subprocess.Popen(
        [*BENCH, "--emulate", "2x1", "-s", "4K,64K", "-n", "20", "--json", str(path)],
        env={**os.environ, "EMULATION_TEST": token},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        limit = time.monotonic() + 30
        while time.monotonic() < limit and (
            not path.exists() or path.read_bytes().count(b"\n") < 2
        ):
            time.sleep(0.02)
        job.send_signal(number)
        _, said = job.communicate(timeout=15)
    if number == signal.SIGINT:
        assert job.returncode == 130
        assert "Traceback" not in said
    assert path.read_text().endswith("\n")
    rows = [strict(line) for line in path.read_text().splitlines()]
    assert [row["nbytes"] for row in rows] == [4096, 4096]
    assert wait_until_gone(token) == []


def test_two_ranks_of_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rest = ["--standalone", "-m", "topo_ar", "bench", "-s", "64K", "-n", "2", "--json", "-"]
    done = subprocess.run([*torchrun, *rest], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    rows = [strict(line) for line in done.stdout.splitlines()]
    assert [(row["candidate"], row["hosts"], row["wrong"]) for row in rows] == [
        ("gloo", 1, 0),
        ("plan", 1, 0),
    ]
    assert rows[0]["manifest"]["emulation"] is None
