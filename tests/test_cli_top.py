"""``topo-ar top`` over records as jobs write them."""

import io
import json
import subprocess
import sys
import time

import msgspec
import pytest

from tests.hosts import ROOT
from tests.test_job_watch import window
from tests.test_topology_cli import run
from topo_ar.cli.top import frame
from topo_ar.telemetry.job_windows import JobStart, RecordFile

START = JobStart(((0, 1), (2,)), {"schema": 1})


@pytest.fixture
def job(tmp_path):
    RecordFile(tmp_path / "telemetry.jsonl", START, 1 << 20).write(window())
    return tmp_path


def test_one_frame_says_what_a_record_does(job, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(monkeypatch, "top", str(job), "--once") == 0
    shown = capsys.readouterr().out
    for text in (
        "3 ranks on 2 nodes, steps 45 - 52",
        "exposed 29.3%, plain",
        "432 KiB inside nodes",
        "27.94 MB/s  1 (62%)",
        "late rank: rank 1 computes",
        "fallbacks 0",
    ):
        assert text in shown


def test_the_record_comes_as_json(job, monkeypatch, capsys) -> None:
    assert run(monkeypatch, "top", str(job / "telemetry.jsonl"), "--json") == 0
    assert msgspec.convert(json.loads(capsys.readouterr().out), type(window())) == window()


@pytest.mark.parametrize("begun", [False, True])
def test_where_nothing_is_that_is_said(tmp_path, monkeypatch, capsys, begun) -> None:
    if begun:
        RecordFile(tmp_path / "telemetry.jsonl", START, 1 << 20)
    assert run(monkeypatch, "top", str(tmp_path), "--once") == 2
    said = capsys.readouterr().err
    assert ("no complete window yet" if begun else "no telemetry at") in said


def test_large_jobs_show_the_ranks_that_are_late() -> None:
    from rich.console import Console

    many = tuple(float(rank == 700) for rank in range(1000))
    ranks = msgspec.structs.replace(window().ranks, late_seconds=many, wait_seconds=many)
    ranks = msgspec.structs.replace(ranks, compute_seconds=many, last_share=many)
    console = Console(width=120, file=io.StringIO())
    console.print(frame(None, window(ranks=msgspec.to_builtins(ranks)), ROOT))
    shown = console.file.getvalue()
    assert " 700 " in shown
    assert "984 more" in shown


def test_it_follows_a_growing_file(job) -> None:
    """Ctrl-C ends it, with the newest window on the screen."""
    command = [sys.executable, "-m", "topo_ar", "top", str(job), "-n", "0.1"]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(1.0)
        line = msgspec.json.encode(window(last_step=4321)) + b"\n"
        with (job / "telemetry.jsonl").open("ab") as file:
            file.write(line)
        time.sleep(1.0)
    finally:
        shown.send_signal(2)
    out, _ = shown.communicate(timeout=10)
    assert shown.returncode == 130
    assert "steps 45 - 4321" in out
