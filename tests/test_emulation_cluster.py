import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import skip_without_hosts
from topo_ar.emulation.check import check_pair, report, round_trip
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.layout import lay_out
from topo_ar.emulation.preflight import preflight
from topo_ar.emulation.spec import ClusterSpec, parse_spec
from topo_ar.emulation.steps import build_steps, shell_script
from topo_ar.errors import ConfigError, EmulationError

pytestmark = pytest.mark.netns
PYTHON = [sys.executable, "-I", "-S", "-c"]


@pytest.fixture(scope="module")
def cluster():
    skip_without_hosts()
    with Cluster(ClusterSpec.uniform(2, 2)) as cluster:
        yield cluster


@pytest.fixture
def own_cluster():
    skip_without_hosts()
    with Cluster(ClusterSpec.uniform(2, 1, "200mbit")) as cluster:
        yield cluster


def carries(pair):
    """Never more than the shaped rate; how much less is the machine's load, and `held` says it."""
    rates = (pair.forward, pair.backward)
    assert max(rates) <= 1.05 * pair.expected
    assert pair.held == (min(rates) >= 0.95 * pair.expected)


def test_each_host_is_a_machine_of_its_own(cluster):
    assert cluster.hosts == ("host0", "host1")
    seen = []
    for host in cluster.hosts:
        assert cluster.run(host, ["hostname"]) == f"{host}\n"
        what = "cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/"
        kinds = ["net", "uts", "ipc", "pid", "mnt"]
        seen.append(cluster.run(host, ["sh", "-c", what + " /proc/self/ns/".join(kinds)]).split())
        assert cluster.run(host, ["sh", "-c", "ls /sys/class/net"]).split() == ["eth0", "lo"]
        assert "2.2.2.2" not in cluster.run(host, ["cat", "/etc/hosts"])
        assert "10.77.0.2 host1\n" in cluster.run(host, ["cat", "/etc/hosts"])
    assert not set(seen[0]) & set(seen[1])


def test_memory_and_files_of_one_host_are_out_of_sight_of_the_other(cluster):
    owner = (
        "import os, socket\n"
        "fd = os.memfd_create('secret')\n"
        "name = socket.socket(socket.AF_UNIX); name.bind(chr(0) + 'emulated'); name.listen()\n"
        "open('/dev/shm/shared', 'w').close(); open('/tmp/file', 'w').close()\n"
        "print(os.getpid(), fd, flush=True); input()\n"
    )
    probe = (
        "import os, socket, sys\n"
        "print(*[os.path.exists(path) for path in sys.argv[1:]])\n"
        "try: socket.socket(socket.AF_UNIX).connect(chr(0) + 'emulated'); print('reached')\n"
        "except OSError: print('refused')\n"
    )
    pipe = subprocess.PIPE
    job = cluster.popen("host0", [*PYTHON, owner], stdin=pipe, stdout=pipe, text=True)
    pid, fd = job.stdout.readline().split()
    paths = [f"/proc/{pid}/fd/{fd}", "/dev/shm/shared", "/tmp/file"]
    opened = "import sys; open(sys.argv[1], 'rb').close()"
    cluster.run("host0", [*PYTHON, opened, paths[0]])
    with pytest.raises(EmulationError, match=r"FileNotFoundError|No such file"):
        cluster.run("host1", [*PYTHON, opened, paths[0]])
    assert cluster.run("host0", [*PYTHON, probe, *paths[1:]]) == "True True\nreached\n"
    assert cluster.run("host1", [*PYTHON, probe, *paths[1:]]) == "False False\nrefused\n"
    job.communicate("\n")
    assert job.returncode == 0
    assert not Path("/dev/shm/shared").exists()


def test_a_command_keeps_its_streams_environment_directory_and_exit_code(cluster, tmp_path):
    script = "read word; echo $word $GREETING $(pwd); echo oops >&2; exit 7"
    pipe = subprocess.PIPE
    job = cluster.popen(
        "host1",
        ["sh", "-c", script],
        env={"GREETING": "hello", "PATH": os.environ["PATH"]},
        cwd="/usr",
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    assert job.communicate("well\n") == ("well hello /usr\n", "oops\n")
    assert job.returncode == 7
    killed = cluster.popen("host1", ["sh", "-c", "kill -KILL $$"])
    assert killed.wait() == 128 + signal.SIGKILL
    with pytest.raises(EmulationError, match="sleep on host0 did not end within"):
        cluster.run("host0", ["sleep", "60"], timeout_s=0.1)
    with pytest.raises(EmulationError, match="false on host0 ended with 1"):
        cluster.run("host0", ["false"])


def test_links_carry_their_rate_and_change_it_while_they_run(cluster):
    checked = report(cluster)
    assert checked.emulated
    assert checked.burst == 131072
    assert [(pair.a, pair.b, pair.congestion_control) for pair in checked.pairs] == [
        ("host0", "host1", "cubic")
    ]
    assert checked.pairs[0].expected == pytest.approx(119.55e6, rel=1e-3)
    carries(checked.pairs[0])
    cluster.set_rate("host0", "eth0", "200mbit")
    slow = check_pair(cluster, "host0", "host1")
    cluster.set_rate("host0", "eth0", 125e6)
    assert slow.expected == pytest.approx(checked.pairs[0].expected / 5)
    carries(slow)


def test_counters_count_what_was_sent(cluster):
    before = cluster.counters("host0")
    pipe = subprocess.PIPE
    sink = "import socket\ns = socket.create_server(('10.77.0.2', 9)); print(flush=True)\n"
    sink += "c = s.accept()[0]\nwhile c.recv(1 << 20): pass\n"
    source = "import socket\nsocket.create_connection(('10.77.0.2', 9)).sendall(bytes(10**6))"
    job = cluster.popen("host1", [*PYTHON, sink], stdout=pipe, text=True)
    job.stdout.readline()
    cluster.run("host0", [*PYTHON, source])
    job.communicate(timeout=5)
    sent = cluster.counters("host0")["eth0"] - before["eth0"]
    assert set(before) == {"eth0"}
    # Retransmissions and headers come on top.
    assert 1_000_000 < sent < 1_300_000


def test_a_cable_pulled_out_and_put_back(own_cluster):
    reach = (
        "import socket, sys\n"
        "try: socket.create_connection(('10.77.0.2', 9), 0.3)\n"
        "except TimeoutError: print('silent')\n"
        "except ConnectionRefusedError: print('there')\n"
    )
    assert own_cluster.run("host0", [*PYTHON, reach]) == "there\n"
    own_cluster.link("host1", "eth0", up=False)
    assert own_cluster.run("host0", [*PYTHON, reach]) == "silent\n"
    own_cluster.link("host1", "eth0", up=True)
    assert own_cluster.run("host0", [*PYTHON, reach.replace("0.3", "3")]) == "there\n"


def test_a_frozen_host_does_nothing_until_it_thaws(own_cluster):
    tick = "import time\nwhile True: print('.', flush=True); time.sleep(0.01)"
    job = own_cluster.popen("host0", [*PYTHON, tick], stdout=subprocess.PIPE)
    assert job.stdout.read(2) == b".\n"
    own_cluster.freeze("host0")
    time.sleep(0.05)
    os.set_blocking(job.stdout.fileno(), False)
    job.stdout.read()
    time.sleep(0.1)
    assert not job.stdout.read()
    own_cluster.thaw("host0")
    os.set_blocking(job.stdout.fileno(), True)
    assert job.stdout.read(2) == b".\n"
    own_cluster.kill_jobs("host0")
    assert job.wait(5) == 128 + signal.SIGKILL
    job.stdout.close()


def test_a_frozen_host_can_be_removed():
    skip_without_hosts()
    with Cluster(ClusterSpec.uniform(2, 1)) as cluster:
        jobs = [cluster.popen("host0", ["sleep", "300"]) for _ in range(2)]
        time.sleep(0.05)
        cluster.freeze("host0")
        cluster.crash("host0")
        assert [job.wait(5) for job in jobs] == [128 + signal.SIGKILL] * 2


def test_a_crashed_host_is_gone_and_the_other_lives(own_cluster):
    job = own_cluster.popen("host1", ["sleep", "60"])
    own_cluster.crash("host1")
    assert job.wait(5) != 0
    assert own_cluster.run("host0", ["hostname"]) == "host0\n"
    with pytest.raises(EmulationError, match="host1 is not up"):
        own_cluster.popen("host1", ["true"])


def test_names_that_do_not_exist(own_cluster):
    with pytest.raises(ConfigError, match="no host 'host7'"):
        own_cluster.run("host7", ["true"])
    with pytest.raises(ConfigError, match="host0 has no NIC 'eth3'; it has eth0"):
        own_cluster.set_rate("host0", "eth3", "1gbit")


RACKS = """
[[node]]
ranks = 1
nics = ["1gbit"]
rack = "left"
[[node]]
ranks = 1
nics = ["1gbit", "200mbit"]
rack = "right"
count = 2
[rack.left]
uplink = "300mbit"
[rack.right]
uplink = "400mbit"
"""


@pytest.mark.parametrize(
    ("a", "b", "nic", "mbit"), [("host0", "host1", 0, 300), ("host1", "host2", 1, 200)]
)
def test_rack_uplinks_and_second_nics_are_shaped_by_themselves(a, b, nic, mbit):
    skip_without_hosts()
    with Cluster(parse_spec(RACKS)) as cluster:
        pair = check_pair(cluster, a, b, nic)
    assert pair.expected == pytest.approx(0.9564 * mbit * 1e6 / 8, rel=1e-3)
    assert pair.nic == f"eth{nic}"
    carries(pair)


def test_latency_is_added_by_every_rack_switch():
    skip_without_hosts()
    with Cluster(parse_spec('latency = "2ms"\n' + RACKS)) as cluster:
        # Out and back: once through the own rack's switch, or through both racks' switches.
        assert 0.004 <= round_trip(cluster, "host1", "host2") < 0.008
        assert 0.008 <= round_trip(cluster, "host0", "host1") < 0.016
        carries(check_pair(cluster, "host1", "host2", 1))


def test_paths_below_tmp_are_kept_only_when_named(tmp_path):
    skip_without_hosts()
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "inner").write_text("inside")
    (tmp_path / "single").write_text("one")
    (tmp_path / "hidden").write_text("no")
    keep = [tmp_path / "dir", tmp_path / "single"]
    with Cluster(ClusterSpec.uniform(1, 1), keep=keep) as cluster:
        assert cluster.run("host0", ["cat", str(tmp_path / "dir" / "inner")]) == "inside"
        assert cluster.run("host0", ["cat", str(tmp_path / "single")]) == "one"
        with pytest.raises(EmulationError, match="No such file"):
            cluster.run("host0", ["cat", str(tmp_path / "hidden")])
        cluster.run("host0", ["sh", "-c", f"echo out >{tmp_path}/dir/result"])
    assert (tmp_path / "dir" / "result").read_text() == "out\n"
    with pytest.raises(EmulationError, match="does not exist"):
        Cluster(ClusterSpec.uniform(1, 1), keep=[tmp_path / "nosuch"])


def test_the_printed_script_builds_the_same_hosts():
    skip_without_hosts()
    spec = ClusterSpec.uniform(2, 1)
    script = shell_script(build_steps(spec, lay_out(spec)), rootless=os.geteuid() != 0)
    ask = (
        'nsenter -t $host1 -n -u -m -p ${U:+-U --preserve-credentials} sh -c "hostname; ip -o -4 a"'
    )
    user = "U=1\n" if os.geteuid() != 0 else ""
    script = user + script.replace("read -r _\n", f"{ask}\n")
    result = subprocess.run(["bash"], input=script, text=True, capture_output=True, timeout=20)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("host1\n")
    assert "10.77.0.2/24" in result.stdout


def test_a_step_that_fails_says_why_and_leaves_nothing():
    skip_without_hosts()
    spec = parse_spec('congestion_control = "nosuch"\n[[node]]\nranks = 1\nnics = ["1gbit"]')
    with pytest.raises(EmulationError, match="host0 could not be set up: .*congestion"):
        Cluster(spec).start()


def test_a_missing_program_is_named(monkeypatch, tmp_path):
    for tool in ("unshare", "nsenter", "setpriv", "mount", "tc", "env"):
        (tmp_path / tool).symlink_to("/usr/bin/env")
    monkeypatch.setenv("PATH", str(tmp_path))
    sentences = [missing.sentence for missing in preflight() if missing.kind == "program"]
    assert sentences[0].startswith("the program 'ip' is missing; install the package iproute2")
    assert len(sentences) == 1
    with pytest.raises(EmulationError, match="the program 'ip' is missing"):
        Cluster(ClusterSpec.uniform(2, 1)).start()
