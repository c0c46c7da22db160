"""Whatever a person gets wrong on the command line is one clear line and the exit code 2."""

import os
import shutil
import subprocess
import sys

import pytest

XML = """<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:01:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
</system>
"""
NO_NODES = 'latency = "1ms"\nnode = []\n'
WRONG_RANKS = """
[[node]]
ranks = 2
nics = ["1gbit"]
rank_ids = [0, 2]
[[node]]
ranks = 2
nics = ["1gbit"]
rank_ids = [1, 4]
"""
TOO_FEW_RANKS = """
[[node]]
ranks = 2
nics = ["1gbit"]
rank_ids = [0]
"""


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "topo_ar", *arguments],
        capture_output=True,
        text=True,
        timeout=20,
        **options,
    )


def complaint(done):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("topo-ar: error: ")
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        # Sizes, types, operations.
        (["bench", "-s", "25XB"], "'25XB' is not a size"),
        (["bench", "-s", "-1"], "'-1' is not a size"),
        (["bench", "-s", "1M,,2M"], "'' is not a size"),
        (["bench", "-s", "0.3"], "'0.3' is not a whole number of bytes"),
        (["bench", "-s", "5"], "5 bytes are not a whole number of float32 elements"),
        (["bench", "-s", "64", "-e", "big"], "'big' is not a size"),
        (["bench", "-b", "2M", "-e", "1M"], "-b 2M must be positive and not above -e 1M"),
        (["bench", "-f", "1"], "-f 1 must be at least 2"),
        (["bench", "-n", "0", "-s", "1M"], "-n 0 must be at least 1"),
        (["bench", "-n", "many"], "Invalid value for '-n'"),
        (["bench", "-d", "float12", "-s", "1M"], "-d 'float12' is not one of float64"),
        (["bench", "-o", "max", "-s", "1M"], "-o 'max' is not sum or avg"),
        (["bench", "-o", "avg", "-d", "int32", "-s", "1M"], "-o avg of int32 is not defined"),
        (["bench", "--plan", "best", "-s", "1M"], "--plan 'best' is not auto, flat or"),
        (["bench", "--against", "mvapich", "-s", "1M"], "--against 'mvapich' is not one of gloo"),
        (["bench", "--against", "openmpi", "-s", "1M"], "--against openmpi needs --emulate"),
        (["bench", "--timeout", "0", "-s", "1M"], "--timeout 0 must be above 0 seconds"),
        (["bench", "-s", "1M"], "bench needs ranks: start it with torchrun, or pass --emulate"),
        # Clusters.
        (["bench", "--emulate", "0x2"], "'0x2' is not a grid"),
        (["bench", "--emulate", "2x2", "--nic", "1gb"], "'1gb' is not a link rate"),
        (["bench", "--emulate", "nosuch.toml"], "cluster spec 'nosuch.toml' cannot be read"),
        (["bench", "--emulate", "none.toml"], "none.toml: Expected `array` of length >= 1"),
        (["emulate", "none.toml", "--", "true"], "none.toml: Expected `array` of length >= 1"),
        (["bench", "--emulate", "wrong.toml"], "the nodes hold ranks [0, 1, 2, 4]"),
        (["emulate", "wrong.toml", "--", "true"], "the nodes hold ranks [0, 1, 2, 4]"),
        (["emulate", "few.toml", "--", "true"], "lists 1 ranks for 1 node(s) of 2"),
        (["bench", "--emulate", "2x1", "--json", "few.toml/x"], "cannot write records to few.toml"),
        (["bench", "--emulate", "2x1", "--trace", "no/x.json"], "there is no folder no"),
        # Topologies and plans.
        (["plan", "nosuch", "-s", "1M"], "'nosuch' is neither a file nor a preset"),
        (["plan", "cpu-host", "-s", "1Q"], "'1Q' is not a size"),
        (["plan", "cpu-host", "-s", "1M", "--nodes", "0"], "nodes is 0"),
        (["plan", "cpu-host"], "give buffer sizes with --size"),
        (["show", "cut.xml"], "cut.xml:"),
        (["plan", "cut.xml", "-s", "1M"], "cut.xml:"),
        (["show", "few.toml"], "few.toml"),
        (["explain", "few.toml"], "few.toml"),
        # The command line itself.
        (["nosuch"], "No such command 'nosuch'"),
        (["bench", "--nosuch"], "No such option: --nosuch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, says, tmp_path):
    (tmp_path / "cut.xml").write_text(XML)
    (tmp_path / "none.toml").write_text(NO_NODES)
    (tmp_path / "wrong.toml").write_text(WRONG_RANKS)
    (tmp_path / "few.toml").write_text(TOO_FEW_RANKS)
    environment = {key: text for key, text in os.environ.items() if key != "RANK"}
    assert says in complaint(run(*arguments, cwd=tmp_path, env=environment))


def test_a_missing_program_is_named_with_its_package(tmp_path):
    for tool in ("unshare", "nsenter", "setpriv", "mount", "tc", "env", "sh"):
        if found := shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
            (tmp_path / tool).symlink_to(found)
    done = run("bench", "--emulate", "2x1", "-s", "1M", env={**os.environ, "PATH": str(tmp_path)})
    assert "the program 'ip' is missing; install the package iproute2" in complaint(done)


def test_no_command_shows_the_help():
    done = run()
    assert (done.returncode, done.stderr) == (2, "")
    assert "Usage" in done.stdout


def test_the_log_goes_to_stderr_from_the_level_asked_for():
    code = (
        "import logging, topo_ar\nlog = logging.getLogger('topo_ar')\nlog.debug('d')\nlog.info('i')"
    )

    def said(**variables):
        environment = {**os.environ, **variables}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert (done.returncode, done.stdout) == (0, "")
        return done.stderr.splitlines()

    assert said(TOPO_AR_LOG="") == []
    assert [line.split(" ", 2)[2] for line in said(TOPO_AR_LOG="debug")] == ["DEBUG: d", "INFO: i"]
    assert [line.split()[:3] for line in said(TOPO_AR_LOG="INFO", RANK="3")] == [
        ["topo-ar", "rank", "3"]
    ]
    (only,) = said(TOPO_AR_LOG="loud")
    assert "TOPO_AR_LOG=loud is not one of debug, info, warning, error" in only
