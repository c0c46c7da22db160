"""What users rely on by name: the public page, verbs, lazy imports, torch's private names."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import topo_ar

PUBLIC = [
    "BackendOptions",
    "Communicator",
    "ConfigError",
    "DiLoCo",
    "EmulationError",
    "ExecutionError",
    "LocalSGD",
    "Plan",
    "PlanError",
    "Targets",
    "Telemetry",
    "TopoError",
    "Topology",
    "TopologyError",
    "__version__",
    "all_reduce",
    "attach",
    "ddp",
    "discover",
    "handle_of",
    "init_mesh",
    "mirror",
    "plan",
    "preset",
    "read",
    "register_backend",
]


def test_the_public_names_are_these() -> None:
    assert topo_ar.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(topo_ar, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        topo_ar.nosuch  # noqa: B018


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, topo_ar\n"
        "plan = topo_ar.plan(topo_ar.preset('dgx-h100', nodes=4), 25_000_000)\n"
        "assert plan.bound_seconds <= plan.predicted_seconds\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


@pytest.mark.parametrize("verb", ["probe", "show", "plan", "explain", "bench", "emulate", "doctor"])
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "topo_ar", verb, "--help"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert f"topo-ar {verb}" in done.stdout.replace("\n", " ")
    assert "Example" in done.stdout


def test_doctor_explains_gloos_interface_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """R07 for a person who asks before starting a job."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo,docker")
    done = subprocess.run(
        [sys.executable, "-m", "topo_ar", "doctor"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "GLOO_SOCKET_IFNAME='^lo,docker'" in done.stdout
    assert "present are: " in done.stdout
    assert "Traceback" not in done.stderr


def test_torchs_private_names_are_there(ranks) -> None:
    """A torch that renames them must fail here, not in a user's job."""
    assert ranks.run(_private_names, 1) == [(0, False, False, None)]


def _private_names(rank: int, world_size: int) -> tuple[int, bool, bool, float | None]:
    from topo_ar.execution import torch_private

    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert isinstance(torch_private.GradBucket, type)
    assert isinstance(torch_private.BackendRequest, type)
    assert torch_private.TorchOptions("topo").backend == "topo"
    assert torch_private.factor_of(dist._make_nccl_premul_sum(0.5)) == 0.5
    assert torch_private.default_store("here").clone() is not None
    assert torch_private.debugs_in_detail() is False
    torch.optim.SGD(model.parameters())
    assert torch.optim.SGD.step.hooked is True  # what mark_hooked sets
    return (
        torch_private.registered_hooks(model),
        torch_private.is_static_graph(model),
        torch_private.skips_unused(model),
        torch_private.bucket_cap_mib(model),
    )
