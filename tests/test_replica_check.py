"""Replicas that differ are found by checksum, on all ranks in the same step."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks
from topo_ar.errors import ConfigError
from topo_ar.execution.agreement import DisagreementError
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.integrations.ddp import Handle
from topo_ar.integrations.replica_check import checksum

HOSTS = blocks(2, 2)


def _model(rank: int, hosts: list[int], every: int) -> tuple[DistributedDataParallel, Handle]:
    os.environ[HOST_ID_ENV] = str(hosts[rank])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))
    model = topo_ar.ddp(
        module, plan="hierarchical", timeout_s=20.0, bucket_cap_mb=0.004, check_replicas_every=every
    )
    return model, topo_ar.handle_of(model)


def _step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int) -> str:
    """Train a step; return what backward said of it."""
    optimizer.zero_grad()
    try:
        model(torch.full((2, 30), rank + 1.0)).square().sum().backward()
    except RuntimeError as error:
        return str(error)
    optimizer.step()
    return ""


def _spoiled(rank: int, world_size: int, hosts: list[int], odd: int, every: int) -> list[object]:
    """The odd rank loses the last bit of a weight before step 3, and has it back after step 4."""
    model, handle = _model(rank, hosts, every)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    weight = model.module[2].weight
    with handle:
        said = []
        for step in range(7):
            if rank == odd and step in (3, 5):
                with torch.no_grad():
                    weight.view(torch.int32)[1, 7] ^= 1
            said.append(_step(model, optimizer, rank))
        error = handle.error
        assert isinstance(error, DisagreementError)
        return [said, str(error), error.ranks, weight.detach().clone()]


@pytest.mark.parametrize(
    ("hosts", "odd", "named", "every"),
    [(HOSTS, 2, (2,), 2), (HOSTS, 0, (0,), 4), ([0, 1], 1, (0, 1), 4)],
    ids=str,
)
def test_one_bit_on_one_rank_fails_the_next_checked_step_on_all(
    ranks, hosts, odd, named, every
) -> None:
    found = ranks.run(_spoiled, len(hosts), hosts, odd, every)
    who = f"rank {odd}" if len(named) == 1 else "ranks 0-1"
    for said, text, culprits, weight in found:
        # Step 3 is trained with other weights, unseen; step 4 is not, so the bit can be put back.
        assert [bool(each) for each in said] == [step == 4 for step in range(7)]
        assert text == (
            f"step 4: the replicas differ, in 1 of 4 parameters: 2.weight ({who}); load one state "
            "on all ranks, and change parameters in the same way on all of them"
        )
        assert text in said[4]
        assert culprits == named
        assert torch.equal(weight, found[0][3])


def _several(rank: int, world_size: int) -> str:
    model, handle = _model(rank, HOSTS, 3)
    with handle:
        with torch.no_grad():
            if rank == 1:
                model.module[0].bias += 1
            if rank == 3:
                model.module[0].bias.neg_()
                model.module[2].bias.zero_()
        return _step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)


def test_the_first_step_is_checked_and_each_parameter_has_its_odd_ranks(ranks) -> None:
    for text in ranks.run(_several, 4):
        assert "step 0: the replicas differ, in 2 of 4 parameters: " in text
        assert "0.bias (ranks 1, 3), 2.bias (rank 3)" in text


def _exchanges(rank: int, world_size: int) -> list[int]:
    model, handle = _model(rank, HOSTS, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = []
    real = handle.communicator.gather_rows
    handle.communicator.gather_rows = lambda row: rows.append(row.nbytes) or real(row)
    found = []
    with handle:
        for _ in range(7):
            assert _step(model, optimizer, rank) == ""
            found.append(sum(rows))
            rows.clear()
    return found


def test_sixteen_bytes_in_checked_steps_and_none_between(ranks) -> None:
    assert ranks.run(_exchanges, 4) == [[16, 0, 0, 16, 0, 0, 16]] * 4


def _out_of_batches(rank: int, world_size: int) -> torch.Tensor:
    model, handle = _model(rank, HOSTS, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with handle:
        with model.join():
            for _ in range(2 + rank):
                assert _step(model, optimizer, rank) == ""
        return model.module[0].weight.detach().clone()


def test_ranks_that_have_run_out_of_batches_stand_aside(ranks) -> None:
    first, *others = ranks.run(_out_of_batches, 4)
    assert all(torch.equal(first, other) for other in others)


def _ignored(rank: int, world_size: int) -> str:
    os.environ[HOST_ID_ENV] = str(rank)
    module = nn.ModuleDict({"own": nn.Linear(3, 3), "all": nn.Linear(3, 3)})
    module.forward = lambda x: module["all"](module["own"](x))
    names = [f"own.{name}" for name, _ in module["own"].named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    nn.init.constant_(module["own"].weight, float(rank))
    model = DistributedDataParallel(module)
    with topo_ar.attach(model, timeout_s=20.0, check_replicas_every=1) as handle:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
        return str(handle.error)


def test_parameters_that_ddp_ignores_may_differ(ranks) -> None:
    assert ranks.run(_ignored, 2) == ["None", "None"]


def _refused(rank: int, world_size: int, every: object) -> str:
    model = DistributedDataParallel(nn.Linear(2, 2))
    try:
        topo_ar.attach(model, check_replicas_every=rank if every == "rank" else every)
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_what_is_no_number_of_steps_is_refused(ranks, every) -> None:
    (text,) = ranks.run(_refused, 1, every)
    assert f"check_replicas_every={every!r} is not a number of steps" in text


def test_all_ranks_check_in_the_same_steps(ranks) -> None:
    for text in ranks.run(_refused, 2, "rank"):
        assert "check_replicas_every is 1 on rank 1 but 0 on rank 0" in text


@given(
    st.lists(st.integers(-128, 127), min_size=8, max_size=64).map(lambda x: x[: len(x) // 8 * 8]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool]),
    st.data(),
)
def test_a_checksum_is_of_the_bits_in_order(values, dtype, data) -> None:
    raw = torch.tensor(values, dtype=torch.int8)
    tensor = (raw > 0) if dtype is torch.bool else raw.view(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(torch.stack([tensor, tensor], dim=1)[:, 0]) == checksum(tensor)
    assert checksum(tensor.requires_grad_(tensor.is_floating_point())) == checksum(tensor)
    bit = data.draw(st.integers(0, 8 * raw.numel() - 1))
    if dtype is not torch.bool:
        flipped = raw.clone().view(torch.uint8)
        flipped[bit // 8] ^= 1 << bit % 8
        assert checksum(flipped.view(dtype)) != checksum(tensor)


def test_a_checksum_of_nothing_and_of_one_number() -> None:
    assert checksum(torch.empty(0, 3)) == 0
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
