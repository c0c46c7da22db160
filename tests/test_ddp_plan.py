"""The planned bucket cap of a DDP, and advice for one that runs."""

import io
import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks
from topo_ar.errors import ConfigError
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.planning.buckets import MIB
from topo_ar.planning.training_plan import TrainingPlan

HOSTS = blocks(2, 2)


def _on_hosts(rank: int) -> None:
    import os

    os.environ[HOST_ID_ENV] = str(HOSTS[rank])


def _model(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])


def _train(model: nn.Module, steps: int, width: int = 64) -> None:
    for _ in range(steps):
        model(torch.ones(2, width)).sum().backward()


def _caps(rank: int, world_size: int, options: dict[str, object]) -> tuple[float, bool]:
    _on_hosts(rank)
    model = topo_ar.ddp(_model(512), timeout_s=20.0, **options)
    _train(model, 2, 512)
    return model.bucket_bytes_cap / MIB, model.bucket_bytes_cap_default


def test_all_ranks_plan_the_same_cap(ranks) -> None:
    (cap, *others) = ranks.run(_caps, 4, {})
    assert others == [cap] * 3
    # 4 MB of gradients: several buckets to overlap, where torch's default makes few.
    assert cap[0] <= 25


@pytest.mark.parametrize("cap", [1, 0.5, 100])
def test_a_cap_given_by_the_user_wins(ranks, cap) -> None:
    assert ranks.run(_caps, 4, {"bucket_cap_mb": cap}) == [(cap, False)] * 4


def _gradients(rank: int, world_size: int) -> bool:
    _on_hosts(rank)
    plain, planned = DistributedDataParallel(_model()), topo_ar.ddp(_model(), timeout_s=20.0)
    _train(plain, 3)
    _train(planned, 3)
    return all(
        torch.allclose(a.grad, b.grad)
        for a, b in zip(plain.parameters(), planned.parameters(), strict=True)
    )


def test_a_planned_cap_changes_no_gradient(ranks) -> None:
    assert ranks.run(_gradients, 4) == [True] * 4


def _nothing_to_plan(rank: int, world_size: int) -> list[str]:
    texts = []
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for module, options in ((frozen, {}), (_model(), {"bucket_cap_mb": 0, "bogus": 1})):
        try:
            topo_ar.ddp(module, timeout_s=20.0, **options)
        except (RuntimeError, TypeError) as error:
            texts.append(str(error))
    one = topo_ar.ddp(_model(), timeout_s=20.0) if world_size == 1 else None
    return [*texts, str(one is not None and one.bucket_bytes_cap_default)]


def test_what_torch_refuses_is_refused_as_before(ranks) -> None:
    for texts in ranks.run(_nothing_to_plan, 2):
        assert "any parameter that requires a gradient" in texts[0]
        assert "bogus" in texts[1]


def test_one_rank_keeps_torchs_cap(ranks) -> None:
    assert ranks.run(_nothing_to_plan, 1)[0][-1] == "True"


def _advised(rank: int, world_size: int) -> dict[str, object]:
    _on_hosts(rank)
    model = DistributedDataParallel(_model(512), bucket_cap_mb=1)
    with topo_ar.attach(model, timeout_s=20.0) as handle:
        try:
            handle.advice()
        except ConfigError as error:
            early = str(error)
        _train(model, 4, 512)
        exact, lossy = handle.advice(), handle.advice("lossy:0.05", "adamw")
        try:
            handle.advice("quick")
        except ConfigError as error:
            wrong = str(error)
    return {"early": early, "wrong": wrong, "exact": exact.to_json(), "lossy": lossy.to_json()}


def test_advice_from_the_steps_that_were_trained(ranks) -> None:
    for said in ranks.run(_advised, 4):
        assert "train at least one step" in said["early"]
        assert "'quick' is not a codec" in said["wrong"]
        exact = TrainingPlan.from_json(said["exact"])
        assert exact.reference_cap_mib == 1
        assert exact.gradient_nbytes == 4 * 4 * (512 * 512 + 512)
        assert exact.backward_seconds > 0
        assert "of a trace" in exact.backward_source
        assert {bucket.codec for bucket in exact.buckets} == {"none"}
        lossy = TrainingPlan.from_json(said["lossy"])
        assert [v.codec for v in lossy.codecs if not v.excluded] == ["fp16", "bf16", "int8"]


def _logged(rank: int, world_size: int) -> tuple[list[str], bool]:
    _on_hosts(rank)
    logger, text = logging.getLogger("topo_ar"), io.StringIO()
    handler, level = logging.StreamHandler(text), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.03125)
        with topo_ar.attach(model, timeout_s=20.0) as handle:
            torch.save(model, io.BytesIO())
            _train(model, 24)
            ok = handle.error is None
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in text.getvalue().splitlines() if line.startswith("advice")], ok


def test_the_log_says_once_on_rank_0_what_another_cap_would_gain(ranks) -> None:
    (first, *others) = ranks.run(_logged, 4)
    (line,), ok = first
    assert ok
    assert line.startswith("advice after 20 steps: ")
    assert "bucket cap" in line
    assert "0.03125 MiB" in line
    assert others == [([], True)] * 3
