"""``topo-ar run``: scripts that know nothing of us, under every launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.hosts import processes_with, skip_without_hosts, wait_until_gone
from topo_ar.errors import ConfigError
from topo_ar.integrations.launchers import variables_of_rank

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "data" / "scripts"
TRAIN = str(SCRIPTS / "train_ddp.py")
RUN = [sys.executable, "-m", "topo_ar", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08],login",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}


def execute(*command: str, cwd: Path = ROOT, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=150
    )


def exact_weights(world_size: int, steps: int, width: int) -> torch.Tensor:
    """Return what the script's weights must be: all sums are whole numbers."""
    total = torch.zeros(4 * width * width)
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            for layer in range(4):
                factors = torch.randint(-8, 9, (width, width), generator=generator)
                total[layer * width**2 : (layer + 1) * width**2] -= 0.5 * factors.flatten()
    return total


def assert_trained(folder: Path, world_size: int, steps: int = 12, width: int = 256) -> None:
    right = exact_weights(world_size, steps, width)
    for rank in range(world_size):
        assert torch.equal(torch.load(folder / f"rank{rank}.pt"), right), rank


def test_a_ddp_script_on_one_workstation(tmp_path) -> None:
    report = tmp_path / "report.json"
    done = execute(
        *(*RUN, "--nproc", "2", "--json", str(report), TRAIN),
        *("--out", str(tmp_path), "--exit", "3"),
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("attached to Numbers: 1 MiB of gradients, 2 ranks on 1 node") == 1
    assert_trained(tmp_path, 2)
    (model,) = json.loads(report.read_text())["models"]
    assert model["attached"]
    assert (model["world_size"], model["fallbacks"], model["error"]) == (2, 0, None)


def test_a_script_without_ddp_runs_as_it_would_alone() -> None:
    script = str(SCRIPTS / "no_ddp.py")
    done = execute(*RUN, "--nproc", "self", script, "7", "--nproc", "x", RANK="0", WORLD_SIZE="1")
    assert done.returncode == 2  # a launcher is there already
    done = execute(*RUN, script, "7", "--nproc", "x", RANK="0", WORLD_SIZE="1")
    assert done.returncode == 7
    assert done.stdout == f"arguments ['7', '--nproc', 'x'] __main__ {SCRIPTS}\n"
    assert done.stderr.count("nothing was attached") == 1
    module = execute(*RUN, "-m", "tests.data.scripts.no_ddp", "0", RANK="0", WORLD_SIZE="1")
    assert module.stdout.startswith("arguments ['0'] __main__")


def test_the_environments_own_sitecustomize_is_imported_too(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    script = str(SCRIPTS / "no_ddp.py")
    done = execute(*RUN, script, "0", RANK="0", WORLD_SIZE="1", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.stdout.splitlines()[-2] == "theirs", done.stderr
    assert "sitecustomize" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--nproc", "many", TRAIN], "--nproc many is not a number of ranks"),
        (["--plan", "best", TRAIN], "--plan best is not one of auto, flat"),
        (["--compression", "int3", TRAIN], "int3"),
        (["--timeout", "0", TRAIN], "not a positive number"),
    ],
)
def test_what_no_rank_could_use_is_refused_before_there_are_any(words, said) -> None:
    done = execute(*RUN, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_srun_tasks_are_ranks() -> None:
    assert variables_of_rank(SLURM) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "19711",
    }
    set_already = {**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    assert not {"MASTER_ADDR", "MASTER_PORT"} & variables_of_rank(set_already).keys()


def test_who_started_no_ranks_is_no_launcher() -> None:
    assert variables_of_rank({}) is None
    assert variables_of_rank({"RANK": "0", "WORLD_SIZE": "2"}) == {}
    # An interactive step, and the batch script itself, are one task each.
    assert variables_of_rank({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert variables_of_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "do not fit each other"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "not a list such as"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        ({"SLURM_NODEID": "7"}, "do not fit each other"),
    ],
)
def test_variables_of_slurm_that_contradict_each_other(change, said) -> None:
    with pytest.raises(ConfigError, match=said):
        variables_of_rank({**SLURM, **change})


def test_mpirun_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="mpirun has started several processes"):
        variables_of_rank({"OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_under_torchrun_a_hook_of_the_script_wins_loudly() -> None:
    script = str(SCRIPTS / "own_hook.py")
    done = execute(*TORCHRUN, "--nproc-per-node", "2", "-m", "topo_ar", "run", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradient 384.0") == 2
    said = "WARNING: Linear stays plain DistributedDataParallel: the script has registered"
    assert done.stderr.count(said) == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_script_that_starts_its_ranks_itself() -> None:
    script, port = str(SCRIPTS / "spawns.py"), str(20000 + os.getpid() % 10000)
    done = execute(*RUN, "--nproc", "self", script, port)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradient 64.0") == 2
    assert done.stderr.count("attached to Linear") == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_under_torchrun(tmp_path) -> None:
    done = execute(
        *(*TORCHRUN, "--nproc-per-node", "4", "-m", "topo_ar", "run"),
        *("--check-replicas-every", "5", TRAIN, "--out", str(tmp_path), "--steps", "40"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attached to Numbers") == 1
    assert_trained(tmp_path, 4, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_as_tasks_of_srun(tmp_path) -> None:
    """The processes are given what srun would set; the nodes are names of this machine."""
    several = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,localhost.localdomain",
        "SLURM_LOCALID": "0",
    }
    tasks = [
        subprocess.Popen(
            [*RUN, TRAIN, "--out", str(tmp_path)],
            env=environment(**several, SLURM_PROCID=str(rank), SLURM_NODEID=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=150)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "attached to Numbers" in said[0]
    assert "attached" not in said[1]
    assert_trained(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(200)
def test_on_emulated_hosts(tmp_path) -> None:
    skip_without_hosts()
    done = execute(
        *(sys.executable, "-m", "topo_ar", "emulate", "--grid", "2x2", "--no-check"),
        *("--keep", str(tmp_path), "--keep", str(ROOT), "--"),
        *(*RUN, "--json", str(tmp_path / "report.json"), TRAIN, "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 2 nodes; bucket cap" in done.stderr
    (model,) = json.loads((tmp_path / "report.json").read_text())["models"]
    assert model["num_nodes"] == 2
    assert_trained(tmp_path, 4)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_is_the_end_of_all(tmp_path, number) -> None:
    token = f"{os.getpid()}-{number}"
    steps = ["--steps", "1000000", "--width", "16"]
    process = subprocess.Popen(
        [*RUN, "--nproc", "2", TRAIN, "--out", str(tmp_path), *steps],
        env=environment(TOPO_AR_TEST_TOKEN=token),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "attached to Numbers" in line:
            break
    time.sleep(0.5)
    assert len(processes_with(token)) >= 3
    process.send_signal(number)
    process.stderr.close()
    code = process.wait(30)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_until_gone(token, 10.0) == []
