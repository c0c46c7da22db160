"""Telemetry of live jobs: who is waited for, what is written, and what it takes itself."""

import json
import os
import re
import sys
from itertools import pairwise
from unittest.mock import patch

import msgspec
import pytest

import topo_ar
from tests.compressed_training import on_hosts
from tests.hosts import ROOT, skip_without_hosts
from tests.watched_training import one_step, paced
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import start
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ConfigError
from topo_ar.telemetry import job_windows
from topo_ar.telemetry.job_windows import JobStart, RecordFile, Window, read_windows
from topo_ar.telemetry.open_metrics import open_metrics


def _watched(rank, world_size, path, slow_rank, steps, hosts, skew=0.0, plan="flat"):
    on_hosts(rank, hosts)
    ddp = paced(0.048 if rank == slow_rank else 0.04)
    asked = topo_ar.Telemetry(path, window_s=0.3)
    with topo_ar.attach(ddp, telemetry=asked, plan=plan, timeout_s=20.0) as handle:
        clock = handle.telemetry.clock
        handle.telemetry.clock = lambda: clock() + skew * hosts[rank]
        for step in range(steps):
            one_step(ddp, rank, step)
        return handle.fallbacks


def test_a_rank_slowed_by_a_fifth_is_named(ranks, tmp_path) -> None:
    ranks.run(_watched, 3, tmp_path, 1, 34, [0, 0, 0])
    start_record, windows = read_windows(tmp_path)
    assert start_record is not None
    assert start_record.nodes == ((0, 1, 2),)
    assert len(windows) >= 2
    # The machine has other things to do: what most windows say counts.
    named = [{(c.about, c.ranks) for c in window.causes} for window in windows]
    assert sum(("late rank", (1,)) in each for each in named) > len(named) / 2, named
    assert not any(about != "late rank" for each in named for about, _ in each)
    for before, after in pairwise(windows):
        assert after.first_step == before.last_step + 1
    last = windows[-1]
    assert last.path == "plain"
    assert [b.nbytes for b in last.buckets] == [96 * 96 * 4] * 3
    assert (last.nbytes_inside, last.nbytes_between) == (4 * 3 * 96 * 96 * 4, 0)
    assert last.own_seconds_per_bucket < last.step_seconds
    assert len(last.spans) == 3
    for calls in last.spans:
        assert all(call <= begin <= done for call, begin, done in calls)
    text = (tmp_path / "topo_ar.prom").read_text()
    assert f"topo_ar_steps_total {last.last_step + 1}.0" in text


def test_clocks_of_hosts_may_differ_by_hours(ranks, tmp_path) -> None:
    ranks.run(_watched, 3, tmp_path / "skewed.jsonl", 2, 30, [0, 1, 1], 7000.0, "auto")
    _, windows = read_windows(tmp_path / "skewed.jsonl")
    for window in windows:
        assert window.clock_uncertainty_seconds < window.step_seconds_max
        for bucket in window.buckets:
            assert 0 <= bucket.wait_seconds <= window.step_seconds_max
            assert bucket.transfer_seconds <= window.step_seconds_max
        assert window.nbytes_between > 0
    assert max(w.ranks.late_seconds[2] for w in windows) > 0.002
    assert os.listdir(tmp_path) == ["skewed.jsonl"]


def test_one_rank_has_telemetry_too(ranks, tmp_path) -> None:
    ranks.run(_watched, 1, tmp_path, -1, 12, [0])
    windows = read_windows(tmp_path)[1]
    assert windows[-1].ranks.last_share == (0.0,)
    assert (windows[-1].nbytes_inside, windows[-1].causes) == (0, ())


def _attach_fails(rank, world_size, path, tensorboard):
    ddp = paced(0.0)
    asked = topo_ar.Telemetry(path, tensorboard=tensorboard)
    missing = patch.dict(sys.modules, {"torch.utils.tensorboard": None})
    with missing, pytest.raises(ConfigError) as caught:
        topo_ar.attach(ddp, telemetry=asked, timeout_s=10.0)
    return str(caught.value)


def test_what_rank_0_cannot_write_fails_on_all_ranks(ranks, tmp_path) -> None:
    (tmp_path / "file").touch()
    said = ranks.run(_attach_fails, 2, tmp_path / "file" / "below", False)
    assert said[0] == said[1]
    assert "cannot write telemetry" in said[0]
    said = ranks.run(_attach_fails, 2, tmp_path, True)
    assert said == ["Telemetry(tensorboard=True) needs TensorBoard: pip install tensorboard"] * 2


def test_options_that_cannot_be_meant_are_refused() -> None:
    for options, message in (
        ({"window_s": 0.0}, "window_s"),
        ({"max_nbytes": 10}, "max_nbytes"),
        ({"path": "a.jsonl", "tensorboard": True}, "needs a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            topo_ar.Telemetry(**{"path": "x", **options})


def window(**values) -> Window:
    """Return a window with some values of its own."""
    row = json.loads((ROOT / "tests" / "data" / "telemetry_window.json").read_text())
    return msgspec.convert({**row, **values}, Window)


def test_records_are_bounded_and_come_back(tmp_path) -> None:
    start_record = JobStart(((0, 1),), {"schema": 1})
    file = RecordFile(tmp_path / "telemetry.jsonl", start_record, 1 << 16)
    for step in range(200):
        file.write(window(last_step=step))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"telemetry.jsonl", "telemetry.1.jsonl"}
    assert max(sizes.values()) < (1 << 16) + 10_000
    again, windows = read_windows(tmp_path)
    assert again == start_record
    assert windows[-1].last_step == 199
    assert windows[-1] == window(last_step=199)
    with patch.object(job_windows, "_TAIL_NBYTES", 20_000):
        assert job_windows.read_last(tmp_path) == (start_record, windows[-1])
    assert job_windows.read_last(tmp_path) == (start_record, windows[-1])
    with (tmp_path / "telemetry.jsonl").open("ab") as file_:
        file_.write(b'{"kind": "window", "uni')  # a line that is still being written
    assert read_windows(tmp_path)[1] == windows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no telemetry at"),
        (b"{}\n", ":1: not telemetry"),
        (b'{"kind": "job", "nodes": [], "manifest": {}, "schema": 9}\n', "schema 9"),
    ],
)
def test_what_is_no_telemetry_is_explained(tmp_path, content, message) -> None:
    path = tmp_path / "telemetry.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_windows(path)


_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABELS = r'(\{[a-zA-Z_]\w*="([^"\\\n]|\\[\\n"])*"(,[a-zA-Z_]\w*="([^"\\\n]|\\[\\n"])*")*\})?'
_SAMPLE = re.compile(rf"({_NAME}){_LABELS} -?\d+(\.\d+)?(e[+-]?\d+)?")


def test_metrics_keep_the_rules_of_open_metrics() -> None:
    """As the ABNF of OpenMetrics 1.0 has it: blocks of families, suffixes, no doubles, an end."""
    text = open_metrics(window(reason='a "b"\n\\c'), job='x"\\\n')
    assert text.endswith("# EOF\n")
    seen: set[str] = set()
    samples: set[str] = set()
    family = kind = ""
    for line in text.splitlines()[:-1]:
        if line.startswith("#"):
            _, word, name, value = line.split(" ", 3)
            if word == "TYPE":
                assert name not in seen
                seen.add(name)
                family, kind = name, value
                assert kind in {"gauge", "counter"}
            else:
                assert name == family
            if word == "UNIT":
                assert name.endswith(f"_{value}")
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, line
        assert match[1] == (f"{family}_total" if kind == "counter" else family)
        assert line.rpartition(" ")[0] not in samples
        samples.add(line.rpartition(" ")[0])
    assert "topo_ar_step_seconds" in seen


def test_prometheus_own_parser_reads_the_metrics() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    found = {f.name: f for f in parser.text_string_to_metric_families(open_metrics(window()))}
    assert found["topo_ar_steps"].samples[0].value == window().last_step + 1
    assert len(found["topo_ar_rank_wait_seconds"].samples) == len(window().ranks.wait_seconds)


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("slow_rank", "side", "halved"), [(3, 128, False), (-1, 512, True)], ids=["rank", "NIC"]
)
def test_a_slow_rank_and_a_slow_nic_are_told_apart(tmp_path, slow_rank, side, halved) -> None:
    """On three hosts of two ranks: the one is named rightly and never the other."""
    skip_without_hosts()
    said: list[bytes] = []
    directory = tmp_path / "telemetry"
    directory.mkdir()
    with Cluster(ClusterSpec.uniform(3, 2, ["200mbit"]), keep=[ROOT, directory]) as cluster:

        def on_line(rank: int, line: bytes) -> None:
            said.append(line)
            if b'"before"' in line and halved:
                cluster.set_rate("host1", "eth0", "100mbit")

        command = [sys.executable, "-m", "tests.watch_worker", str(directory)]
        job = start(cluster, [*command, str(slow_rank), str(side)], cwd=ROOT, on_line=on_line)
        assert job.wait(240).exit_code == 0, b"".join(said).decode()
    _, windows = read_windows(directory)
    named = [{(cause.about, cause.ranks) for cause in window.causes} for window in windows]
    after = named[-3:]
    if halved:
        assert {("slow NIC", (2, 3))} in after, named
        assert all(each <= {("slow NIC", (2, 3))} for each in named), named
        before, last = windows[1].buckets[0], windows[-1].buckets[0]
        assert 1.5 < last.transfer_seconds / before.transfer_seconds < 2.6
    else:
        assert after == [{("late rank", (3,))}] * 3, named
        assert all(each <= {("late rank", (3,))} for each in named), named
