"""Faults of emulated hosts: a link that goes, comes back or slows down; no shared memory."""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests import detection
from tests.hosts import ROOT, skip_without_hosts
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import start
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.planning.schedule import Stage

pytestmark = [pytest.mark.netns, pytest.mark.timeout(150)]

Row = dict[str, Any]


def _under(
    fault: Callable[[Cluster], None],
    *,
    timeout_s: float,
    seconds: float = 60.0,
    plan: str = "hierarchical",
    nodes: int = 2,
    nic: str = "1gbit",
) -> tuple[list[Row], float]:
    """Run ranks on two a host, do `fault` once all run; return how they ended, and its time."""
    skip_without_hosts()
    rows: list[Row] = []
    said: list[str] = []
    running = threading.Semaphore(0)

    def on_line(rank: int, line: bytes) -> None:
        said.append(line.decode())
        if line.startswith(b"{"):
            row = json.loads(line)
            if row["event"] == "running":
                running.release()
            else:
                rows.append(row)

    with Cluster(ClusterSpec.uniform(nodes, 2, nic), keep=[ROOT]) as cluster:
        command = [sys.executable, "-m", "tests.fault_worker", str(timeout_s), str(seconds), plan]
        job = start(cluster, command, cwd=ROOT, on_line=on_line)
        for _ in range(2 * nodes):
            assert running.acquire(timeout=60), "".join(said)
        begin = time.monotonic()
        fault(cluster)
        results = job.wait(60)
        assert not results.timed_out, "".join(said)
    assert len(rows) == 2 * nodes, "".join(said)
    return sorted(rows, key=lambda row: row["rank"]), begin


def _pull_the_cable(cluster: Cluster) -> None:
    cluster.link("host1", "eth0", up=False)


def _take_the_interface_down(cluster: Cluster) -> None:
    cluster.run("host1", ["ip", "link", "set", "eth0", "down"])


@pytest.mark.parametrize(
    ("fault", "plan"),
    [
        (_pull_the_cable, "hierarchical"),
        pytest.param(_take_the_interface_down, "hierarchical", marks=pytest.mark.slow),
        pytest.param(_pull_the_cable, "flat", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_host_without_link_ends_the_job_everywhere(fault, plan) -> None:
    timeout_s = 2.0
    rows, begin = _under(fault, timeout_s=timeout_s, plan=plan)
    for row in rows:
        assert row["wrong"] == 0
        assert "text" in row, row
        text = row["text"]
        # Both sides see only that the other one is silent.
        other = 1 - row["rank"] // 2
        if plan == "flat":  # gloo says that nobody came in time, not who
            assert "Timed out" in text
        else:
            assert row["nodes"] in ([other], [1 - other]), text
            assert f"on node {row['nodes'][0]}" in text
            assert row["ranks"], text
        assert row["stage"] in {str(stage) for stage in Stage}
        assert f"in stage {row['stage']} of collective {row['collective']}" in text
        assert row["last"] == row["collective"] - 1
        assert f"last completed collective {row['last']}" in text
        assert timeout_s * 0.9 < row["at"] - begin < timeout_s + 8.0, text
    last = max(row["at"] for row in rows)
    detection.note(f"{fault.__name__}, {plan}".strip("_"), [0, 0, 1, 1], last - begin, timeout_s)


@pytest.mark.slow
def test_three_nodes_name_the_one_that_is_cut_off() -> None:
    rows, begin = _under(_pull_the_cable, timeout_s=2.0, nodes=3)
    for row in rows:
        assert 1.8 < row["at"] - begin < 10.0, row
        if row["rank"] in (0, 1, 4, 5):
            assert 1 in row["nodes"], row["text"]


def test_a_link_that_comes_back_in_time_costs_only_time() -> None:
    def flap(cluster: Cluster) -> None:
        cluster.link("host1", "eth0", up=False)
        time.sleep(0.7)
        cluster.link("host1", "eth0", up=True)

    rows, _ = _under(flap, timeout_s=10.0, seconds=2.5)
    for row in rows:
        assert "text" not in row, row["text"]
        assert (row["wrong"], row["fallbacks"]) == (0, 0)
        assert row["longest"] > 0.6


@pytest.mark.slow
def test_a_link_at_a_tenth_of_its_rate_is_no_fault() -> None:
    def slow_down(cluster: Cluster) -> None:
        cluster.set_rate("host1", "eth0", "20mbit")

    # A call takes 0.8 s then, more than the deadline if bytes did not move all the while.
    rows, _ = _under(slow_down, timeout_s=0.6, seconds=3.0, nic="200mbit")
    for row in rows:
        assert "text" not in row, row["text"]
        assert (row["wrong"], row["fallbacks"]) == (0, 0)
        assert row["longest"] > 1.0


def test_shared_memory_without_room_takes_nothing_but_zero_copy() -> None:
    """Staging has anonymous memory of its own; buffers stay where they are, and that is said."""
    skip_without_hosts()
    rows: list[Row] = []
    said: list[str] = []

    def on_line(rank: int, line: bytes) -> None:
        said.append(line.decode())
        if line.startswith(b"{"):
            rows.append(json.loads(line))

    with Cluster(ClusterSpec.uniform(1, 2), keep=[ROOT]) as cluster:
        cluster.run("host0", ["mount", "-o", "remount,size=1m", "/dev/shm"])
        command = [sys.executable, "-m", "tests.small_shm_worker"]
        assert start(cluster, command, cwd=ROOT, on_line=on_line).wait(60).exit_code == 0, said
    assert sorted(row["rank"] for row in rows) == [0, 1]
    for row in rows:
        assert row["room"] <= 1 << 20
        assert (row["wrong"], row["in_shm"], row["plain"]) == (0, False, None)
    told = [line for line in said if "/dev/shm is too small to share a buffer" in line]
    assert len(told) == 2, said  # once by each rank, without any option
