"""The backend ``topo`` in what people have reported of others, and when ranks die."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.compressed_training import on_hosts
from tests.ranks import tell
from topo_ar.errors import ConfigError, ExecutionError

HOSTS = [0, 0, 1, 1]


def _forever(rank, world_size, trains):
    on_hosts(rank, HOSTS)
    options = topo_ar.BackendOptions(plan="hierarchical")
    group = dist.new_group(backend="topo", pg_options=options)
    model = DistributedDataParallel(nn.Linear(300, 300), process_group=group)
    error = None
    try:
        for step in range(10_000):
            if trains:
                model(torch.ones(1, 300)).sum().backward()
            else:
                dist.all_reduce(torch.ones(1_000_000), group=group)
            if step == 5:
                tell("running")
    except RuntimeError as caught:
        error = caught
    at = time.monotonic()
    again = group.allreduce([torch.ones(10)])
    with pytest.raises(ExecutionError):
        again.wait()
    return type(error).__name__, str(error), group.communicator.error.ranks, at


@pytest.mark.parametrize(("victim", "trains"), [(1, False), (2, True)], ids=str)
def test_survivors_of_a_killed_rank_raise_and_name_it(ranks, victim, trains) -> None:
    killed = []

    def on_message(run, rank, message) -> None:
        if rank == victim:
            run.kill(victim)
            killed.append(time.monotonic())

    outcomes = ranks.fresh(_forever, 4, trains, deadline_s=25.0, on_message=on_message)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.exitcode == 0, outcome.error
            kind, text, named, at = outcome.result
            assert trains or kind == "ExecutionError"
            assert f"rank {victim}" in text
            assert victim in named
            assert at - killed[0] < 10.0


def _rare(rank, world_size):
    """What comes up seldom, in one group: R05 (averages of integers), split_group."""
    on_hosts(rank, HOSTS)
    group = dist.new_group(backend="topo")
    found = []
    for dtype in (torch.int32, torch.int64):
        whole = torch.tensor([1, 2, 2, 3][rank : rank + 1], dtype=dtype)
        dist.all_reduce(whole, group=group)
        found.append(int(whole))
        for where in (group, None):
            with pytest.raises(RuntimeError, match="can't be cast") as caught:
                dist.all_reduce(whole, dist.ReduceOp.AVG, group=where)
            found.append(str(caught.value).splitlines()[0])
    with pytest.raises(ConfigError, match="use new_group"):
        group.split_group([0, 1])
    for where in (group, None):  # torch itself refuses where no device is bound
        with pytest.raises(RuntimeError) as caught:
            dist.split_group(where, [[0, 1], [2, 3]])
        found.append(str(caught.value))
    dist.destroy_process_group(group)
    return found


def test_averages_of_integers_and_split_groups_are_refused_as_by_gloo(ranks) -> None:
    """R05: ROCm/rocm-systems#7851."""
    for found in ranks.run(_rare, 4):
        first, ours, theirs, second, ours_too, theirs_too, split, gloos_split = found
        assert (first, second) == (8, 8)
        assert ours == theirs
        assert ours_too == theirs_too
        assert split == gloos_split


def _bad_interface(rank, world_size, value):
    os.environ["GLOO_SOCKET_IFNAME"] = value
    try:
        dist.init_process_group("topo")
    except ConfigError as error:
        return str(error)
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return "no error"


@pytest.mark.parametrize("value", ["^lo,docker", "127.0.0.1"])
def test_a_pattern_in_gloos_interface_variable_is_explained_once(ranks, value) -> None:
    """R07: aws-samples/aws-do-eks#51, AMD-AGI/Primus#1063."""
    first, second = ranks.run(_bad_interface, 2, value, init=False)
    assert f"GLOO_SOCKET_IFNAME={value!r}" in first
    assert "interface names" in first
    assert "lo" in first.split("present are:")[1]
    assert "present are" not in second


def _averages(rank, parameters, group):
    """Return what is in each tensor after each of 8 steps, averaging with period 4."""
    averager = PeriodicModelAverager(period=4, process_group=group)
    rows = []
    for _ in range(8):
        for parameter in parameters:
            parameter.data.fill_(float(rank))
            parameter.grad = torch.zeros_like(parameter)  # without one it is left out
        averager.average_parameters(iter(parameters))
        rows.append([float(parameter.flatten()[0]) for parameter in parameters])
    return rows


def _local_sgd(rank, world_size):
    on_hosts(rank, [0, 1])
    group = dist.new_group(backend="topo")
    layers = [nn.Linear(4, 3), nn.Linear(3, 2)]
    found = [_averages(rank, [p for layer in layers for p in layer.parameters()], group)]
    found.append(_averages(rank, [nn.Parameter(torch.zeros(5))], group))
    dist.destroy_process_group(group)
    mesh = init_device_mesh(
        "cpu", (2, 1), mesh_dim_names=("replicate", "shard"), backend_override={0: "topo"}
    )
    model = fully_shard(nn.Sequential(*layers), mesh=mesh["shard"])
    shards = [nn.Parameter(p.to_local()) for p in model.parameters()]
    found.append(_averages(rank, shards, mesh.get_group("replicate")))
    return found


def test_local_sgd_averages_when_it_should(ranks) -> None:
    """R13: pytorch/pytorch#74157; through the backend, and of FSDP's shards."""
    for rank, found in enumerate(ranks.run(_local_sgd, 2)):
        for rows, num_tensors in zip(found, (4, 1, 4), strict=True):
            assert [set(row) for row in rows] == [{0.5} if s % 4 == 0 else {rank} for s in range(8)]
            assert {len(row) for row in rows} == {num_tensors}


def _replicas(rank, world_size, how):
    on_hosts(rank, HOSTS)
    names = ("replicate", "shard")
    dist.init_process_group("gloo" if how == "override" else "topo", timeout=timedelta(seconds=30))
    if how == "override":
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=names, backend_override={"replicate": "topo"}
        )
    else:
        flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)._flatten("world")
        mesh = flat._unflatten(0, (2, 2), names)
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4) * (rank + 1)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    found = model.weight.to_local().unique().tolist(), mesh.get_group("replicate").size()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("how", ["override", "flattened"])
def test_replicas_train_together(ranks, how) -> None:
    """R15: NVIDIA-NeMo/Automodel#3135."""
    assert ranks.run(_replicas, 4, how, init=False) == [([-2.5], 2)] * 4
