"""Another library's ranks in the benchmark: they take turns, and when lost they are left out."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid

import psutil
import pytest

from tests.hosts import skip_without_hosts, wait_until_gone
from tests.jobs import communicator
from tests.test_cli_bench import BENCH, bench, strict
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.loopback import LoopbackCluster
from topo_ar.emulation.openmpi import require_openmpi, start_mpi
from topo_ar.emulation.spec import ClusterSpec, parse_spec
from topo_ar.errors import ConfigError
from topo_ar.execution.benchmark import BenchConfig, run_benchmark
from topo_ar.execution.orders import Answer, PeerPlace, serve

ROUND_ROBIN = """
[[node]]
ranks = 2
nics = ["1gbit"]
rank_ids = [0, 2]
[[node]]
ranks = 1
nics = ["1gbit"]
rank_ids = [1]
"""
# One write, which lines of other ranks cannot part.
WHO = (
    "from mpi4py import MPI; import socket, sys; "
    "sys.stdout.write(f'{MPI.COMM_WORLD.rank} {socket.gethostname()}\\n')"
)


def free_place():
    with LoopbackCluster(ClusterSpec.uniform(1, 1)) as cluster:
        return PeerPlace("peer", "127.0.0.1", cluster.free_port(), "right")


def act(place, rank, fails_at):
    """Be a rank that says it took 1 s or 2 s, and that ends or falls silent at some order."""
    orders = []

    def obey(order):
        orders.append(order)
        if fails_at is not None and len(orders) == fails_at[1]:
            if fails_at[0] == "silent":
                time.sleep(3 * order.deadline_seconds)
            raise EOFError
        return Answer(1.0 + rank, 0.25 + rank / 2, 5 if order.check else 0)

    with contextlib.suppress(EOFError, OSError):
        serve(place, rank, obey)


def with_peer(rank, world_size, hosts, place, actors, settings):
    """Measure with one peer whose ranks are threads of rank 0."""
    events, threads = [], []
    if rank == 0:
        threads = [threading.Thread(target=act, args=actor, daemon=True) for actor in actors]
    for thread in threads:
        thread.start()
    config = BenchConfig(peers=(place,), **settings)
    with communicator(rank, hosts) as made:
        rows = list(run_benchmark(config, made, lambda *event: events.append(event)))
    return rows, [data for name, data in events if name == "lost"]


def measured_with(ranks, actors, place, **settings):
    settings = {"sizes": (4000, 40_000), "iterations": 2, **settings}
    results = ranks.run(with_peer, 2, [0, 1], place, actors, settings)
    assert results[1] == ([], [])
    return results[0]


def test_the_slowest_rank_counts_and_all_wrong_elements(ranks):
    place = free_place()
    stranger = PeerPlace("peer", place.address, place.port, "wrong")
    actors = [(stranger, 0, None), (place, 0, None), (place, 1, None)]
    rows, lost = measured_with(ranks, actors, place)
    assert lost == []
    assert [row["candidate"] for row in rows] == ["gloo", "plan", "peer"] * 2
    for row in rows[2::3]:
        assert (row["seconds"], row["lone_seconds"]) == ([2.0, 2.0], [2.0, 2.0])
        # Two ranks, checked before and after the timing.
        assert (row["cpu_seconds"], row["wrong"], row["calls_per_sample"]) == (0.5, 20, 1)
        assert (row["family"], row["lost"]) == (None, {})
        assert row["predicted_seconds"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("fails_at", "timeout_s", "reason"),
    [
        (("gone", 1), 20.0, "rank 1 ended"),
        (("gone", 14), 20.0, "rank 1 ended"),
        (("silent", 14), 3.0, "no answer from ranks [1] in time"),
    ],
)
def test_a_lost_peer_is_left_out_and_noted(ranks, fails_at, timeout_s, reason):
    place = free_place()
    actors = [(place, 0, None), (place, 1, fails_at)]
    rows, lost = measured_with(ranks, actors, place, timeout_s=timeout_s)
    assert lost == [{"candidate": "peer", "reason": reason}]
    assert [row["candidate"] for row in rows] == ["gloo", "plan"] * 2
    assert all(row["wrong"] == 0 for row in rows)
    assert rows[-1]["lost"] == {"peer": reason}


def test_a_peer_that_never_comes_is_left_out(ranks):
    place = free_place()
    rows, lost = measured_with(ranks, [(place, 0, None)], place, timeout_s=1.5)
    reason = "1 of 2 ranks did not come within 0.5 s"
    assert lost == [{"candidate": "peer", "reason": reason}]
    assert [row["lost"] for row in rows] == [{"peer": reason}] * 4


def skip_without_openmpi():
    try:
        require_openmpi()
    except ConfigError as error:
        pytest.skip(str(error))
    skip_without_hosts()


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    tool = tmp_path / "mpirun"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"program 'mpirun'; install Open MPI 4.1 .*topo-ar\[mpi"):
        require_openmpi()
    tool.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    tool.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package 'mpi4py'"):
        require_openmpi()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="needs Open MPI 4, but mpirun is 'HYDRA build details:'"):
        require_openmpi()
    tool.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    assert require_openmpi() == "4.1.4"


def test_without_mpirun_bench_says_so_in_one_line(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    arguments = ["--emulate", "2x1", "-s", "1M", "--against", "openmpi"]
    done = bench(*arguments, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("topo-ar: error: the peer openmpi needs the program 'mpirun'")
    done = bench(*arguments, "-d", "bfloat16")
    assert done.returncode == 2
    assert "--against openmpi cannot reduce bfloat16" in done.stderr


def test_mpi_ranks_are_on_the_hosts_of_the_ranks():
    skip_without_openmpi()
    with (
        Cluster(parse_spec(ROUND_ROBIN)) as cluster,
        start_mpi(cluster, [sys.executable, "-c", WHO]) as job,
    ):
        assert job.stop(30) == 0, job.said()
        assert sorted(job.said()) == ["0 host0", "1 host1", "2 host0"]


def test_without_hosts_mpi_ranks_are_plain_processes():
    skip_without_openmpi()
    with (
        LoopbackCluster(ClusterSpec.uniform(2, 1)) as cluster,
        start_mpi(cluster, [sys.executable, "-c", WHO]) as job,
    ):
        assert job.stop(30) == 0, job.said()
        assert [line.split()[0] for line in sorted(job.said())] == ["0", "1"]


@pytest.fixture
def token():
    return f"topo-ar-test-{uuid.uuid4().hex}"


def mpi_ranks(token):
    """The pids of a bench's MPI ranks."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if process.name().startswith("python") and "bench_mpi_worker" in command:
                found += [process.pid] * (process.environ().get("EMULATION_TEST") == token)
        except psutil.Error:
            continue
    return found


def start_bench(token, path, *arguments):
    job = subprocess.Popen(
        [*BENCH, "--emulate", "2x1", "-n", "8", "--json", str(path), *arguments],
        env={**os.environ, "EMULATION_TEST": token},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = time.monotonic() + 30
    while time.monotonic() < limit and not (path.exists() and path.stat().st_size):
        time.sleep(0.02)
    return job


def test_openmpi_takes_turns_and_nothing_is_left(token, tmp_path):
    skip_without_openmpi()
    path = tmp_path / "rows.jsonl"
    done = bench(
        *("--emulate", "2x2", "-s", "4K,300000", "-n", "2", "--json", str(path)),
        *("--against", "gloo,openmpi,openmpi-han"),
        env={"EMULATION_TEST": token},
    )
    assert done.returncode == 0, done.stderr
    rows = [strict(line) for line in path.read_text().splitlines()]
    names = ["gloo", "plan", "openmpi", "openmpi-han"]
    assert [row["candidate"] for row in rows] == names * 2
    for row in rows:
        assert (row["wrong"], row["lost"], row["world_size"]) == (0, {}, 4)
        assert row["predicted_seconds"] > 0
        assert row["manifest"]["openmpi"] == require_openmpi()
    assert wait_until_gone(token) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_bench_goes_on_without_an_mpi_rank_that_dies_or_stops(token, tmp_path, number):
    skip_without_openmpi()
    path = tmp_path / "rows.jsonl"
    sizes = ["-s", "4K,64K,256K,1M", "--against", "openmpi", "--timeout", "6"]
    with start_bench(token, path, *sizes) as job:
        os.kill(mpi_ranks(token)[-1], number)
        _, said = job.communicate(timeout=30)
    assert job.returncode == 0, said
    assert "topo-ar: openmpi is left out: " in said
    rows = [strict(line) for line in path.read_text().splitlines()]
    assert [row["candidate"] for row in rows[-2:]] == ["gloo", "plan"]
    assert list(rows[-1]["lost"]) == ["openmpi"]
    assert rows[-1]["nbytes"] == 1 << 20
    assert wait_until_gone(token) == []


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_an_ended_bench_takes_mpirun_along(token, tmp_path, number):
    skip_without_openmpi()
    path = tmp_path / "rows.jsonl"
    with start_bench(token, path, "-s", "4K,8K", "-n", "20", "--against", "openmpi") as job:
        assert len(mpi_ranks(token)) == 2
        job.send_signal(number)
        job.communicate(timeout=20)
    assert job.returncode == (130 if number == signal.SIGINT else -number)
    assert wait_until_gone(token) == []
