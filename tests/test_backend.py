"""The backend ``topo``: what gloo gives in every collective, and in all that is built on them."""

import gc
import os
import subprocess
import sys
import threading
import time
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.test_ddp import _gradients, _model, _on_hosts, _train
from topo_ar.errors import ConfigError, ExecutionError

ROOT = Path(__file__).resolve().parent.parent
HOSTS = [0, 0, 1, 1]


def _new_group(rank, ranks=None, **options):
    _on_hosts(rank, HOSTS)
    group = dist.new_group(ranks, backend="topo", pg_options=topo_ar.BackendOptions(**options))
    return group if dist.get_rank(group) >= 0 else None


def _closed(*groups):
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)


# Training: the three oracles that the hook is held to.


def _trains(rank, world_size):
    group = _new_group(rank, plan="hierarchical")
    options = {"bucket_cap_mb": 0.01}
    plain = DistributedDataParallel(_model(torch.float64), **options)
    ours = DistributedDataParallel(_model(torch.float64), process_group=group, **options)
    for model in (plain, ours):
        _train(model, rank, 5, integers=False)
    distance = max(
        float((a - b).abs().max().detach())
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True)
    )
    whole = []
    for process_group in (None, group):
        model = DistributedDataParallel(_model(), process_group=process_group, **options)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 1.0)
        _train(model, rank, 1, integers=True)
        whole.append(_gradients(model))
    exact = all(torch.equal(a, b) for a, b in zip(*whole, strict=True))
    state = torch.cat([p.detach().flatten() for p in ours.parameters()])
    states = [torch.empty_like(state) for _ in range(world_size)]
    dist.all_gather(states, state, group=group)
    family = group.communicator.plan_for(10_000, 8).family.value
    _closed(group)
    return distance, exact, all(torch.equal(state, each) for each in states), family


def test_ddp_over_a_group_trains_as_over_gloo(ranks) -> None:
    for distance, exact, same, family in ranks.run(_trains, 4):
        assert distance <= 1e-12
        assert exact
        assert same
        assert family.startswith("hierarchical")


# Collectives: what a gloo group gives.


def _all_reduces(group, rank):
    ops = dist.ReduceOp
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        chosen = [ops.SUM, ops.MIN, ops.MAX, ops.PRODUCT]
        if not dtype.is_floating_point:
            chosen += [ops.BAND, ops.BOR, ops.BXOR]
        for op in chosen:
            tensor = (torch.arange(1, 3) + rank).to(dtype)
            dist.all_reduce(tensor, op, group=group)
            yield tensor
    average = torch.arange(5.0) * rank
    dist.all_reduce(average, ops.AVG, group=group)
    yield average
    strided = torch.zeros(3, 4).t()[1:3]
    strided += rank
    work = dist.all_reduce(
        strided if group is not None else strided.contiguous(), group=group, async_op=True
    )
    work.wait()
    yield work.get_future().value()[0]
    sparse = torch.sparse_coo_tensor([[rank % 3]], [1.0 + rank], (3,))
    dist.all_reduce(sparse, group=group)
    yield sparse.to_dense()
    for tensor in (torch.empty(0), torch.ones(1, 1, dtype=torch.complex64) * (1 + 1j) * rank):
        dist.all_reduce(tensor, group=group)
        yield tensor
    several = [torch.full((n,), float(rank + n)) for n in (3, 1, 70_000)]
    dist.all_reduce_coalesced(several, group=group)
    yield from several
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in several:
            dist.all_reduce(tensor, ops.MAX, group=group)
    manager.wait()
    yield from several


def _others(group, rank, n):
    mine = torch.arange(3.0) + 10 * rank
    dist.broadcast(mine, 1, group=group)
    yield mine
    summed = torch.ones(2) * rank
    dist.reduce(summed, 0, group=group)
    yield summed if rank == 0 else mine
    gathered = [torch.empty(3) for _ in range(n)]
    dist.all_gather(gathered, mine + rank, group=group)
    yield from gathered
    whole = torch.empty(3 * n)
    dist.all_gather_into_tensor(whole, mine + rank, group=group)
    yield whole
    dist.gather(mine + rank, gathered if rank == 2 else None, 2, group=group)
    yield from gathered
    part = torch.empty(3)
    parts = [torch.ones(3) * i for i in range(n)] if rank == 1 else None
    dist.scatter(part, parts, 1, group=group)
    yield part
    shard = torch.empty(2)
    dist.reduce_scatter_tensor(shard, torch.arange(2.0 * n) + rank, group=group)
    yield shard
    swapped = torch.empty(n)
    dist.all_to_all_single(swapped, torch.arange(float(n)) + 10 * rank, group=group)
    yield swapped
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    yield torch.tensor([each["rank"] for each in objects])
    said = [rank] if rank == 0 else [None]
    dist.broadcast_object_list(said, 0, group=group)
    yield torch.tensor(said)
    dist.barrier(group)
    ring = torch.ones(1) * rank
    sending = dist.isend(ring, (rank + 1) % n, group=group)
    received = torch.empty(1)
    dist.recv(received, (rank - 1) % n, group=group)
    sending.wait()
    yield received


def _agrees(rank, world_size):
    group = _new_group(rank)
    wrong = []
    for number, pair in enumerate(
        zip(_all_reduces(None, rank), _all_reduces(group, rank), strict=True)
    ):
        if not torch.equal(*pair) or pair[0].dtype is not pair[1].dtype:
            wrong.append(("all-reduce", number, str(pair)))
    for number, pair in enumerate(
        zip(_others(None, rank, world_size), _others(group, rank, world_size), strict=True)
    ):
        if not torch.equal(*pair):
            wrong.append(("other", number, str(pair)))
    scaled = torch.ones(4) * rank
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.25), group=group)
    if not torch.equal(scaled, torch.full((4,), 1.5)):
        wrong.append(("prescaled", scaled))
    # What gloo refuses, gloo refuses here.
    for tensor, op in (
        (torch.ones(1, dtype=torch.int16), dist.ReduceOp.SUM),
        (torch.ones(1), dist.ReduceOp.BAND),
    ):
        said = []
        for where in (None, group):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                dist.all_reduce(tensor, op, group=where)
            said.append(str(caught.value).splitlines()[0])
        if said[0] != said[1]:
            wrong.append(("refused", said))
    _closed(group)
    return wrong


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_collective_gives_what_gloo_gives(ranks) -> None:
    assert ranks.run(_agrees, 4) == [[], [], [], []]


def _drops_tensors(rank, world_size):
    """Let gloo's threads drop the last references to tensors while more calls come in."""
    group = _new_group(rank)
    last = None
    for _ in range(1500):
        last = dist.broadcast(torch.ones(8), 0, group=group, async_op=True)
    last.wait()
    dist.barrier(group)
    joined = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait()
    _closed(group)
    return float(joined[0])


def test_delegated_calls_do_not_hold_the_interpreter_while_gloo_needs_it(ranks) -> None:
    assert ranks.run(_drops_tensors, 2) == [2.0, 2.0]


def _uneven(rank, world_size):
    """Join divides by those who still have batches; torch keeps only the C++ side of a Work."""
    group = _new_group(rank)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    nn.init.zeros_(model.module.weight)
    found = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            model.zero_grad()
            model(torch.ones(1, 1) * (1 + rank)).sum().backward()
            found.append(float(model.module.weight.grad))
            gc.collect()
    _closed(group)
    return found


def test_join_divides_by_the_ranks_that_are_left(ranks) -> None:
    assert ranks.run(_uneven, 2) == [[1.5, 1.5], [1.5, 1.5, 2.0]]


# Groups.


def _crossed(rank, world_size):
    """Use groups for the first time in different orders, asynchronously, two of the same ranks."""
    dist.init_process_group("topo", timeout=timedelta(seconds=30))
    groups = [
        _new_group(rank),
        _new_group(rank),
        _new_group(rank, [1, 3]),
        _new_group(rank, [0, 1]),
    ]
    order = [0, 1, 2, 3] if rank % 2 else [3, 2, 1, 0]
    tensors = [torch.full((5,), float(rank + 100 * i)) for i in range(4)]
    works = {
        i: dist.all_reduce(tensors[i], group=groups[i], async_op=True)
        for i in order
        if groups[i] is not None
    }
    for work in works.values():
        work.wait()
    found = {i: float(tensors[i][0]) for i in sorted(works)}
    backends = {dist.get_backend(groups[i]) for i in works}
    dist.destroy_process_group()
    return found, backends


def test_groups_come_into_use_in_any_order(ranks) -> None:
    full = {0: 6.0, 1: 406.0}
    assert ranks.run(_crossed, 4, init=False, deadline_s=40.0) == [
        (full | {3: 601.0}, {"topo"}),
        (full | {2: 404.0, 3: 601.0}, {"topo"}),
        (full, {"topo"}),
        (full | {2: 404.0}, {"topo"}),
    ]


def _work(rank, world_size):
    group = _new_group(rank)
    dist.all_reduce(torch.ones(1), group=group)
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        time.sleep(1.0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    gone = []
    if rank == 1:
        gone = [work.is_completed(), work.exception()]
        with pytest.raises(ExecutionError, match=r"not complete after 0\.05 s"):
            work.wait(timedelta(seconds=0.05))
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    ended = work.wait(timedelta(seconds=20))
    value = doubled.wait()
    # Only torch's registry holds on to this one.
    reduced = functional.all_reduce(torch.ones(2) * rank, "sum", group)
    gc.collect()
    if rank == 0:
        time.sleep(0.3)
    held = functional.wait_tensor(reduced).tolist()
    _closed(group)
    with pytest.raises(ExecutionError, match="destroyed"):
        group.allreduce([torch.ones(1)]).wait()
    return gone, ended, work.is_completed(), work.is_success(), value.tolist(), held


def test_work_and_future(ranks) -> None:
    results = ranks.run(_work, 2)
    for rank, result in enumerate(results):
        gone = [False, None] if rank == 1 else []
        assert result == (gone, True, True, True, [2.0] * 3, [1.0] * 2)


def _held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _leaves_nothing(rank, world_size):
    held = []
    for _ in range(3):
        group = _new_group(rank)
        dist.all_reduce(torch.ones(70_000), group=group)
        _closed(group)
        del group
        gc.collect()
        dist.barrier()
        held.append(_held())
    return held


def test_a_destroyed_group_leaves_no_thread_and_no_file_open(ranks) -> None:
    for held in ranks.run(_leaves_nothing, 4):
        assert held[1] == held[2]


def _refused(rank, world_size):
    with pytest.raises(ConfigError) as caught:
        dist.new_group(backend="topo", pg_options=object())
    return str(caught.value)


def test_options_of_another_backend_are_refused(ranks) -> None:
    (said,) = ranks.run(_refused, 1)
    assert said == ("pg_options of backend 'topo' are topo_ar.BackendOptions, not object")


# What is built on groups.


def _mesh(rank, world_size):
    _on_hosts(rank, HOSTS)
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": "topo", "shard": "topo"},
    )
    plain_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grads = []
    for which in (mesh, plain_mesh):
        model = _model(torch.float64)
        fully_shard(model, mesh=which)
        x = torch.arange(64, dtype=torch.float64).reshape(2, 32) * (rank + 1)
        model(x).square().mean().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    equal = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*grads, strict=True))
    sharded = fully_shard(_model(torch.float64), mesh=mesh["shard"])
    sharded(torch.ones(2, 32, dtype=torch.float64) * rank).sum().backward()
    both = torch.stack([p.grad.full_tensor().sum() for p in sharded.parameters()])
    tensor = distribute_tensor(torch.arange(4.0), mesh["replicate"], [Replicate()])
    partial = type(tensor).from_local(torch.ones(4) * (rank + 1), mesh["replicate"], [Partial()])
    summed = partial.redistribute(placements=[Replicate()]).to_local()
    group = mesh.get_group("replicate")
    made = group.communicator is not None
    return equal, bool(both.isfinite().all()), summed.tolist(), dist.get_backend(group), made


def test_device_mesh_fsdp_and_dtensor(ranks) -> None:
    for rank, (distance, finite, summed, backend, made) in enumerate(
        ranks.run(_mesh, 4, deadline_s=40.0)
    ):
        assert distance <= 1e-12
        assert finite
        assert summed == [2.0 * (rank % 2) + 4.0] * 4  # ranks r and r + 2
        assert backend == "topo"
        assert made


def _zero(rank, world_size):
    group = _new_group(rank)
    states = []
    for process_group in (None, group):
        model = DistributedDataParallel(_model(torch.float64), process_group=process_group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=process_group, lr=0.01
        )
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step + 10 * rank))
            model(x.double()).square().mean().backward()
            optimizer.step()
        states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    _closed(group)
    return float((states[0] - states[1]).abs().max())


def test_zero_redundancy_optimizer(ranks) -> None:
    assert max(ranks.run(_zero, 4)) <= 1e-9


def _compiled(rank, world_size):
    group = _new_group(rank)

    def scaled_sum(x):
        dist.all_reduce(x, group=group)
        return functional.all_reduce(x * 2, "sum", group) + 1

    result = torch.compile(scaled_sum, backend="eager")(torch.ones(3))
    model = DistributedDataParallel(_model(), process_group=group)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        model.zero_grad()
        compiled(torch.ones(2, 32) * rank).sum().backward()
    eager = DistributedDataParallel(_model())
    eager(torch.ones(2, 32) * rank).sum().backward()
    pairs = zip(_gradients(model), _gradients(eager), strict=True)
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
    _closed(group)
    return result.tolist(), close


@pytest.mark.slow  # the compiler takes most of it
def test_under_compile(ranks) -> None:
    assert ranks.run(_compiled, 2, deadline_s=50.0) == [([9.0] * 3, True)] * 2


# Being known to torch.


def _default(rank, world_size):
    _on_hosts(rank, HOSTS)
    dist.set_debug_level_from_env()  # read when the fork server imported torch
    dist.init_process_group("topo", timeout=timedelta(seconds=20))
    tensor = torch.arange(1000.0) + rank
    dist.all_reduce(tensor)
    expected = torch.arange(1000.0) * world_size + sum(range(world_size))
    right = torch.equal(tensor, expected)
    debugs = dist.group.WORLD.communicator._debug
    dist.barrier()
    dist.destroy_process_group()
    return right, debugs


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_as_the_default_group(ranks, level) -> None:
    outcomes = ranks.fresh(_default, 4, init=False, env={"TORCH_DISTRIBUTED_DEBUG": level})
    assert [o.error for o in outcomes] == [None] * 4
    assert [o.result for o in outcomes] == [(True, level == "DETAIL")] * 4


def test_torch_finds_the_backend_by_itself(tmp_path) -> None:
    """The entry point is torch's to call, also where nothing of ours is imported."""
    (group,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "entry-points"
    ].items()
    info = tmp_path / "topo_ar_entry-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: topo-ar-entry\nVersion: 1\n")
    lines = [f"[{group[0]}]"] + [f"{name} = {value}" for name, value in group[1].items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    code = (
        "import torch.distributed as dist, sys; "
        "assert not any('execution' in m for m in sys.modules if m.startswith('topo_ar')); "
        f"dist.init_process_group('topo', init_method='file://{tmp_path}/store', "
        "rank=0, world_size=1); print(dist.get_backend()); dist.destroy_process_group()"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "topo\n", done.stderr


def test_registering_again_changes_nothing() -> None:
    before = dist.Backend._plugins["TOPO"]
    topo_ar.register_backend()
    assert dist.Backend._plugins["TOPO"] is before
