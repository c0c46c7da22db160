"""``topo_ar.attach`` on models of ``fully_shard``: the all-reduce between replicas is ours."""

import gc
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import topo_ar
from tests.compressed_training import on_hosts
from tests.ranks import tell
from topo_ar.errors import ConfigError, ExecutionError

HOSTS = [0, 0, 1, 1]  # replicas of a shard are on different hosts


def _mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class _Net(nn.Module):
    """Rows that two ranks cannot halve, a parameter that is frozen and one that is never used."""

    def __init__(self, dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 7), nn.Linear(7, 5)
        self.frozen, self.unused = nn.Linear(5, 5, bias=False), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        return self.frozen(self.second(torch.tanh(self.first(x))))


def _wrapped(mesh, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = _Net(dtype)
    fully_shard(model.first, mesh=mesh, **options)
    fully_shard(model.second, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _batch(rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64).to(dtype)


def _gradients(model):
    return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]


def _weights(model):
    return [p.full_tensor().detach() for p in model.parameters()]


def _distance(ours, theirs):
    assert len(ours) == len(theirs) > 0
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def _trains(rank, world_size):
    on_hosts(rank, HOSTS)
    mesh = _mesh()
    plain, planned = _wrapped(mesh), _wrapped(mesh)
    with topo_ar.attach(planned, plan="hierarchical", timeout_s=20.0) as handle:
        for model in (plain, planned):
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(6):
                optimizer.zero_grad()
                model(_batch(rank, step)).square().mean().backward()
                optimizer.step()
        sent, steps = handle.communicator.nbytes_sent_between, handle.trace().steps
        found = handle.replicas, handle.choice.path, handle.fallbacks
        assert topo_ar.handle_of(planned) is handle
    distance = _distance(_weights(planned), _weights(plain))
    names = [bucket.parameters for bucket in steps[-1].buckets]
    # Detached, it goes on as FSDP does.
    for model in (plain, planned):
        model.zero_grad()
        model(_batch(rank, 9)).square().mean().backward()
    after = _distance(_gradients(planned), _gradients(plain))
    return distance, after, len(steps), names, sent, found


def test_double_precision_training_equals_plain_hsdp(ranks) -> None:
    for rank, result in enumerate(ranks.run(_trains, 4, deadline_s=40.0)):
        distance, after, num_steps, names, sent, found = result
        assert distance <= 1e-12
        assert after <= 1e-12
        assert num_steps == 6
        assert names == [
            ("second.weight", "second.bias"),
            ("first.weight", "first.bias"),
        ]
        assert found == ((rank % 2, rank % 2 + 2), "planned", 0)
        # Half of 7 and 5 rows, rounded up, of 8 and 7 and a bias, in float64: all of it each step.
        assert sent >= 6 * 8 * (4 * 9 + 3 * 8)


def _backward(model, rank, steps, dtype=torch.float64):
    for step in steps:
        model(_batch(rank, step, dtype)).square().mean().backward()


def _accumulates_locally(model, rank):
    model.set_requires_gradient_sync(False)
    _backward(model, rank, range(2))
    model.set_requires_gradient_sync(True)
    _backward(model, rank, [2])


def _accumulates_shards(model, rank):
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(False)
    _backward(model, rank, range(2))
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    _backward(model, rank, [2])


def _accumulates_sums(model, rank):
    _backward(model, rank, range(2))


def _half(model, rank):
    _backward(model, rank, range(2), torch.float32)


def _divides(model, rank):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(3.0)
    _backward(model, rank, [0])


def _clips(model, rank):
    _backward(model, rank, [0])
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _policy(**dtypes):
    return {"mp_policy": MixedPrecisionPolicy(**dtypes), "dtype": torch.float32}


VARIANTS = {
    "no gradient sync": (_accumulates_locally, {}, 1),
    "no all-reduce": (_accumulates_shards, {}, 1),
    "two backwards": (_accumulates_sums, {}, 2),
    "reduced in bfloat16": (_half, _policy(reduce_dtype=torch.bfloat16), 2),
    "reduced in float16": (_half, _policy(reduce_dtype=torch.float16), 2),
    "bfloat16 but for sums": (
        _half,
        _policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        2,
    ),
    "divided by 3": (_divides, {}, 1),
    "clipped": (_clips, {}, 1),
    "kept whole": (_accumulates_sums, {"reshard_after_forward": False}, 2),
}


def _vary(rank, world_size):
    on_hosts(rank, HOSTS)
    mesh = _mesh()
    found = {}
    for name, (train, options, _) in VARIANTS.items():
        plain, planned = _wrapped(mesh, **options), _wrapped(mesh, **options)
        with topo_ar.attach(planned, plan="hierarchical", timeout_s=20.0) as handle:
            train(plain, rank)
            train(planned, rank)
            same = all(map(torch.equal, _gradients(planned), _gradients(plain)))
            found[name] = same, len(handle.trace().steps)
    return found


def test_what_fsdp_does_stays_its_own(ranks) -> None:
    """With two replicas there is one order of summation: the bits are those of plain HSDP."""
    expected = {name: (True, num_steps) for name, (_, _, num_steps) in VARIANTS.items()}
    assert ranks.run(_vary, 4, deadline_s=60.0) == [expected] * 4


def _replicas(rank, world_size):
    """R15, NVIDIA-NeMo/Automodel#3135: a mesh that lost its replicas trains each shard group."""
    on_hosts(rank, HOSTS)
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    meshes = [_mesh(), flat._unflatten(0, (2, 2), ("replicate", "shard"))]
    weights = []
    for mesh in meshes:
        model = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(model.weight)
        fully_shard(model, mesh=mesh)
        with topo_ar.attach(model, timeout_s=20.0) as handle:
            model(torch.ones(1, 4) * (rank + 1)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        weights.append(model.weight.to_local().unique().tolist())
        weights.append(handle.replicas)
    return weights


def test_replicas_train_together(ranks) -> None:
    for rank, found in enumerate(ranks.run(_replicas, 4)):
        replicas = (rank % 2, rank % 2 + 2)
        assert found == [[-2.5], replicas, [-2.5], replicas]


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 33)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


CODECS = {"fp16": 0.52, "int8": 0.35, "topk:0.1": 0.4, "powersgd:2": 0.3}


def _compresses(rank, world_size):
    on_hosts(rank, HOSTS)
    mesh = _mesh()
    found = {}
    for codec in CODECS:
        torch.manual_seed(0)
        model = _Wide()
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        settings = {"start_step": 2, "guard_steps": 0, "timeout_s": 20.0}
        with topo_ar.attach(model, compression=codec, **settings) as handle:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))
            losses = []
            for _ in range(30):
                optimizer.zero_grad()
                loss = (model(x) - x[:, :1]).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            report = handle.compression
        mine = torch.cat([p.to_local().flatten() for p in model.parameters()]).detach()
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine, group=mesh.get_group("replicate"))
        learns = losses[-1] < losses[0] / 2
        sent = report.sent_nbytes / report.dense_nbytes
        found[codec] = torch.equal(*both), learns, sent, [b.codecs for b in report.buckets]
    return found


def test_codecs_between_replicas(ranks) -> None:
    for found in ranks.run(_compresses, 4, deadline_s=60.0):
        for codec, (same, learns, sent, codecs) in found.items():
            assert same, codec
            assert learns, codec
            assert sent <= CODECS[codec], codec
            assert len(codecs) == 2


def _goes_on(rank, world_size):
    """Train 8 steps, once in one go and once by way of a saved state after 5."""
    on_hosts(rank, HOSTS)
    mesh = _mesh()
    ended, keys = [], []
    for stops in (False, True):
        torch.manual_seed(0)
        model = fully_shard(_Wide(), mesh=mesh)
        settings = {"start_step": 1, "guard_steps": 0, "timeout_s": 20.0}
        handle = topo_ar.attach(model, compression="topk:0.1", **settings)
        for step in range(8):
            if stops and step == 5:
                state = handle.state_dict(exact=True)
                handle.close()
                handle = topo_ar.attach(model, compression="topk:0.1", **settings)
                handle.load_state_dict(state)
                keys = sorted({key.partition("/")[0] for key in state})
                with pytest.raises(ConfigError):
                    handle.load_state_dict({key.replace("rank", ""): 0 for key in state})
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        ended.append(_weights(model))
        handle.close()
    return all(map(torch.equal, *ended)), keys


def test_what_was_not_sent_goes_into_a_checkpoint(ranks) -> None:
    for rank, (same, keys) in enumerate(ranks.run(_goes_on, 4)):
        assert same
        assert keys == [f"replicas of rank {rank % 2}"]


def _refused(rank, world_size):
    mesh = _mesh()
    said = []

    def refused(model, **options):
        with pytest.raises(ConfigError) as caught:
            topo_ar.attach(model, **options)
        said.append(str(caught.value))

    refused(fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]))
    refused(nn.Linear(4, 4))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    refused(model, compression="auto")
    refused(model, compression={"nosuch": "int8"})
    with topo_ar.attach(model, timeout_s=20.0):
        refused(model)
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(mixed[0], mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("r", "s")))
    fully_shard(mixed[1], mesh=mesh)
    refused(fully_shard(mixed, mesh=mesh))
    with topo_ar.attach(mixed[0], timeout_s=20.0), topo_ar.attach(mixed, timeout_s=20.0):
        mixed(torch.ones(1, 4) * rank).sum().backward()
    whole = [p.grad.full_tensor() for p in mixed.parameters()]
    return said, all(bool(each.isfinite().all()) for each in whole)


def test_what_cannot_be_served_is_refused(ranks) -> None:
    for said, right in ranks.run(_refused, 4):
        assert [text.split(":")[0].split(",")[0] for text in said] == [
            "nothing in this model is replicated",
            "attach takes a DistributedDataParallel or what fully_shard returned",
            'compression="auto" weighs what backward hides',
            "compression",
            "this model is attached already; close the handle first",
            "modules of this model are replicated over different ranks",
        ]
        assert right


def _drops(rank, world_size):
    """Attach while parameters are gathered, keep no handle, and at last no model."""
    on_hosts(rank, HOSTS)
    plain, planned = _wrapped(_mesh()), _wrapped(_mesh())
    with torch.no_grad():
        planned(_batch(rank, 0))
    topo_ar.attach(planned, plan="hierarchical", timeout_s=20.0)
    gc.collect()
    for model in (plain, planned):
        _backward(model, rank, [0])
    same = all(map(torch.equal, _gradients(planned), _gradients(plain)))
    kept = ref(topo_ar.handle_of(planned))
    alive = kept() is not None
    del planned, model
    gc.collect()
    return same, alive, kept() is None


def test_the_handle_lives_as_long_as_the_model(ranks) -> None:
    assert ranks.run(_drops, 4) == [(True, True, True)] * 4


def _loses_a_replica(rank, world_size):
    on_hosts(rank, HOSTS)
    model = _wrapped(_mesh())
    with topo_ar.attach(model, plan="hierarchical", timeout_s=20.0):
        try:
            for step in range(10_000):
                _backward(model, rank, [step])
                if step == 3:
                    tell("running")
        except RuntimeError as error:
            return isinstance(error, ExecutionError), str(error)
    return None


def test_the_replica_of_a_killed_rank_names_it(ranks) -> None:
    """Rank 1 has the same shards; ranks 0 and 2 meet it, or wait for it, in torch's collectives."""

    def on_message(run, rank, message) -> None:
        if rank == 3:
            run.kill(3)

    outcomes = ranks.fresh(_loses_a_replica, 4, deadline_s=30.0, on_message=on_message)
    for rank in (0, 1, 2):
        assert outcomes[rank].exitcode == 0, outcomes[rank].error
        assert outcomes[rank].result is not None
    ours, text = outcomes[1].result
    # It may be in a reduce-scatter just then, over a connection to rank 0 that has gone.
    assert not ours or "rank 1 (rank 3 of the job) is on node 1" in text
