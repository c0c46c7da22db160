"""What compression remembers: steps that are not finite, loss scales, checkpoints."""

import io
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from tests.compressed_training import (
    TWO_BY_TWO,
    Given,
    attached,
    batch,
    model,
    on_hosts,
    train_step,
    weights,
)
from topo_ar.errors import ConfigError

SHAPES = {"a": (60, 50), "b": (50,), "c": (33, 64), "d": (40, 30)}
STATEFUL = ["int4", "topk:0.05", "sign", "powersgd:2"]


def _factors(rank: int, step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: scale * torch.randn(s, generator=generator) for name, s in SHAPES.items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


# --- not finite ---


def _infinite(rank, world_size, compression, name):
    """Steps 0, 1, bad, 2 against 0, 1, 2 in a second model."""
    on_hosts(rank, TWO_BY_TWO)
    states, last, bad = [], [], {}
    for steps in ((0, 1, "bad", 2), (0, 1, 2)):
        # Buckets of a few kilobytes: the bad one is not the only one.
        ddp = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.01)
        with attached(ddp, compression, start_step=0) as handle:
            for step in steps:
                factors = _factors(rank, 7 if step == "bad" else step)
                if step == "bad" and rank == 1:
                    factors[name].view(-1)[3] = math.inf
                ddp.zero_grad()
                ddp(factors).backward()
                if step == "bad":
                    bad = ddp.module.gradients()
                    handle.hook.compression.go_on(2)  # a step that is skipped is none
            states.append(handle.state_dict(exact=True))
        last.append(ddp.module.gradients())
    return states, last, bad


@pytest.mark.parametrize("compression", [*STATEFUL, {"*.a": "int8", "*.c": "powersgd:2"}], ids=str)
@pytest.mark.parametrize("name", ["a", "b"])
def test_an_infinity_reaches_all_ranks_and_leaves_no_trace(ranks, compression, name) -> None:
    """Also one in a tensor that is exact."""
    results = ranks.run(_infinite, 4, compression, name)
    for (with_bad, without), (after_bad, after), bad in results:
        assert not bad[name].isfinite().all()
        assert _equal(with_bad, without) == []
        assert _equal(after_bad, after) == []
        assert _equal(with_bad, results[0][0][0]) == []
        assert with_bad["step"] == 3


def _scaled(rank, world_size, codec):
    """Mixed precision: overflows halve the loss scale, and the step is skipped everywhere."""
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, seen = [], []
    with attached(ddp, codec, start_step=1) as handle:
        handle.set_loss_scale(scaler)
        for step in range(7):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step)).square().mean()
            if step == 4 and rank == 2:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            before = weights(ddp)
            scaler.step(optimizer)
            scaler.update()
            seen.append(torch.equal(before, weights(ddp)))
            scales.append(scaler.get_scale())
        state = handle.state_dict()
    assert state["loss_scale"] == scales[-2] / 4
    return weights(ddp), scales, seen


@pytest.mark.parametrize("codec", ["fp16", "int8", "powersgd:2"])
def test_a_loss_scaler_skips_and_scales_on_all_ranks_together(ranks, codec) -> None:
    results = ranks.run(_scaled, 4, codec)
    for ours, scales, skipped in results:
        assert torch.equal(ours, results[0][0])
        assert ours.isfinite().all()
        assert scales == results[0][1]
        assert scales[4] == scales[3] / 2
        assert skipped == [False] * 4 + [True] + [False] * 2


def _rescales(rank, world_size, scales):
    """What was left out comes later in the units of the loss scale of then."""
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(Given(SHAPES))
    found = []
    with attached(ddp, "topk:0.05", start_step=0) as handle:
        for step, scale in enumerate(scales):
            handle.set_loss_scale(scale)
            ddp.zero_grad()
            ddp(_factors(rank, step, scale)).backward()
            found.append({k: g / scale for k, g in ddp.module.gradients().items()})
    return found


def test_a_changed_loss_scale_changes_nothing(ranks) -> None:
    same = ranks.run(_rescales, 2, [1.0] * 4)
    changing = ranks.run(_rescales, 2, [1.0, 1024.0, 512.0, 2.0**-4])
    for one, other in zip(same[0], changing[0], strict=True):
        assert _equal(one, other) == []


# --- checkpoints ---


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _resumed(rank, world_size, hosts, codec, exact, caps):
    """Six steps; and three, a file, and three more with another bucket cap."""
    on_hosts(rank, hosts)
    whole = DistributedDataParallel(model(), bucket_cap_mb=caps[0])
    with attached(whole, codec, start_step=1) as handle:
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            train_step(whole, optimizer, batch(rank, step))
        final = handle.state_dict(exact=exact)
    first = DistributedDataParallel(model(), bucket_cap_mb=caps[0])
    with attached(first, codec, start_step=1) as handle:
        optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            train_step(first, optimizer, batch(rank, step))
        saved = _through_a_file(
            {
                "model": first.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "compression": handle.state_dict(exact=exact),
            }
        )
    second = DistributedDataParallel(model(), bucket_cap_mb=caps[1])
    second.module.load_state_dict(saved["model"])
    with attached(second, codec, start_step=1) as handle:
        optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["compression"])
        loaded = handle.state_dict(exact=exact)
        for step in range(3, 6):
            train_step(second, optimizer, batch(rank, step))
        end = handle.state_dict(exact=exact)
    return weights(whole), weights(second), saved["compression"], loaded, final, end


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("codec", ["fp16", *STATEFUL])
def test_a_job_resumes_with_another_bucket_cap(ranks, codec, exact) -> None:
    results = ranks.run(_resumed, 4, TWO_BY_TWO, codec, exact, (0.02, 0.005))
    whole, second, saved, loaded, final, end = results[0]
    for result in results:
        assert torch.equal(result[1], second)
        assert _equal(result[2], saved) == []
    assert _equal(saved, loaded) == []
    assert saved["step"] == 3
    assert saved["residual/0.weight"].abs().sum() > 0
    if codec == "powersgd:2":
        assert saved["codec/powersgd:2/0.weight/q"].shape == (2, 32)
    # Others than before own a sum and the loss of its encoding.
    limit = 1e-3 if codec == "fp16" else 0.5
    moved = float((whole - weights(model())).norm())
    assert float((whole - second).norm()) < limit * moved
    assert final.keys() == end.keys()


def _same_buckets(rank, world_size, codec):
    """With find_unused_parameters the buckets are the same from the first step on."""
    on_hosts(rank, TWO_BY_TWO)
    options = {"find_unused_parameters": True, "bucket_cap_mb": 25}
    whole = DistributedDataParallel(Given(SHAPES), **options)
    found = []
    with attached(whole, codec, start_step=0) as handle:
        for step in range(4):
            whole.zero_grad()
            whole(_factors(rank, step)).backward()
            if step == 1:
                saved = _through_a_file(handle.state_dict(exact=True))
            found.append(whole.module.gradients())
    second = DistributedDataParallel(Given(SHAPES), **options)
    with attached(second, codec, start_step=0) as handle:
        handle.load_state_dict(saved)
        for step in range(2, 4):
            second.zero_grad()
            second(_factors(rank, step)).backward()
            assert _equal(second.module.gradients(), found[step]) == []
    return True


@pytest.mark.parametrize("codec", [*STATEFUL, "randomk:0.1"])
def test_the_same_job_resumes_bit_for_bit(ranks, codec) -> None:
    assert ranks.run(_same_buckets, 4, codec) == [True] * 4


def _elastic(rank, world_size, hosts, saved, codec):
    on_hosts(rank, hosts)
    ddp = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=0.01)
    with attached(ddp, codec, start_step=0) as handle:
        if saved is None:
            for step in range(3):
                ddp(_factors(rank, step)).backward()
        else:
            handle.load_state_dict(saved)
        return handle.state_dict()


def test_another_job_takes_over_what_is_outstanding(ranks) -> None:
    """In mean units: the sum over the nodes grows with the number of ranks; another codec too."""
    saved = ranks.run(_elastic, 4, TWO_BY_TWO, None, "topk:0.05")[0]
    found = ranks.run(_elastic, 3, [0, 1, 2], saved, "int8")[0]
    # Divided by the power of two above the number of ranks, here 4 in both.
    for name in SHAPES:
        key = f"residual/values.{name}"
        torch.testing.assert_close(found[key], saved[key] * 3 / 4)


def _by_dcp(rank, world_size, directory, codec):
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02)
    with attached(ddp, codec, start_step=0) as handle:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            train_step(ddp, optimizer, batch(rank, step))
        saved = handle.state_dict()
        dcp.save({"compression": saved}, checkpoint_id=directory)
    other = DistributedDataParallel(model())
    with attached(other, codec, start_step=0) as handle:
        state = {"compression": handle.state_dict()}
        dcp.load(state, checkpoint_id=directory)
        handle.load_state_dict(state["compression"])
        loaded = handle.state_dict()
    return _equal(saved, loaded)


@pytest.mark.parametrize("codec", ["int4", "powersgd:2"])
def test_distributed_checkpoints_have_a_place_for_everything(ranks, tmp_path, codec) -> None:
    assert ranks.run(_by_dcp, 4, str(tmp_path / "checkpoint"), codec) == [[]] * 4


def _not_a_state(rank, world_size):
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(model())
    with attached(ddp, "int8") as handle:
        with pytest.raises(ConfigError, match="has schema None"):
            handle.load_state_dict({"a": torch.zeros(1)})
        empty = handle.state_dict()
    with attached(DistributedDataParallel(model()), "none") as handle:
        assert handle.state_dict() == {}
        handle.load_state_dict(empty)
    return sorted(key for key in empty if key.startswith("residual/"))


def test_what_is_no_state_is_refused(ranks) -> None:
    names = sorted(f"residual/{name}" for name, _ in model().named_parameters())
    assert ranks.run(_not_a_state, 2) == [names] * 2
