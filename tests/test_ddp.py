import copy
import io
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks
from topo_ar.errors import ConfigError
from topo_ar.execution.transports.segment import HOST_ID_ENV

HOSTS = blocks(2, 2)


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    ).to(dtype)


def _on_hosts(rank: int, hosts: list[int]) -> None:
    import os

    os.environ[HOST_ID_ENV] = str(hosts[rank])


def _gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def _train(model: DistributedDataParallel, rank: int, steps: int, *, integers: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        dtype = next(model.parameters()).dtype
        if integers:
            x = torch.randint(-2, 3, (4, 32), generator=generator).to(dtype)
        else:
            x = torch.randn(4, 32, generator=generator, dtype=dtype)
        optimizer.zero_grad()
        model(x).sum().backward() if integers else model(x).square().mean().backward()
        optimizer.step()


def _same_as_plain(rank: int, world_size: int, options: dict[str, object]) -> float:
    _on_hosts(rank, HOSTS)
    plain = DistributedDataParallel(_model(torch.float64), **options)
    hooked = DistributedDataParallel(_model(torch.float64), **options)
    with topo_ar.attach(hooked, plan="hierarchical", timeout_s=20.0):
        _train(plain, rank, 5, integers=False)
        _train(hooked, rank, 5, integers=False)
    return max(
        float((a - b).abs().max().detach())
        for a, b in zip(plain.parameters(), hooked.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.01},
        {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
def test_double_precision_training_equals_plain_ddp(ranks, options) -> None:
    assert max(ranks.run(_same_as_plain, 4, options)) <= 1e-12


def _integer_gradients(rank: int, world_size: int) -> bool:
    _on_hosts(rank, HOSTS)
    torch.manual_seed(0)
    module = nn.Linear(32, 300, bias=False)
    plain = DistributedDataParallel(copy.deepcopy(module))
    hooked = topo_ar.ddp(copy.deepcopy(module), plan="hierarchical", timeout_s=20.0)
    x = torch.randint(-8, 9, (4, 32), generator=torch.Generator().manual_seed(rank)).float()
    for model in (plain, hooked):
        model(x).sum().backward()
    return all(
        torch.equal(a, b) for a, b in zip(_gradients(plain), _gradients(hooked), strict=True)
    )


def test_integer_gradients_are_bit_equal_to_plain_ddp(ranks) -> None:
    assert ranks.run(_integer_gradients, 4) == [True] * 4


def _accumulates(rank: int, world_size: int) -> float:
    _on_hosts(rank, HOSTS)
    plain, hooked = (DistributedDataParallel(_model(torch.float64)) for _ in range(2))
    with topo_ar.attach(hooked, plan="hierarchical", timeout_s=20.0):
        for model in (plain, hooked):
            generator = torch.Generator().manual_seed(rank)
            for _ in range(3):
                with model.no_sync():
                    x = torch.randn(4, 32, generator=generator, dtype=torch.float64)
                    model(x).square().mean().backward()
                x = torch.randn(4, 32, generator=generator, dtype=torch.float64)
                model(x).square().mean().backward()
    return max(
        float((a - b).abs().max())
        for a, b in zip(_gradients(plain), _gradients(hooked), strict=True)
    )


def test_no_sync_accumulates_as_plain_ddp(ranks) -> None:
    assert max(ranks.run(_accumulates, 4)) <= 1e-12


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


def _unused(rank: int, world_size: int) -> bool:
    _on_hosts(rank, HOSTS)
    torch.manual_seed(0)
    module = _Branches()
    plain = DistributedDataParallel(copy.deepcopy(module), find_unused_parameters=True)
    hooked = DistributedDataParallel(copy.deepcopy(module), find_unused_parameters=True)
    with topo_ar.attach(hooked, plan="hierarchical", timeout_s=20.0):
        for step in range(4):
            for model in (plain, hooked):
                model(torch.ones(2, 8), left=step % 2 == 0).sum().backward()
    return all(
        torch.equal(a, b) for a, b in zip(_gradients(plain), _gradients(hooked), strict=True)
    )


def test_unused_parameters(ranks) -> None:
    assert ranks.run(_unused, 4) == [True] * 4


def _uneven_batches(rank: int, world_size: int) -> list[float]:
    """Ranks that run out of batches are shadowed (pytorch/pytorch#60611)."""
    _on_hosts(rank, [0, 1])
    module = nn.Linear(3, 2, bias=False)
    nn.init.constant_(module.weight, 7.0)
    model = topo_ar.ddp(module, plan="hierarchical", timeout_s=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join():
        for _ in range(5 if rank == 0 else 3):
            optimizer.zero_grad()
            model(torch.ones(1, 3) * (rank + 1)).sum().backward()
            optimizer.step()
    return module.weight.detach().flatten().tolist()


def test_uneven_numbers_of_batches_join(ranks) -> None:
    """R02: every weight is its start value minus 3 x 1.5 + 2 x 0.5."""
    assert ranks.run(_uneven_batches, 2) == [[1.5] * 6] * 2


def _trace(rank: int, world_size: int, directory: str) -> dict[str, object]:
    _on_hosts(rank, HOSTS)
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
    with topo_ar.attach(model, plan="hierarchical", timeout_s=20.0) as handle:
        _train(model, rank, 3, integers=False)
        path = Path(directory) / f"trace{rank}.json"
        handle.trace().write(path)
    return json.loads(path.read_text())


def test_the_bucket_trace_names_every_parameter_once_a_step(ranks, tmp_path) -> None:
    names = {name for name, _ in _model().named_parameters()}
    numel = sum(p.numel() for p in _model().parameters())
    for trace in ranks.run(_trace, 4, str(tmp_path)):
        assert len(trace["steps"]) == 3
        assert len(trace["steps"][0]["buckets"]) == 1
        assert len(trace["steps"][2]["buckets"]) > 1
        for step in trace["steps"]:
            seen = [name for bucket in step["buckets"] for name in bucket["parameters"]]
            assert sorted(seen) == sorted(names)
            assert sum(bucket["numel"] for bucket in step["buckets"]) == numel
            calls = [bucket["call_seconds"] for bucket in step["buckets"]]
            assert calls == sorted(calls)
            for bucket in step["buckets"]:
                assert bucket["dtype"] == "float32"
                assert bucket["done_seconds"] > bucket["call_seconds"] > 0


def _saved(rank: int, world_size: int) -> list[float]:
    _on_hosts(rank, HOSTS)
    model = topo_ar.ddp(nn.Linear(4, 2, bias=False), plan="hierarchical", timeout_s=20.0)
    model(torch.ones(1, 4)).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.zero_grad()
    loaded(torch.ones(1, 4) * rank).sum().backward()
    return loaded.module.weight.grad.flatten().tolist()


def test_a_saved_ddp_loads_as_plain_ddp(ranks) -> None:
    """Torch does not register hooks again when it loads a DDP; nothing may break."""
    assert ranks.run(_saved, 4) == [[1.5] * 8] * 4


def _refused(rank: int, world_size: int) -> list[str]:
    texts = []
    hooked = DistributedDataParallel(_model())
    hooked.register_comm_hook(None, _plain_hook)
    for target in (_model(), hooked):
        try:
            topo_ar.attach(target)
        except ConfigError as error:
            texts.append(str(error))
    return texts


def _plain_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


def test_attach_refuses_what_it_cannot_serve(ranks) -> None:
    for texts in ranks.run(_refused, 2):
        assert "not a Sequential" in texts[0]
        assert "already has a communication hook" in texts[1]


def _bad_interface(rank: int, world_size: int, value: str) -> str:
    """The variable changed after gloo's own group was made."""
    model = DistributedDataParallel(_model())
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = value
    try:
        topo_ar.attach(model)
    except ConfigError as error:
        return str(error)
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return "no error"


@pytest.mark.parametrize("value", ["^lo,docker", "127.0.0.1", "nosuch0"])
def test_a_pattern_in_gloos_interface_variable_is_explained_once(ranks, value) -> None:
    """R07."""
    first, second = ranks.run(_bad_interface, 2, value)
    assert f"GLOO_SOCKET_IFNAME={value!r}" in first
    assert "interface names" in first
    assert "lo" in first.split("present are:")[1]
    assert "present are" not in second


def _repeated_interface(rank: int, world_size: int) -> float:
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
    model = topo_ar.ddp(nn.Linear(2, 2, bias=False), timeout_s=20.0)
    model(torch.ones(1, 2) * rank).sum().backward()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return float(model.module.weight.grad.mean())


def test_a_repeated_interface_stays_legal(ranks) -> None:
    assert ranks.run(_repeated_interface, 2) == [0.5, 0.5]


def _given_another_group(rank: int, world_size: int) -> list[str]:
    """Elastic training gives a DDP the group of those that are left."""
    _on_hosts(rank, HOSTS)
    left = dist.new_group([0, 1, 2])
    model = DistributedDataParallel(_model())
    texts = []
    with topo_ar.attach(model, timeout_s=20.0) as handle:
        _train(model, rank, 2, integers=False)
        if rank < 3:
            model._update_process_group(left)
            for _ in range(2):
                try:
                    _train(model, rank, 1, integers=False)
                except RuntimeError as error:
                    texts.append(str(error))
            texts.append(type(handle.error).__name__)
    if rank < 3:
        anew = DistributedDataParallel(_model(), process_group=left)
        with topo_ar.attach(anew, timeout_s=20.0) as handle:
            _train(anew, rank, 2, integers=False)
            texts.append(str(handle.communicator.world_size))
    return texts


def test_a_ddp_that_was_given_another_group_is_refused_and_a_new_one_works(ranks) -> None:
    found = ranks.run(_given_another_group, 4)
    for texts in found[:3]:
        *refused, kind, size = texts
        assert len(refused) == 2
        assert all("build a new DistributedDataParallel over the new group" in t for t in refused)
        assert (kind, size) == ("ConfigError", "3")
    assert found[3] == []
