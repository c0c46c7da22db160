"""``topo-ar doctor --rehearse``: a NIC is cut to a tenth, and the job gives way."""

import json
import os
import subprocess
import sys

import pytest

from tests.hosts import ROOT, skip_without_hosts
from topo_ar.cli.rehearse import judge
from topo_ar.telemetry.incidents import read_incident
from topo_ar.telemetry.job_windows import read_windows


def _ends(**changes):
    incident = [44, 47, "plain all-reduce", "planned", "plain"]
    row = {"steps": 60, "wrong": 0, "weights": "a", "incidents": [incident]}
    return [dict(row), {**row, **changes}]


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, set()),
        ({"weights": "b"}, {"no divergence"}),
        ({"wrong": 1}, {"no divergence"}),
        ({"incidents": [[44, 48, "plain all-reduce", "planned", "plain"]]}, {"together"}),
    ],
)
def test_a_rehearsal_fails_by_what_went_wrong(tmp_path, changes, failed) -> None:
    found = judge(_ends(**changes), tmp_path)
    bad = {name for name, (good, _) in found.checks.items() if not good}
    assert bad == failed | {"incident record"}  # there is none in this directory
    assert not found.passed


def test_a_rehearsal_fails_where_nothing_or_too_little_is_done_too_late(tmp_path) -> None:
    [check] = judge([{"steps": 200, "incidents": []}], tmp_path).checks.values()
    assert check == (False, "no breach in 200 steps")
    late = [{**row, "incidents": [[44, 49, "warned", "a", "a"]]} for row in _ends()]
    bad = {name for name, (good, _) in judge(late, tmp_path).checks.items() if not good}
    assert bad == {"detected", "acted", "incident record"}


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(250)
def test_a_nic_cut_to_a_tenth_is_answered_within_three_steps(tmp_path) -> None:
    skip_without_hosts()
    command = ["doctor", "--rehearse", "--json", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "topo_ar", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {row["check"]: row["verdict"] for row in json.loads(done.stdout)}
    assert set(checks) == {"detected", "acted", "together", "no divergence", "incident record"}
    assert set(checks.values()) == {"ok"}
    incident = read_incident(min(tmp_path.glob("incident-*.json")))
    assert incident.complete
    assert incident.acted_step - (incident.first_missed_step + 1) <= 3
    assert incident.values["step_seconds"] > incident.limits["step_seconds"]
    assert len(incident.ranks) == 4
    assert read_windows(tmp_path)[1]
