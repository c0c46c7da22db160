"""Nothing is left of a cluster, however its creator ends."""

import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.hosts import processes_with, skip_without_hosts, wait_until_gone

CREATOR = """
import sys, time
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.spec import ClusterSpec
print("building", flush=True)
with Cluster(ClusterSpec.uniform(2, 1)) as cluster:
    for host in cluster.hosts:
        stay = "setsid sleep 300 & nohup sleep 300 >/dev/null 2>&1 & head -c 1000000 /dev/zero "
        cluster.popen(host, ["sh", "-c", stay + ">/dev/shm/left; sleep 300"])
    time.sleep(0.1)
    cluster.freeze("host1")
    print("up", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def token():
    token = f"topo-ar-test-{uuid.uuid4().hex}"
    yield token
    for pid in processes_with(token):
        os.kill(pid, signal.SIGKILL)


def create(token, **options):
    environment = {**os.environ, "EMULATION_TEST": token}
    return subprocess.Popen(
        [sys.executable, "-c", CREATOR],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def outer_state():
    devices = sorted(line.split(":")[0] for line in Path("/proc/net/dev").read_text().splitlines())
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return devices, mounts, sorted(os.listdir("/dev/shm"))


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_creator_takes_its_hosts_along(token, number):
    skip_without_hosts()
    before = outer_state()
    with create(token) as creator:
        assert creator.stdout.readline() == "building\n"
        assert creator.stdout.readline() == "up\n"
        limit = time.monotonic() + 3
        while len(processes_with(token)) < 10 and time.monotonic() < limit:
            time.sleep(0.02)
        # Switch, two hosts and their unshare, and three sleeps a host at the very least.
        assert len(processes_with(token)) >= 10
        assert outer_state() == before
        creator.send_signal(number)
    assert wait_until_gone(token) == []
    assert outer_state() == before


@pytest.mark.netns
@pytest.mark.parametrize("delays_ms", [(0, 10, 20, 30), (40, 55, 70, 90), (5, 15, 25, 35)])
def test_a_creator_killed_while_it_builds_leaves_nothing(token, delays_ms):
    skip_without_hosts()
    for delay in delays_ms:
        with create(token) as creator:
            assert creator.stdout.readline() == "building\n"
            time.sleep(delay / 1e3)
            creator.kill()
        assert wait_until_gone(token) == []


@pytest.mark.netns
def test_an_error_inside_the_with_block_ends_the_hosts(token, monkeypatch):
    skip_without_hosts()
    from topo_ar.emulation.cluster import Cluster
    from topo_ar.emulation.spec import ClusterSpec

    monkeypatch.setenv("EMULATION_TEST", token)

    def fail():
        with Cluster(ClusterSpec.uniform(2, 1)) as cluster:
            cluster.popen("host0", ["sleep", "300"])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert processes_with(token) == []


def emulate(token, *arguments, **options):
    command = [sys.executable, "-m", "topo_ar", "emulate", "--no-check", *arguments]
    return subprocess.Popen(command, env={**os.environ, "EMULATION_TEST": token}, **options)


@pytest.mark.netns
def test_ctrl_c_at_a_terminal_lets_the_ranks_clean_up(token):
    skip_without_hosts()
    script = "trap 'echo cleaned; exit 5' INT; echo running; while :; do sleep 0.05; done"
    leader, follower = pty.openpty()
    pipe = subprocess.PIPE
    with emulate(
        token,
        *("--grid", "2x1", "--", "sh", "-c", script),
        stdin=follower,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        # The terminal has to be the controlling one for ^C to mean something.
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    ) as job:
        os.close(follower)
        assert job.stdout.readline() == "running\n"
        assert job.stdout.readline() == "running\n"
        os.write(leader, b"\x03")
        output, errors = job.communicate(timeout=10)
    os.close(leader)
    assert output == "cleaned\ncleaned\n"
    assert job.returncode == 130
    assert "Traceback" not in errors
    assert wait_until_gone(token) == []


@pytest.mark.netns
def test_an_interrupt_while_the_hosts_are_built(token):
    skip_without_hosts()
    with emulate(token, "--grid", "8x1", "--", "sleep", "300", stderr=subprocess.PIPE) as job:
        limit = time.monotonic() + 5
        while len(processes_with(token)) < 2 and time.monotonic() < limit:
            time.sleep(0.005)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=10)
    assert job.returncode == 130, errors
    assert b"Traceback" not in errors
    assert wait_until_gone(token) == []


ROOTLESS = """
import os
from topo_ar.emulation.check import report
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import launch
from topo_ar.emulation.spec import ClusterSpec
assert os.geteuid() != 0
with Cluster(ClusterSpec.uniform(2, 2)) as cluster:
    print(cluster.run("host1", ["hostname"]).strip())
    cluster.set_rate("host0", "eth0", "200mbit")
    pair = report(cluster).pairs[0]
    print(pair.forward <= 1.05 * 23.91e6, pair.congestion_control)
    cluster.freeze("host0")
    cluster.thaw("host0")
    print(launch(cluster, ["sh", "-c", "exit $RANK"]).returncodes)
    cluster.crash("host1")
"""


def as_nobody(program, environment):
    """Run a program as user nobody, with the first interpreter of our version it may use."""
    # The shell comes first because setpriv itself still has root's rights when it starts a program.
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "sh", "-c"]
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, system):
        command = [*user, 'exec "$0" -c "$1"', python]
        tried = subprocess.run(
            [*command, "import topo_ar.emulation.launch"], env=environment, capture_output=True
        )
        if tried.returncode == 0:
            return subprocess.run(
                [*command, program], env=environment, capture_output=True, text=True, timeout=20
            )
    pytest.skip("user nobody may not read the interpreter or the packages")


def test_an_ordinary_user_can_do_the_same(token):
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    skip_without_hosts()
    packages = [path for path in sys.path if path.endswith("site-packages")]
    path = os.pathsep.join([str(Path(__file__).parent.parent), *packages])
    environment = {**os.environ, "EMULATION_TEST": token, "PYTHONPATH": path}
    result = as_nobody(ROOTLESS, environment)
    if "the kernel refuses new namespaces" in result.stderr:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.stdout == "host1\nTrue cubic\n(0, 1, 2, 3)\n", result.stderr
    assert wait_until_gone(token) == []
