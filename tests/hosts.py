"""For tests that need emulated hosts, and for finding what a test left behind."""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import start
from topo_ar.emulation.preflight import preflight
from topo_ar.emulation.spec import ClusterSpec

ROOT = Path(__file__).parents[1]

_missing = functools.cache(preflight)


def skip_without_hosts() -> None:
    """Skip the test with the preflight's sentence where hosts cannot be emulated."""
    if _missing():
        pytest.skip(_missing()[0].sentence)


def rows_of_ranks(spec: ClusterSpec, module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a module on every rank of emulated hosts and return the JSON lines that they print."""
    lines: list[bytes] = []
    with Cluster(spec, keep=[ROOT]) as cluster:
        job = start(
            cluster,
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            on_line=lambda rank, line: lines.append(line),
        )
        assert job.wait(50).exit_code == 0, b"".join(lines).decode()
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def processes_with(token: str) -> list[int]:
    """Return the pids of all processes whose environment holds `token`."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            environment = (directory / "environ").read_bytes()
            zombie = (directory / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if token.encode() in environment and not zombie:
            found.append(int(directory.name))
    return found


def wait_until_gone(token: str, seconds: float = 3.0) -> list[int]:
    """Wait for all processes with `token` to end; return those that did not."""
    limit = time.monotonic() + seconds
    while (left := processes_with(token)) and time.monotonic() < limit:
        time.sleep(0.02)
    return left
