"""Every DDP of an unchanged script is attached by itself, unless it cannot be or must not be."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks
from topo_ar.errors import ConfigError
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.integrations import injection
from topo_ar.integrations.auto_attach import construct
from topo_ar.integrations.run_options import RUN_ENV, RunOptions


def _ddp(*args: object, **options: object) -> DistributedDataParallel:
    """Make a DDP as one is made under ``topo-ar run``."""
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    injection.endings.clear()
    construct(DistributedDataParallel.__init__, model, args, options)
    return model


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(400, 400) for _ in range(4)))


def _gradients(model: nn.Module, rank: int) -> list[torch.Tensor]:
    for step in range(3):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        # Whole numbers small enough for every sum to be exact.
        model(torch.randint(-3, 4, (2, 400), generator=generator).float()).round().sum()
        output = model(torch.randint(-3, 4, (2, 400), generator=generator).float())
        (output * 4).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _outcome(rank: int, world_size: int, kind: str) -> dict[str, object]:
    os.environ[HOST_ID_ENV] = str(blocks(2, 2)[rank])
    os.environ.update(RunOptions(timeout_s=20.0).to_environment())
    own = None
    if kind == "skips":
        model = _ddp(_layers(), skip_all_reduce_unused_params=True)
    elif kind == "cap by the script":
        model = _ddp(_layers(), None, bucket_cap_mb=3)
    else:
        model = _ddp(_layers())
    if kind == "hook":
        model.register_comm_hook(None, allreduce_hook)
    elif kind == "attach":
        own = topo_ar.attach(model, timeout_s=20.0)
    elif kind == "copied":
        torch.save(model, os.devnull)
    plain = DistributedDataParallel(_layers())
    equal = [
        torch.allclose(a, b, atol=1e-4)
        for a, b in zip(_gradients(model, rank), _gradients(plain, rank), strict=True)
    ]
    try:
        handle = topo_ar.handle_of(model)
    except ConfigError:
        handle = None
    rows = [ending() for ending in injection.endings]
    for each in (handle, own):
        if each is not None:
            each.close()
    return {
        "equal": all(equal),
        "handle": "own" if own is not None and handle is own else handle is not None,
        "cap": model.bucket_bytes_cap / (1 << 20),
        "rows": rows,
        "collectives": None if handle is None else handle._recorder.num_steps,
    }


@pytest.mark.parametrize("kind", ["as it is", "cap by the script", "copied"])
def test_a_ddp_is_attached(ranks, kind) -> None:
    said = ranks.run(_outcome, 4, kind, deadline_s=40.0)
    assert all(each["equal"] and each["handle"] is True for each in said)
    assert {each["collectives"] for each in said} == {3}
    assert (said[0]["cap"] == 3) == (kind == "cap by the script")
    assert len({each["cap"] for each in said}) == 1
    assert [row["attached"] for row in said[0]["rows"]] == [True]
    assert said[1]["rows"] == []


@pytest.mark.parametrize("kind", ["skips", "hook"])
def test_what_cannot_be_served_stays_plain(ranks, kind) -> None:
    said = ranks.run(_outcome, 4, kind, deadline_s=40.0)
    assert all(each["equal"] and each["handle"] is False for each in said)
    (row,) = said[0]["rows"]
    assert not row["attached"]
    assert ("skip_all_reduce" if kind == "skips" else "hook of its own") in row["reason"]


def test_a_script_that_attaches_by_itself_has_the_last_word(ranks) -> None:
    said = ranks.run(_outcome, 4, "attach", deadline_s=40.0)
    assert all(each["equal"] and each["handle"] == "own" for each in said)
    assert [row["reason"] for row in said[0]["rows"]] == ["the script attaches by itself"]


def _compiled(rank: int, world_size: int) -> bool:
    os.environ.update(RunOptions(timeout_s=20.0).to_environment())
    model = _ddp(_layers())
    compiled = torch.compile(model, backend="eager")
    plain = DistributedDataParallel(_layers())
    pairs = zip(_gradients(compiled, rank), _gradients(plain, rank), strict=True)
    with topo_ar.handle_of(model) as handle:
        return handle._recorder.num_steps > 0 and all(torch.allclose(a, b) for a, b in pairs)


@pytest.mark.slow
def test_a_compiled_ddp_is_attached(ranks) -> None:
    outcomes = ranks.fresh(_compiled, 2, deadline_s=50.0)
    assert [outcome.result for outcome in outcomes] == [True, True], outcomes[0].error


def test_options_of_somebody_else_are_refused(monkeypatch) -> None:
    from topo_ar.integrations.run_options import options_from

    with pytest.raises(ConfigError, match=f"{RUN_ENV} is not what topo-ar run sets"):
        options_from({RUN_ENV: '{"speed": 11}'})
