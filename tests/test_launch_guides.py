"""The launch guides: what can be run here is run, the rest is checked as far as it goes."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.hosts import ROOT, skip_without_hosts
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.spec import ClusterSpec

GUIDES = ROOT / "experiments" / "launch"
EXACT = ["--steps", "24", "--save-every", "6", "--plan", "hierarchical", "--exact"]


@pytest.mark.parametrize("name", ["torchrun.sh", "job.sbatch"])
def test_shell_scripts_parse(name) -> None:
    subprocess.run(["bash", "-n", str(GUIDES / name)], check=True)


def test_the_sbatch_file_asks_for_what_its_comments_say() -> None:
    text = (GUIDES / "job.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert asked["distribution"] == "block:block"
    assert int(asked["nodes"]) * int(asked["ntasks-per-node"]) == 16
    assert "requeue" in asked


def test_the_kubernetes_job_is_one() -> None:
    job = yaml.safe_load((GUIDES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    policy = job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for that name
    assert container["command"][:4] == ["torchrun", "-m", "topo_ar", "run"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]


def test_the_ray_script_loads_without_ray() -> None:
    from experiments.launch import ray_train

    assert inspect.signature(ray_train.train).parameters.keys() == {"config"}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_srun_line_of_the_sbatch_file_runs_as_two_tasks(tmp_path) -> None:
    """Its command after ``srun``, once a task, under the variables that srun would set."""
    (line,) = re.findall(r"^srun .*$", (GUIDES / "job.sbatch").read_text(), re.MULTILINE)
    words = [word for word in shlex.split(line)[1:] if not word.startswith("--kill")]
    assert words == ["topo-ar", "run", "$@"]
    script = [str(GUIDES / "train.py"), "--checkpoint", str(tmp_path / "c.pt"), "--steps", "12"]
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "topo_ar", *words[1:-1], *script],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": "lo",
                "SLURM_JOB_ID": str(os.getpid() + 1),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert torch.load(tmp_path / "c.pt")["step"] == 12


def _elastic(folder: Path, *options: str, compression: str) -> dict[str, torch.Tensor]:
    """Train under the guide's torchrun on two emulated hosts; return the final checkpoint."""
    checkpoint = folder / "c.pt"
    variables = {
        **os.environ,
        **{"HOSTS": "2", "RANKS": "2", "HEAD": "host0:29500", "IFACE": "eth0", "RESTARTS": "3"},
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [
        *("bash", str(GUIDES / "torchrun.sh"), str(GUIDES / "train.py")),
        *("--checkpoint", str(checkpoint), "--compression", compression, *EXACT, *options),
    ]
    with Cluster(ClusterSpec.uniform(2, 2), keep=[ROOT, folder]) as cluster:
        agents = [
            cluster.popen(
                host,
                command,
                env=variables,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in ("host0", "host1")
        ]
        said = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert ("exitcode: -6" in "".join(said)) == bool(options)
    state = torch.load(checkpoint)
    assert state["step"] == 24
    return {**state["model"], **state["compression"]}


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(400)
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_killed_rank_is_restarted_and_nothing_is_lost(tmp_path, compression) -> None:
    """Rank 3 dies in step 15; both agents start all ranks anew, which resume from step 12."""
    skip_without_hosts()
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = _elastic(tmp_path / "whole", compression=compression)
    killed = _elastic(tmp_path / "killed", "--fail", "3:15", compression=compression)
    assert whole.keys() == killed.keys()
    different = [name for name, value in whole.items() if not _equal(value, killed[name])]
    assert different == []


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one == other
