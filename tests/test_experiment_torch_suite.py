"""torch's own suite with our all-reduce: what is compared, and that cases really run with it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from experiments import torch_suite
from experiments.torch_suite import PASSES, ROOT, Job, judge, read, updated
from experiments.torch_suite_cases import FAILED, PASSED, SKIPPED, Outcome

LISTS = {
    "torch": "2.13.0",
    "differences": {"hook": {"test_c": "the case counts calls of gloo"}},
    "passes": {"gloo 4": ["test_a", "test_b", "test_c"], "hook 4": ["test_a", "test_b"]},
}


def outcomes(**ends: str) -> dict[str, Outcome]:
    return {name: Outcome(name, end, 1.0, 0, "because") for name, end in ends.items()}


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        (outcomes(test_a=PASSED, test_b=PASSED, test_c=FAILED), []),
        (outcomes(test_a=PASSED), []),  # a selection is held to its part of the list
        (
            outcomes(test_a=FAILED),
            [
                "hook 4: test_a is in the list, but failed here: because",
                "hook 4: test_a passes with gloo, but failed here: because",
            ],
        ),
        (outcomes(test_c=PASSED), ["hook 4: test_c passes, but is not in the list"]),
        (outcomes(test_d=SKIPPED), []),
    ],
)
def test_outcomes_are_held_to_the_list_and_to_gloo(found, faults):
    assert judge(Job("hook", 4), found, LISTS) == faults


def test_an_update_keeps_what_was_not_run_and_the_explanations():
    found = {Job("hook", 4): outcomes(test_a=FAILED, test_c=PASSED)}
    content = json.loads(updated(LISTS, found))
    assert content["passes"]["hook 4"] == ["test_b", "test_c"]
    assert content["passes"]["gloo 4"] == LISTS["passes"]["gloo 4"]
    assert content["differences"] == LISTS["differences"]
    assert content["torch"] == torch.__version__.partition("+")[0]


def test_every_committed_difference_from_gloo_is_explained_and_real():
    lists = json.loads(PASSES.read_text())
    modes = {job.split()[0] for job in lists["passes"]}
    assert modes == set(torch_suite.MODES)
    for mode in modes:
        missing = set()
        for job, names in lists["passes"].items():
            if job.startswith(f"{mode} "):
                missing |= set(lists["passes"][f"gloo {job.split()[1]}"]) - set(names)
        assert missing == lists["differences"].get(mode, {}).keys()
        assert all(len(why) > 20 for why in lists["differences"].get(mode, {}).values())


def run_suite(out, *arguments):
    command = [sys.executable, "-m", "experiments.torch_suite", "--out", str(out), *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=55, env=os.environ
    )


def test_a_case_runs_with_our_hook_and_is_not_run_again(tmp_path):
    arguments = ("--mode", "hook", "--world-size", "2", "-k", "CPU_grad_is_view$")
    first = run_suite(tmp_path, *arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "hook 2: 1 passed, 0 failed, 0 skipped, 1 with our all-reduce" in first.stdout
    (outcome,) = read(tmp_path / "torch_suite.jsonl", Job("hook", 2)).values()
    assert (outcome.case, outcome.outcome) == (
        "test_DistributedDataParallelCPU_grad_is_view",
        PASSED,
    )
    assert outcome.engaged == 2  # one DDP on each rank
    again = run_suite(tmp_path, *arguments)
    assert again.returncode == 0
    assert "1/1" not in again.stdout
    assert "1 with our all-reduce" in again.stdout


def test_a_selection_of_nothing_is_one_line(tmp_path):
    done = run_suite(tmp_path, "--mode", "hook", "--world-size", "2", "-k", "nothing_like_it")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: -k 'nothing_like_it' selects no case of hook 2"
