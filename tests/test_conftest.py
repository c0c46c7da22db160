import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import network_namespaces_work

ROOT = Path(__file__).parents[1]

SKIPPING = """
import pytest

@pytest.mark.netns
def test_shaped():
    pytest.skip("no wish to")
"""

LEAVING = """
import subprocess, pathlib, sys

def test_leaves_a_daemon():
    subprocess.Popen([sys.executable, "-c", "import os, time; os.fork() or time.sleep(30)"]).wait()

def test_leaves_memory():
    pathlib.Path("/dev/shm/topo-ar-test-leftover").touch()
"""


def session(directory, source, *flags, **environment):
    (directory / "conftest.py").write_text("from tests.conftest import *\n")
    (directory / "test_inner.py").write_text(source)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    netns: x\n    gpu: x\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(not network_namespaces_work(), reason="`ip netns add` fails here")
def test_skipping_a_namespace_test_fails_where_namespaces_work(tmp_path):
    done = session(tmp_path, SKIPPING)
    assert done.returncode == 1
    assert "skipped although `ip netns` works on this machine" in done.stdout
    assert "no wish to" in done.stdout


def test_a_skip_is_printed_with_its_reason_where_namespaces_do_not_work(tmp_path):
    done = session(tmp_path, SKIPPING, PATH="/nonexistent")
    assert done.returncode == 0, done.stdout
    assert "no wish to" in done.stdout


def test_what_a_session_leaves_behind_fails_it(tmp_path):
    leftover = Path("/dev/shm/topo-ar-test-leftover")
    try:
        done = session(tmp_path, LEAVING)
    finally:
        leftover.unlink(missing_ok=True)
    lines = done.stdout.splitlines()
    left = [line for line in lines if line.startswith(("process ", "file "))]
    for line in left:
        if line.startswith("process "):
            os.kill(int(line.split()[1].rstrip(":")), 9)
    assert done.returncode == 1
    assert [line.split()[0] for line in left] == ["process", "file"]
    assert "time.sleep(30)" in left[0]
    assert left[1] == f"file {leftover}"
