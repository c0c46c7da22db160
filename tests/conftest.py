"""Rules of the whole test session: markers, skips that are failures, and nothing left behind."""

import functools
import os
import subprocess

import pytest
from hypothesis import settings

from tests import foreign, leftovers

# A law that fails does so in every run, and no example fails because the machine is busy.
settings.register_profile("topo_ar", derandomize=True, deadline=None)
settings.load_profile("topo_ar")


@pytest.fixture(scope="session")
def ranks():
    """Rank processes for the whole session, see tests/ranks.py."""
    from tests.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


def pytest_configure(config):
    if not set("asA") & set(config.option.reportchars):
        config.option.reportchars += "s"


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("this machine has no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.get_closest_marker("netns") and network_namespaces_work():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped although `ip netns` works on this machine: {reason}"
    return report


@functools.cache
def network_namespaces_work():
    """Return whether ``ip netns add`` succeeds here."""
    name = f"{leftovers.PROBE}{os.getpid()}"
    try:
        added = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    except OSError:
        return False
    if added.returncode == 0:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return added.returncode == 0


def pytest_sessionstart(session):
    session.config.stash[BEFORE] = (leftovers.snapshot(), leftovers.mark_session())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    lines = leftovers.find(*session.config.stash[BEFORE])
    session.config.stash[LEFT] = lines
    if lines:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if foreign.not_at_hand:
        names = ", ".join(sorted(foreign.not_at_hand))
        terminalreporter.write_line(
            f"{len(foreign.not_at_hand)} captured files not at hand: {names}"
        )
    if lines := config.stash.get(LEFT, []):
        terminalreporter.section("left behind by this session", red=True, bold=True)
        for line in lines:
            terminalreporter.write_line(line)


BEFORE = pytest.StashKey()
LEFT = pytest.StashKey()
