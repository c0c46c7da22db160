import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.hosts import processes_with, skip_without_hosts, wait_until_gone
from topo_ar.emulation.check import report
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import Results, launch, rank_environment, start
from topo_ar.emulation.loopback import LoopbackCluster, open_cluster
from topo_ar.emulation.preflight import Missing
from topo_ar.emulation.spec import ClusterSpec, parse_spec
from topo_ar.errors import EmulationError

KILLED = 128 + signal.SIGKILL
SHUFFLED = """
[[node]]
ranks = 2
nics = ["1gbit"]
rank_ids = [1, 2]
[[node]]
ranks = 1
nics = ["1gbit"]
rank_ids = [0]
"""


@pytest.fixture(scope="module")
def hosts():
    skip_without_hosts()
    with Cluster(ClusterSpec.uniform(2, 2)) as cluster:
        yield cluster


@pytest.fixture
def loopback():
    with LoopbackCluster(ClusterSpec.uniform(2, 2)) as cluster:
        yield cluster


@pytest.fixture(params=[pytest.param("hosts", marks=pytest.mark.netns), "loopback"], name="cluster")
def either(request):
    return request.getfixturevalue(request.param)


def shell(script):
    return ["sh", "-c", script]


def test_torchrun_environment():
    cluster = Cluster(parse_spec(SHUFFLED))
    keys = ["RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"]
    table = [[rank_environment(cluster, rank, 29500)[key] for key in keys] for rank in range(3)]
    assert table == [
        ["0", "0", "1", "1", "3"],
        ["1", "0", "0", "2", "3"],
        ["2", "1", "0", "2", "3"],
    ]
    first = rank_environment(cluster, 2, 29500)
    # Rank 0 sits on the second host.
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == ("10.77.0.2", "29500")
    assert (first["GLOO_SOCKET_IFNAME"], first["TOPO_AR_EMULATION"]) == ("eth0", "namespaces")
    alone = rank_environment(LoopbackCluster(parse_spec(SHUFFLED)), 2, 4711)
    assert (alone["MASTER_ADDR"], alone["MASTER_PORT"]) == ("127.0.0.1", "4711")
    assert (alone["GLOO_SOCKET_IFNAME"], alone["TOPO_AR_EMULATION"]) == ("lo", "loopback")


def test_every_rank_runs_and_its_lines_come_whole(cluster):
    lines = []
    script = "echo rank $RANK of $WORLD_SIZE; echo $OMP_NUM_THREADS $WORD >&2; printf tail"
    results = launch(
        cluster,
        shell(script),
        env={"WORD": "given"},
        timeout_s=20,
        on_line=lambda rank, line: lines.append((rank, line)),
    )
    assert results.returncodes == (0, 0, 0, 0)
    assert results.exit_code == 0
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert sorted(lines) == sorted(
        (rank, line)
        for rank in range(4)
        for line in (f"rank {rank} of 4\n".encode(), f"{threads} given\n".encode(), b"tail")
    )


@pytest.mark.netns
def test_each_rank_is_on_its_host(hosts):
    names = []
    launch(hosts, ["hostname"], on_line=lambda rank, line: names.append((rank, line)), timeout_s=20)
    assert sorted(names) == [(0, b"host0\n"), (1, b"host0\n"), (2, b"host1\n"), (3, b"host1\n")]


def test_the_exit_code_is_the_worst_of_the_ranks(cluster):
    results = launch(cluster, shell("exit $((RANK * 3))"), timeout_s=20)
    assert results.returncodes == (0, 3, 6, 9)
    assert (results.exit_code, results.timed_out, results.stopped) == (9, False, frozenset())


def test_survivors_of_a_dead_rank_have_time_to_report(cluster):
    script = "[ $RANK != 2 ] || kill -KILL $$; sleep 0.2; echo survived; exit 4"
    lines = []
    results = launch(
        cluster,
        shell(script),
        timeout_s=20,
        grace_s=5,
        on_line=lambda rank, line: lines.append((rank, line)),
    )
    assert results.returncodes == (4, 4, KILLED, 4)
    # The shell that waits for a rank in a host says "Killed".
    said = sorted(line for line in lines if line[1] != b"Killed\n")
    assert said == [(rank, b"survived\n") for rank in (0, 1, 3)]
    assert results.exit_code == KILLED


def test_survivors_that_hang_are_ended(cluster):
    begun = time.monotonic()
    results = launch(cluster, shell("[ $RANK != 1 ] || exit 3; sleep 300"), grace_s=0.2)
    assert time.monotonic() - begun < 4
    assert results.returncodes[1] == 3
    assert results.stopped == {0, 2, 3}
    assert results.exit_code == 3


def test_ranks_that_ignore_the_signal_are_killed_when_time_is_up(cluster, monkeypatch):
    monkeypatch.setattr("topo_ar.emulation.launch._STOP_SECONDS", 0.3)
    results = launch(cluster, shell("trap '' TERM; while :; do sleep 0.1; done"), timeout_s=0.2)
    assert results.timed_out
    assert results.exit_code == 124
    assert results.returncodes == (KILLED,) * 4


def test_two_jobs_at_once_and_one_rank_killed_from_outside(cluster):
    one = start(cluster, shell("sleep 0.3; exit $RANK"), grace_s=3)
    other = start(cluster, ["sleep", "300"], master_port=29501)
    os.killpg(one.pid(1), signal.SIGKILL)
    assert one.wait(20).returncodes == (0, KILLED, 2, 3)
    assert other.stop().stopped == {0, 1, 2, 3}
    assert other.wait() == other.stop()


def test_results_of_ranks_that_were_stopped_do_not_count():
    assert Results((1, 0, 137), frozenset({0, 2}), False, 1.0).exit_code == 0
    assert Results((143, 0), frozenset(), False, 1.0).exit_code == 143
    assert Results((1, 2), frozenset(), True, 1.0).exit_code == 124


def test_a_program_that_does_not_exist(cluster):
    assert launch(cluster, ["/no/such/program"], timeout_s=20).exit_code in (126, 127)


def test_loopback_is_labelled_and_says_why(monkeypatch, caplog, loopback):
    label = report(loopback)
    assert (label.emulated, label.reason, label.pairs) == (False, "asked for", ())
    missing = (Missing("kernel", "the kernel refuses"),)
    monkeypatch.setattr("topo_ar.emulation.loopback.preflight", lambda: missing)
    refused = open_cluster(ClusterSpec.uniform(2, 1))
    assert isinstance(refused, LoopbackCluster)
    assert report(refused).reason == "the kernel refuses"
    assert "Running unshaped on the loopback device" in caplog.text
    missing = (Missing("program", "the program 'ip' is missing"),)
    with pytest.raises(EmulationError, match="'ip' is missing"):
        open_cluster(ClusterSpec.uniform(2, 1))
    assert isinstance(open_cluster(ClusterSpec.uniform(2, 1), loopback=True), LoopbackCluster)


def test_a_killed_loopback_launcher_takes_its_ranks_along():
    token = f"topo-ar-test-loopback-{os.getpid()}"
    command = [sys.executable, "-m", "topo_ar", "emulate", "--loopback", "--grid", "2x1"]
    with subprocess.Popen(
        [*command, "--", "sleep", "300"],
        env={**os.environ, "EMULATION_TEST": token},
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert "NOT emulated" in job.stderr.readline()
        limit = time.monotonic() + 3
        while len(processes_with(token)) < 3 and time.monotonic() < limit:
            time.sleep(0.01)
        job.kill()
    assert wait_until_gone(token) == []


def topo_ar(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "topo_ar", "emulate", *arguments],
        capture_output=True,
        text=True,
        timeout=20,
        **options,
    )


@pytest.mark.netns
def test_the_command_line(tmp_path):
    skip_without_hosts()
    (tmp_path / "rank.py").write_text(
        "import os, sys\nprint('hi'); sys.exit(int(os.environ['RANK']))"
    )
    done = topo_ar(
        *("--grid", "2x1", "--nic", "500mbit", "--prefix", "--json", "out.json", "--grace", "5"),
        *("--", sys.executable, "rank.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] hi", "[rank 1] hi"]
    assert "2 hosts, 2 ranks" in done.stderr
    assert "of 59.78 MB/s payload" in done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["returncodes"] == [0, 1]
    assert written["emulation"]["nics"] == [[62.5e6], [62.5e6]]
    assert written["emulation"]["pairs"][0]["nic"] == "eth0"
    late = topo_ar("--no-check", "--timeout", "0.2", "--grid", "1x1", "--", "sleep", "300")
    assert late.returncode == 124


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no cluster is given; name a spec file, or write --grid 2x4"),
        (["--grid", "0x4", "--", "true"], "'0x4' is not a grid"),
        (["--grid", "2x4", "--nic", "fast", "--", "true"], "'fast' is not a link rate"),
        (["nosuch.toml", "--", "true"], "cluster spec 'nosuch.toml' cannot be read"),
        (["empty.toml", "--", "true"], "empty.toml: Object missing required field `node`"),
        (["empty.toml", "--nic", "1gbit"], "--nic 1gbit goes with --grid"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, complaint, tmp_path):
    (tmp_path / "empty.toml").write_text("")
    done = topo_ar(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert complaint in done.stderr


def test_a_missing_program_is_one_line_and_exit_code_2(tmp_path):
    done = topo_ar("--grid", "2x1", "--", "true", env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is missing; install the package util-linux" in done.stderr


def test_a_dry_run_needs_no_rights_and_no_tools(tmp_path):
    done = topo_ar("--grid", "2x1", "--dry-run", env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 0
    assert done.stdout.startswith("#!/usr/bin/env bash\n")
    assert "qdisc replace dev host1-eth0 root tbf rate 1gbit burst 131072" in done.stdout
