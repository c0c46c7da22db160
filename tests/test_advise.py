"""``topo-ar advise``: what it says of made-up steps, and that it looks at real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import ROOT, skip_without_hosts, wait_until_gone
from topo_ar.planning.buckets import uniform_backward
from topo_ar.planning.job_advice import Interface, Observed, advise
from topo_ar.planning.joint import plan_training
from topo_ar.planning.parameters import Parameter
from topo_ar.planning.policy import parse_policy
from topo_ar.planning.runtime import CPU_RUNTIME
from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.topology.levels import levels
from topo_ar.topology.presets import preset

TRAIN = str(ROOT / "tests" / "data" / "scripts" / "train_ddp.py")


def plans(nic: float, backward_s: float) -> tuple[TrainingPlan, TrainingPlan]:
    """Return the plain and the best plan of 40 MB of gradients on two hosts of four ranks."""
    known = levels(preset("cpu-host", nodes=2, ranks_per_node=4, nic=nic))
    parameters = [Parameter(f"p{i}", (1_000_000,), "float32") for i in range(10)]
    backward = uniform_backward(parameters, backward_s)
    common = {"runtime": CPU_RUNTIME, "families": CPU_RUNTIME.families}
    return (
        plan_training(known, backward, modes=("flat",), **common),
        plan_training(known, backward, modes=("auto",), policy=parse_policy("lossy:1"), **common),
    )


def observed(
    step: float, exposed: float, waits: list[float] | None = None, **more: object
) -> Observed:
    """Return ten equal steps of eight ranks; `waits` is how long each waits for the last one."""
    waits = waits or [0.0] * 8
    return Observed(
        [[step] * 10] * 8,
        [[0.01 + wait] * 10 for wait in waits],
        [[exposed] * 10] * 8,
        None,
        **more,
    )


def test_a_job_that_waits_for_a_slow_network() -> None:
    flat, planned = plans(125e6, 0.2)
    exposed = flat.reference_exposed_seconds
    found = advise(observed(0.3 + exposed, exposed), flat, planned)
    kinds = [each.kind for each in found.suggestions]
    assert {"plan", "bf16", "codec", "accumulation", "larger_batch"} <= set(kinds)
    gains = [each.gain for each in found.suggestions]
    assert gains == sorted(gains, reverse=True)
    by_kind = {each.kind: each for each in found.suggestions}
    # 0.3 s of computing stay; the rest is what the planner says.
    plan = by_kind["plan"]
    expected = (0.3 + exposed) / (0.3 + planned.exact_exposed_seconds)
    assert plan.gain == pytest.approx(expected)
    assert plan.low < plan.gain < plan.high
    assert by_kind["accumulation"].gain == pytest.approx((0.3 + exposed) / (0.3 + exposed / 4))
    assert by_kind["larger_batch"].gain == pytest.approx((0.3 + exposed) / (0.3 + exposed / 2))
    assert by_kind["bf16"].line.startswith("topo-ar run --compression bf16")


def test_what_keeps_gains_from_being_true_is_said() -> None:
    flat, planned = plans(125e6, 0.2)
    found = advise(observed(0.5, 0.2, cautions=["oversubscribed cores: 4 ranks"]), flat, planned)
    assert found.cautions == ["oversubscribed cores: 4 ranks"]


def test_a_job_that_computes_is_left_alone() -> None:
    flat, planned = plans(12.5e9, 0.2)
    found = advise(observed(0.5, 0.004), flat, planned)
    assert found.suggestions == []
    assert found.verdict.startswith("Your job is compute-bound: change nothing.")


def test_a_rank_that_is_always_last_is_named_and_one_that_takes_turns_is_not() -> None:
    flat, planned = plans(12.5e9, 0.2)
    late = [0.1] * 8
    late[5] = 0.0
    found = advise(observed(0.5, 0.0, late), flat, planned)
    (only,) = found.suggestions
    assert (only.kind, only.value) == ("late_rank", "5")
    assert only.gain == pytest.approx(0.5 / (0.5 - 0.0875))
    turns = [[0.01 if step % 8 == rank else 0.11 for step in range(16)] for rank in range(8)]
    fair = Observed([[0.5] * 16] * 8, turns, [[0.0] * 16] * 8, None)
    assert advise(fair, flat, planned).suggestions == []


def test_a_faster_interface_that_lies_idle() -> None:
    flat, planned = plans(125e6, 0.2)
    exposed = flat.reference_exposed_seconds
    nics = [Interface("eth0", 1e8, True), Interface("eth1", 1e9, False)]
    found = advise(observed(0.3 + exposed, exposed, interfaces=nics), flat, planned)
    best = next(each for each in found.suggestions if each.kind == "interface")
    assert best.line == "export GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1"
    assert best.gain == pytest.approx((0.3 + exposed) / (0.3 + exposed / 10))
    both = [Interface("eth0", 1e9, True), Interface("eth1", 1e9, False)]
    found = advise(observed(0.3 + exposed, exposed, interfaces=both), flat, planned)
    assert all(each.kind != "interface" for each in found.suggestions)


def _advise(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    token = f"{os.getpid()}-{len(words)}"
    done = subprocess.run(
        [sys.executable, "-m", "topo_ar", "advise", *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TOPO_AR_TEST_TOKEN": token,
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert wait_until_gone(token) == []
    return done


def test_a_command_that_cannot_run_and_one_that_trains_nothing(tmp_path) -> None:
    done = _advise(tmp_path, "--", "no-such-command")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot run no-such-command" in done.stderr
    done = _advise(tmp_path, "--", sys.executable, "-c", "raise SystemExit(4)")
    assert done.returncode == 1
    assert "ended with 4 before enough steps were seen" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("goes_on", [False, True])
def test_an_unchanged_script_under_torchrun(tmp_path, goes_on) -> None:
    told = tmp_path / "told.json"
    done = _advise(
        *(tmp_path, "--steps", "6", "--json", str(told), *["--keep-running"] * goes_on, "--"),
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *(TRAIN, "--out", str(tmp_path), "--steps", "15"),
    )
    assert done.returncode == 0, done.stderr
    assert "6 steps of 2 ranks on 1 node: " in done.stdout
    assert json.loads(told.read_text())["steps"] == 6
    # The script ends where it is, unless it is to go on.
    assert (tmp_path / "rank0.pt").exists() == goes_on
    assert not list(tmp_path.glob(".topo-ar-advice-*"))


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(200)
def test_on_emulated_hosts_the_slow_network_is_seen(tmp_path) -> None:
    skip_without_hosts()
    told = tmp_path / "told.json"
    done = _advise(
        *(tmp_path, "--steps", "6", "--json", str(told), "--"),
        *(sys.executable, "-m", "topo_ar", "emulate", "--grid", "2x2", "--nic", "200mbit"),
        *("--no-check", "--keep", str(tmp_path), "--keep", str(ROOT), "--"),
        *(sys.executable, TRAIN, "--out", str(tmp_path), "--steps", "15", "--width", "512"),
    )
    assert done.returncode == 0, done.stderr
    advice = json.loads(told.read_text())
    assert (advice["world_size"], advice["num_nodes"]) == (4, 2)
    assert "plan" in {each["kind"] for each in advice["suggestions"]}
