"""Horovod's interface on real ranks: its operations, its optimizer, and scripts written for it."""

import copy
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

import topo_ar.integrations.horovod as hvd
from experiments.workloads.resnet import ResNet, gratings, shuffled_batches
from tests.jobs import blocks
from tests.ranks import tell
from tests.test_ddp import HOSTS, _gradients, _model, _on_hosts
from topo_ar.errors import ExecutionError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "data" / "horovod_script.py"


@pytest.fixture
def run(ranks):
    """Run a function on ranks on two emulated hosts, inside of init and shutdown."""
    return lambda function, size, *args: ranks.run(_inside, size, function, args)


def _inside(rank, world_size, function, args):
    _on_hosts(rank, blocks(2, world_size // 2))
    hvd.init(timeout_s=15)
    try:
        return function(rank, world_size, *args)
    finally:
        hvd.shutdown()


# Operations: what torch's collectives give.


def _same(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs), (ours, theirs)


def _reductions(rank, size):
    pairs = [(hvd.Sum, dist.ReduceOp.SUM), (hvd.Min, dist.ReduceOp.MIN)]
    pairs += [(hvd.Max, dist.ReduceOp.MAX), (hvd.Product, dist.ReduceOp.PRODUCT)]
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        for shape in ((), (17,), (3, 0), (5, 7, 3)):
            mine = (torch.arange(torch.tensor(shape).prod()).reshape(shape) % 5 + rank).to(dtype)
            for ours, theirs in pairs:
                expected = mine.clone()
                dist.all_reduce(expected, theirs)
                _same(hvd.allreduce(mine, op=ours), expected)
            total = mine.clone()
            dist.all_reduce(total)
            exact = dtype.is_floating_point
            mean = total / size if exact else total.div(size, rounding_mode="floor")
            _same(hvd.allreduce(mine), mean)
            _same(hvd.allreduce(mine, average=False), total)
            scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
            _same(scaled, total)
    both = [torch.ones(3) * rank, torch.ones(2, 2)]
    grouped = hvd.grouped_allreduce(both, op=hvd.Sum)
    _same(grouped[0], torch.full((3,), 6.0))
    _same(grouped[1], torch.full((2, 2), 4.0))
    strided = torch.zeros(3, 4).t()
    strided += rank
    assert hvd.allreduce_(strided, op=hvd.Sum) is strided
    _same(strided, torch.full((4, 3), 6.0))
    sparse = torch.sparse_coo_tensor([[rank % 3]], [1.0 + rank], (3,))
    _same(hvd.allreduce(sparse).to_dense(), torch.tensor([5.0, 2.0, 3.0]) / 4)
    half = hvd.allreduce(torch.full((3,), 1.0 + rank), compression=hvd.Compression.fp16)
    _same(half, torch.full((3,), 2.5))
    _same(hvd.reducescatter(torch.arange(6.0), op=hvd.Sum), 4 * _rows(torch.arange(6.0), rank))
    return True


def _rows(tensor, rank):
    return tensor.tensor_split(4)[rank]


def test_reductions_give_what_torch_gives(run) -> None:
    assert run(_reductions, 4) == [True] * 4


def _movements(rank, size):
    for dtype in (torch.float32, torch.int16, torch.bool, torch.uint8):
        mine = torch.full((rank, 2), rank, dtype=dtype)
        rows = torch.cat([torch.full((r, 2), r, dtype=dtype) for r in range(size)])
        _same(hvd.allgather(mine), rows)
        _same(hvd.allgather(torch.tensor(rank, dtype=dtype)), torch.arange(size).to(dtype))
        _same(hvd.broadcast(mine[:0], 2), mine[:0])
        _same(hvd.broadcast(torch.full((3,), rank, dtype=dtype), 2), torch.full((3,), 2).to(dtype))
    here = torch.full((2,), float(rank))
    assert hvd.broadcast_(here, 1) is here
    _same(here, torch.ones(2))
    sent = torch.arange(size * (rank + 1)).repeat_interleave(2).view(-1, 2)
    received = torch.empty(10, 2, dtype=torch.int64)
    dist.all_to_all_single(received, sent, [1, 2, 3, 4], [rank + 1] * size)
    _same(hvd.alltoall(sent), received)
    splits = [0] * size
    splits[(rank + 1) % size] = rank + 2
    output, counts = hvd.alltoall(torch.full((rank + 2,), rank), splits)
    before = (rank - 1) % size
    _same(output, torch.full((before + 2,), before))
    assert counts.tolist() == [before + 2 if r == before else 0 for r in range(size)]
    assert hvd.broadcast_object({"from": rank}, 3) == {"from": 3}
    assert hvd.allgather_object("x" * rank) == ["", "x", "xx", "xxx"]
    hvd.barrier()
    facts = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    return hvd.rank(), hvd.size(), *facts, hvd.is_homogeneous()


def test_movements_give_what_torch_gives(run) -> None:
    # The pool's processes are ranks of one host to their launcher, whatever is emulated.
    assert run(_movements, 4) == [(r, 4, r, 4, 0, 1, True) for r in range(4)]


def _differentiates(rank, size):
    x = torch.full((2, 3), float(rank), requires_grad=True)
    gradient = torch.full((2, 3), 1.0 + rank)
    found = []
    for op in (hvd.Average, hvd.Sum):
        hvd.allreduce(x, op=op).backward(gradient)
        found.append(x.grad[0, 0].item())
        x.grad = None
    hvd.broadcast(x, 1).backward(gradient)
    found.append(x.grad[0, 0].item())
    x.grad = None
    rows = torch.arange(size).repeat_interleave(2).float()[:, None].expand(-1, 3)
    hvd.allgather(x).backward(rows)
    found.append(x.grad[0, 0].item())
    y = torch.ones(size, requires_grad=True)
    hvd.alltoall(y).backward(torch.full((size,), float(rank)))
    return *found, *y.grad.tolist()


def test_operations_are_differentiable(run) -> None:
    for rank, found in enumerate(run(_differentiates, 4)):
        mean = 2.5
        assert found == (mean, 10.0, mean * (rank == 1), rank, 0, 1, 2, 3)


@pytest.mark.parametrize(
    "threshold", [pytest.param("1", marks=pytest.mark.slow), "20000", "100000000"]
)
def test_ranks_may_ask_in_any_order(ranks, threshold) -> None:
    env = {"HOROVOD_FUSION_THRESHOLD": threshold}
    assert ranks.run(_inside, 4, _asks_in_any_order, (), env=env) == [True] * 4


def _asks_in_any_order(rank, size):
    order = torch.randperm(12, generator=torch.Generator().manual_seed(rank)).tolist()
    handles = {}
    for _ in range(3):
        for number in order:
            tensor = torch.full((1000 * number + 1,), float(rank + number))
            handles[number] = hvd.allreduce_async(tensor, name=f"t{number}", op=hvd.Sum)
            time.sleep(0.001 * ((rank + number) % 3))
        for number in reversed(range(12)):
            result = hvd.synchronize(handles[number])
            assert hvd.poll(handles[number])
            _same(result, torch.full_like(result, 6.0 + 4 * number))
    return True


def _misuses(rank, size):
    with pytest.raises(ValueError, match=r"float32 \[3\] cpu on rank 0, .*float32 \[4\] cpu on"):
        hvd.allreduce(torch.ones(3 if rank == 0 else 4), name="shapes")
    with pytest.raises(ValueError, match="allgather float32 .* on rank 0, allgather float64"):
        hvd.allgather(torch.ones(3, dtype=torch.float32 if rank == 0 else torch.float64))
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(torch.ones(3), op=hvd.Adasum)
    with pytest.raises(AttributeError, match=r"hvd.elastic is not supported; .*torchrun"):
        hvd.elastic  # noqa: B018
    with pytest.raises(ValueError, match="does not take tensors of torch.int16"):
        hvd.allreduce(torch.ones(3, dtype=torch.int16))
    with pytest.raises(ValueError, match="root_rank=4 is not in ProcessSet"):
        hvd.broadcast(torch.ones(3), 4)
    with pytest.raises(ValueError, match="5 rows cannot be dealt out evenly to 4 ranks"):
        hvd.alltoall(torch.ones(5))
    if rank == 0:
        hvd.allreduce_async(torch.ones(3), name="twice")
        with pytest.raises(ValueError, match=r"'allreduce.twice' has been asked for"):
            hvd.allreduce_async(torch.ones(3), name="twice")
    # It works on after all that.
    return hvd.allreduce(torch.ones(1) * rank).item()


def test_misuse_raises_on_all_ranks_and_the_job_goes_on(run) -> None:
    assert run(_misuses, 4) == [1.5] * 4


def _never_asks(rank, size):
    _on_hosts(rank, HOSTS)
    hvd.init(timeout_s=5)
    with pytest.raises(
        ExecutionError, match=r"waits for ranks \[.*\], which have not asked"
    ) as why:
        hvd.allreduce(torch.ones(1), name="odd" if rank % 2 else "even")
    hvd.shutdown()
    return why.value.ranks


@pytest.mark.slow
def test_ranks_that_wait_for_different_things_fail_in_time(ranks) -> None:
    assert ranks.run(_never_asks, 4) == [(1, 3), (0, 2), (1, 3), (0, 2)]


def _process_sets(rank, size):
    even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([1, 3]))
    mine, other = (odd, even) if rank % 2 else (even, odd)
    total = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=mine)
    copied = hvd.broadcast(torch.tensor([rank]), mine.ranks[1], process_set=mine)
    with pytest.raises(ValueError, match=f"rank {rank} is not in ProcessSet"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set([2, 0])
    whole = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum)
    assert hvd.remove_process_set(even)
    assert hvd.process_set_ids() == [0, 2]
    return total.item(), copied.item(), whole.item(), mine.rank(), mine.size(), mine.included()


def test_process_sets_communicate_among_themselves(run) -> None:
    found = run(_process_sets, 4)
    assert found == [
        (t, c, 6.0, i, 2, True) for t, c, i in [(2.0, 2, 0), (4.0, 3, 0), (2.0, 2, 1), (4.0, 3, 1)]
    ]


# Training: the three oracles that the hook is held to.


def _optimizer(model, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)


def _train(model, optimizer, rank, steps, passes=1):
    for step in range(steps):
        optimizer.zero_grad()
        for extra in range(passes):
            generator = torch.Generator().manual_seed(1000 * step + 10 * extra + rank)
            dtype = next(model.parameters()).dtype
            x = torch.randn(4, 32, generator=generator, dtype=dtype)
            model(x).square().mean().backward()
        optimizer.step()


def _distance(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).abs().max().detach()) for x, y in pairs)


def _same_everywhere(model):
    state = torch.cat([p.detach().flatten() for p in model.parameters()])
    states = hvd.allgather(state[None])
    return bool((states == states[0]).all())


def _trains(rank, size, options):
    plain = DistributedDataParallel(_model(torch.float64))
    ours = _model(torch.float64)
    if options.get("groups"):
        options = {"groups": [list(ours[0].parameters()), list(ours[4].parameters())]}
    hvd.broadcast_parameters(ours.state_dict(), 0)
    optimizer = _optimizer(ours, **options)
    assert isinstance(optimizer, torch.optim.SGD)
    _train(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), rank, 5)
    _train(ours, optimizer, rank, 5)
    return _distance(plain.module, ours), _same_everywhere(ours)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"num_groups": 2}, marks=pytest.mark.slow),
        {"groups": True},
        pytest.param({"gradient_predivide_factor": 4.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_double_precision_training_equals_ddp(run, options) -> None:
    for distance, same in run(_trains, 4, options):
        assert distance <= 1e-12
        assert same


def _integer_gradients(rank, size):
    torch.manual_seed(0)
    module = nn.Linear(32, 300, bias=False)
    plain, ours = DistributedDataParallel(copy.deepcopy(module)), copy.deepcopy(module)
    x = torch.randint(-8, 9, (4, 32), generator=torch.Generator().manual_seed(rank)).float()
    plain(x).sum().backward()
    optimizer = _optimizer(ours)
    ours(x).sum().backward()
    optimizer.synchronize()
    return all(torch.equal(a, b) for a, b in zip(_gradients(plain), _gradients(ours), strict=True))


def test_integer_gradients_are_bit_equal_to_ddp(run) -> None:
    assert run(_integer_gradients, 4) == [True] * 4


def _resnets(rank, size):
    """Train by the shim, by DDP, and by DDP whose ranks take each other's images."""
    images, found = gratings(4 * size * 12, seed=0), {}
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    for name, shard in (("shim", rank), ("ddp", rank), ("permuted", order[rank])):
        torch.manual_seed(0)
        module = ResNet(8)
        model = module if name == "shim" else DistributedDataParallel(module)
        optimizer = torch.optim.SGD(module.parameters(), 0.01, 0.9)
        if name == "shim":
            hvd.broadcast_parameters(module.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(optimizer, module.named_parameters())
        for numbers in shuffled_batches(len(images), 4 * size, 0) * 2:
            batch = images.take(numbers.chunk(size)[shard])
            optimizer.zero_grad()
            functional.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
        found[name] = torch.cat([p.detach().double().flatten() for p in module.parameters()])
    shim, ddp, permuted = found["shim"], found["ddp"], found["permuted"]
    return float((shim - ddp).norm()), float((permuted - ddp).norm()), shim.sum().item()


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_resnet_in_fp32_is_as_near_to_ddp_as_ddp_in_another_rank_order(run, size) -> None:
    found = run(_resnets, size)
    assert len({each for *_, each in found}) == 1
    for distance, by_order, _ in found:
        assert by_order > 0
        assert distance <= 2 * by_order


def _accumulates(rank, size):
    """Passes add up, as they do for DDP under no_sync, and a loss of half is an average of two."""
    plain, ours = _model(torch.float64), _model(torch.float64)
    optimizer = _optimizer(ours, backward_passes_per_step=2)
    _train(ours, optimizer, rank, 3, passes=2)
    ddp = DistributedDataParallel(plain)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        sgd.zero_grad()
        for extra in range(2):
            generator = torch.Generator().manual_seed(1000 * step + 10 * extra + rank)
            ddp.require_backward_grad_sync = extra == 1
            ddp(
                torch.randn(4, 32, generator=generator, dtype=torch.float64)
            ).square().mean().backward()
        sgd.step()
    return _distance(plain, ours)


def test_backward_passes_accumulate_as_with_ddp(run) -> None:
    assert max(run(_accumulates, 4)) <= 1e-12


class _Branches(nn.Module):
    """Two branches; which is computed first, and so which gradients come first, is the rank's."""

    def __init__(self, turned):
        super().__init__()
        self.turned = turned
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        if self.turned:
            return self.a(x).sin() + self.b(x.cos())
        return self.b(x.cos()) + self.a(x).sin()


def _different_orders(rank, size):
    torch.manual_seed(0)
    ours = _Branches(turned=bool(rank % 2)).double()
    plain = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=True)
    order = []
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    _train(ours, _optimizer(ours), rank, 4)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    _train(plain, sgd, rank, 4)
    return _distance(plain.module, ours), order[:4]


def test_gradients_may_become_ready_in_different_orders(run) -> None:
    (_, first), (_, second), *_ = found = run(_different_orders, 4)
    assert first != second
    assert sorted(first) == sorted(second)
    assert all(distance <= 1e-12 for distance, _ in found)


def _gradient_rules(rank, size):
    model = _model()
    optimizer = _optimizer(model)
    x = torch.randn(4, 32)
    model(x).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    before = _gradients(model)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, _gradients(model), strict=True))
    optimizer.zero_grad(set_to_none=False)
    model(x).sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
        model(x).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    loss = optimizer.step(lambda: _closure(model, optimizer, x))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert len(calls) == 1
    body, head = _model(), nn.Linear(8, 2)
    late = hvd.DistributedOptimizer(torch.optim.SGD(body.parameters(), 0.1))
    late.add_param_group({"params": list(head.parameters())})
    head(body(x)).sum().backward()
    with pytest.raises(
        ValueError, match=r"added, .* of shapes \[\(2, 8\), \(2,\)\]; make it again"
    ):
        late.step()
    again = hvd.DistributedOptimizer(torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1))
    head(body(x)).sum().backward()
    again.step()
    assert _same_everywhere(body)
    for wrong, message in (
        ({"named_parameters": [("a", p) for p in model.parameters()]}, "names twice: a"),
        ({"named_parameters": list(model.named_parameters())[1:]}, r"does not name 1 .*\(64, 32\)"),
        ({"named_parameters": list(model.parameters())}, "pairs"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=hvd.Average"),
        ({"backward_passes_per_step": 0}, "not positive"),
        ({"groups": [[nn.Parameter(torch.ones(1))]]}, "no others"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **wrong)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum)
    return float(norm), float(loss.detach()), _same_everywhere(model)


def _closure(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    return loss


def test_the_optimizer_keeps_to_horovods_rules(run) -> None:
    found = run(_gradient_rules, 4)
    assert len({norm for norm, _, _ in found}) == 1
    assert all(same for *_, same in found)


def _sparse_gradients(rank, size, as_dense):
    torch.manual_seed(0)
    plain, ours = (nn.Embedding(10, 4, sparse=True).double() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), 0.1), ours.named_parameters(), sparse_as_dense=as_dense
    )
    sgd = torch.optim.SGD(ddp.parameters(), 0.1)
    rows = torch.tensor([rank, 2 * rank, 9])
    for _ in range(2):
        for model, each in ((ddp, sgd), (ours, optimizer)):
            each.zero_grad()
            model(rows).square().sum().backward()
            each.step()
    return _distance(plain, ours)


@pytest.mark.parametrize("as_dense", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sparse_gradients_train_as_with_ddp(run, as_dense) -> None:
    assert max(run(_sparse_gradients, 4, as_dense)) <= 1e-12


def _compressed(rank, size, name):
    model = _model()
    _train(model, _optimizer(model, compression=getattr(hvd.Compression, name)), rank, 5)
    exact = _model()
    _train(exact, _optimizer(exact), rank, 5)
    return _distance(model, exact), _same_everywhere(model)


@pytest.mark.parametrize(
    ("name", "limit"), [("fp16", 1e-3), pytest.param("bf16", 1e-2, marks=pytest.mark.slow)]
)
def test_casts_round_and_ranks_stay_equal(run, name, limit) -> None:
    for distance, same in run(_compressed, 4, name):
        assert 0 < distance < limit
        assert same


def _by_codec(rank, size, text):
    torch.manual_seed(0)
    codec = hvd.Compression.codec(text)
    found = []
    for compression in (codec, hvd.Compression.none):
        model = _model()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression)
        _train(model, optimizer, rank, 40)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    same = _same_everywhere(model)
    coded, exact = found
    return same, float((coded - exact).norm() / (exact - before).norm()), coded.sum().item()


@pytest.mark.parametrize(
    "text", ["int8", pytest.param("topk:0.1", marks=pytest.mark.slow), "powersgd:2"]
)
def test_codecs_train_nearly_as_without(run, text) -> None:
    found = run(_by_codec, 4, text)
    assert len({each for *_, each in found}) == 1
    for same, distance, _ in found:
        assert same
        assert 0 < distance < 0.2


def _states(rank, size):
    torch.manual_seed(rank)
    model = _model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 1:  # alone with a state
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), 1)
    hvd.broadcast_optimizer_state(optimizer, 1)
    state = optimizer.state_dict()
    moments = torch.cat([each["exp_avg"].flatten() for each in state["state"].values()])
    steps = [each["step"].item() for each in state["state"].values()]
    (group,) = state["param_groups"]
    total = hvd.allgather(moments[None])
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    with pytest.raises(ValueError, match="lr is a float, not a tensor"):
        hvd.broadcast_parameters({"lr": 0.1}, 0)
    same = bool((total == total[1]).all() and total.any())
    return same, set(steps), group["lr"], _same_everywhere(model)


def test_states_come_from_the_root(run) -> None:
    assert run(_states, 4) == [(True, {1.0}, 0.2, True)] * 4


# Uneven data, and ranks that die.


def _joins(rank, size):
    model = _model(torch.float64)
    optimizer = _optimizer(model)
    steps = [3, 1, 5, 0][rank]
    for step in range(steps):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
    last = hvd.join()
    reference = _model(torch.float64)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        sgd.zero_grad()
        for other, count in enumerate([3, 1, 5, 0]):
            if step < count:
                (reference(_batch(other, step)).square().mean() / size).backward()
        sgd.step()
    again = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item()
    assert hvd.join() in range(size)
    return last, _distance(model, reference) if rank == 2 else 0.0, again


def _batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 32, generator=generator, dtype=torch.float64)


def test_joined_ranks_take_part_with_zeros(run) -> None:
    for last, distance, again in run(_joins, 4):
        assert last == 2
        assert distance <= 1e-12
        assert again == 6.0


def _survives(rank, world_size):
    _on_hosts(rank, HOSTS)
    hvd.init(timeout_s=15)
    model = _model()
    optimizer = _optimizer(model)
    _train(model, optimizer, rank, 2)
    if rank == 2:
        tell("trained")
        threading.Event().wait()
    begin = time.monotonic()
    try:
        _train(model, optimizer, rank, 1000)
    except ExecutionError as error:
        tell((type(error).__name__, error.ranks, str(error), time.monotonic() - begin))
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1))
        os._exit(0)


def test_a_killed_rank_makes_all_others_raise(ranks) -> None:
    said = {}

    def heard(running, rank, message):
        if message == "trained":
            running.kill(2)
        else:
            said[rank] = message

    outcomes = ranks.fresh(_survives, 4, on_message=heard)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, -9, 0]
    assert sorted(said) == [0, 1, 3]
    for name, blamed, text, seconds in said.values():
        assert name == "ExecutionError"
        assert blamed == (2,), text
        assert seconds < 5


# Scripts.


def _load_script():
    spec = importlib.util.spec_from_file_location("horovod_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _runs_script(rank, world_size, argv):
    _on_hosts(rank, HOSTS)
    script = _load_script()
    model, accuracy = script.main(argv)
    backend, same = dist.get_backend(), _same_everywhere(model)
    args = script.parser.parse_args(argv)
    torch.manual_seed(args.seed)
    images, labels = script.digits(640, args.seed)
    plain = script.Net()
    if args.double:
        images, plain = images.double(), plain.double()
    ddp = DistributedDataParallel(plain)
    rate = args.lr * world_size
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate, momentum=args.momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    sampler = DistributedSampler(list(range(640)), world_size, rank)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for numbers in torch.tensor(list(sampler)).split(args.batch_size):
            optimizer.zero_grad()
            functional.nll_loss(ddp(images[numbers]), labels[numbers]).backward()
            optimizer.step()
        scheduler.step()
    ddp_accuracy = (plain(images).argmax(1) == labels).double().mean().item()
    hvd.shutdown()
    return backend, same, _distance(plain, model), accuracy, ddp_accuracy


def test_a_script_written_for_horovod_trains_as_ddp_does(ranks) -> None:
    found = ranks.run(_runs_script, 4, ["--double"], init=False)
    for backend, same, distance, accuracy, ddp_accuracy in found:
        assert backend == "topo"
        assert same
        assert distance <= 1e-10
        assert accuracy == pytest.approx(ddp_accuracy)
        assert accuracy > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "alone"])
def test_launchers_run_the_script(launcher, tmp_path) -> None:
    command = [sys.executable, str(SCRIPT), "--epochs", "1", "--save", str(tmp_path / "model.pt")]
    if launcher == "torchrun":
        begin = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*begin, "--nproc-per-node", "2", *command[1:]]
    elif launcher == "mpirun":
        if not _has_mpirun():
            pytest.skip("no mpirun")
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *command]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "Accuracy: " in done.stdout
    assert (tmp_path / "model.pt").exists()


def _has_mpirun() -> bool:
    import shutil

    return shutil.which("mpirun") is not None
