"""Compression under DDP where gradients are odd or buckets change: nothing is lost or spoiled."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.compressed_training import CODECS, TWO_BY_TWO, Given, attached, batch, model, on_hosts

SHAPES = {"a": (60, 50), "b": (50,), "c": (33, 64), "d": (3, 7)}


def _factors(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _conserved(rank, world_size, codec, hosts):
    """Buckets are rebuilt after the first step, in another order and of another size."""
    on_hosts(rank, hosts)
    ddp = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.01)
    outstanding = dict.fromkeys(SHAPES, 0.0)
    orders = set()
    with attached(ddp, codec, start_step=0) as handle:
        for step in range(5):
            ddp.zero_grad()
            ddp(_factors(rank, step)).backward()
            orders.add(tuple(bucket.parameters for bucket in handle.compression.buckets))
            for name, mean in ddp.module.gradients().items():
                given = sum(_factors(r, step)[name].double() for r in range(world_size))
                outstanding[name] = outstanding[name] + given - world_size * mean.double()
        state = handle.state_dict()
    scale = state["loss_scale"]
    kept = {name: state[f"residual/values.{name}"].double() / scale for name in SHAPES}
    return outstanding, kept, orders


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("hosts", [TWO_BY_TWO, [0, 1, 2]], ids=str)
def test_what_is_not_sent_waits_also_when_buckets_are_rebuilt(ranks, codec, hosts) -> None:
    for outstanding, kept, orders in ranks.run(_conserved, len(hosts), codec, hosts):
        assert len(orders) == 2
        for name in SHAPES:
            torch.testing.assert_close(kept[name], outstanding[name], rtol=0, atol=1e-4)


def _zero_first(rank, world_size):
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(Given({"a": (60, 50)}))
    random = torch.Generator().manual_seed(0)
    low = torch.randn(60, 1, generator=random) @ torch.randn(1, 50, generator=random)
    found = []
    with attached(ddp, "powersgd:2", start_step=0):
        for step in range(5):
            ddp.zero_grad()
            ddp({"a": torch.zeros(60, 50) if step < 2 else (rank + 1) * low}).backward()
            found.append(ddp.module.gradients()["a"])
    error = max(float((each - 2.5 * low).norm() / (2.5 * low).norm()) for each in found[2:])
    return bool(found[0].any() or found[1].any()), error


def test_zero_and_rank_deficient_gradients(ranks) -> None:
    for not_zero, error in ranks.run(_zero_first, 4):
        assert not not_zero
        assert error < 1e-5


def _clipped(rank, world_size, codec):
    """What is clipped is what all ranks have got, and no more is added to what waits."""
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(model())
    with attached(ddp, codec, start_step=0, grad_norm=True) as handle:
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            told = handle.grad_norm().norm
            before = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3).item()
            after = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()]).item()
    return told, before, after


@pytest.mark.parametrize("codec", ["int8", "topk:0.05", "powersgd:2"])
def test_gradients_are_clipped_as_they_are_applied(ranks, codec) -> None:
    results = ranks.run(_clipped, 4, codec)
    for told, before, after in results:
        assert (told, before, after) == results[0]
        assert told == pytest.approx(before, rel=1e-5)
        assert after == pytest.approx(1e-3, rel=1e-3)


def _auto(rank, world_size, optimizer):
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(model())
    stepper = getattr(torch.optim, optimizer)(ddp.parameters(), lr=1e-3)
    options = {"policy": "lossy:1", "optimizer": stepper, "start_step": 0}
    tried = set()
    with attached(ddp, "auto", **options) as handle:
        for step in range(8):
            stepper.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            stepper.step()
            tried |= {str(codec) for codec in handle.hook.compression.streams}
        return handle.compression.reason, handle.compression.costs.measured, tried


def test_auto_leaves_top_k_out_with_adam_and_says_why(ranks) -> None:
    for reason, measured, tried in ranks.run(_auto, 4, "AdamW"):
        assert "topk:0.01 is not safe with adamw" in reason
        assert "69 %" in reason
        assert "topk:0.01" not in {*measured, *tried}
        assert "powersgd:4" in measured
    for reason, measured, _ in ranks.run(_auto, 4, "SGD"):
        assert "not safe" not in reason
        assert "topk:0.01" in measured
