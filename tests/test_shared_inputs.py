"""Buffers that co-located ranks read where they lie: right in every mix with copied ones."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks, communicator
from topo_ar.execution import shared_inputs
from topo_ar.execution.transports.segment import FINGERPRINT_SLOTS, HOST_ID_ENV, Counter

NUMELS = (300_000, 1_000_003)


def _no_room(storage: torch.UntypedStorage) -> int:
    raise RuntimeError("no space left on device")


def _mixed(rank: int, world_size: int, hosts: list[int], who: str) -> tuple[int, int]:
    """Several in flight, of which some ranks share all, some or none; count wrong and shared."""
    own = random.Random(rank)
    wrong = 0
    if who == "none of rank 1" and rank == 1:
        shared_inputs.share_memory = _no_room
    with communicator(rank, hosts, plan="hierarchical") as made:
        wholes = [torch.zeros(2 * numel, dtype=torch.float32) for numel in NUMELS]
        for whole in wholes:
            made.share(whole)
        for step in range(8):
            flying = []
            for i, whole in enumerate(wholes):
                numel = NUMELS[i]
                # The second half lies at an offset that is no multiple of a cache line.
                tensor = whole[numel:] if step % 2 else whole[:numel]
                if who == "half" and (rank + step) % 2:
                    tensor = torch.empty(numel)
                torch.add(torch.arange(numel) % 7, rank + step, out=tensor)
                if own.random() < 0.3:
                    time.sleep(0.002)
                flying.append((made.all_reduce(tensor, dist.ReduceOp.SUM), tensor, numel))
            small = made.all_reduce_sync(torch.full((64,), float(rank)))
            wrong += not torch.equal(small, torch.full((64,), float(sum(range(world_size)))))
            for future, tensor, numel in flying:
                future.wait()
                expected = (torch.arange(numel) % 7 + step) * world_size + sum(range(world_size))
                wrong += not torch.equal(tensor, expected.float())
        shared = len(made._shared._mine)
    return wrong, shared


@pytest.mark.parametrize("hosts", [blocks(2, 2), blocks(1, 4), [0, 0, 0, 1], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("who", ["all", "half", "none of rank 1"])
def test_shared_and_copied_inputs_give_the_same(ranks, hosts, who) -> None:
    found = ranks.fresh(_mixed, 4, hosts, who, deadline_s=40.0)
    assert [outcome.error for outcome in found] == [None] * 4
    assert [outcome.result[0] for outcome in found] == [0] * 4
    alone = [hosts.count(hosts[rank]) == 1 for rank in range(4)]
    cannot = [alone[rank] or (who == "none of rank 1" and rank == 1) for rank in range(4)]
    assert [outcome.result[1] for outcome in found] == [0 if no else 2 for no in cannot]


def _refused(rank: int, world_size: int) -> str:
    with (
        communicator(rank, [0, 0]) as made,
        pytest.raises(ValueError, match="only strided") as told,
    ):
        made.share(torch.eye(3).to_sparse())
    return str(told.value)


def test_what_cannot_be_shared_is_refused(ranks) -> None:
    assert all("CPU" in text for text in ranks.run(_refused, 2))


def _as_copied(rank: int, world_size: int, options: dict[str, object]) -> tuple[bool, int]:
    os.environ[HOST_ID_ENV] = str(rank // 2)
    models = []
    for zero_copy in (False, True):
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.SiLU())]
        model = DistributedDataParallel(nn.Sequential(*layers), **options)
        handle = topo_ar.attach(model, plan="hierarchical", timeout_s=20.0, zero_copy=zero_copy)
        with handle:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for step in range(6):
                generator = torch.Generator().manual_seed(1000 * step + rank)
                optimizer.zero_grad()
                model(torch.randn(4, 64, generator=generator)).square().mean().backward()
                optimizer.step()
            shared = len(handle.communicator._shared._mine)
        models.append(model)
    both = zip(*(model.parameters() for model in models), strict=True)
    return all(torch.equal(a, b) for a, b in both), shared


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 0.02},
        {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
def test_buckets_in_shared_memory_train_the_same_model(ranks, options) -> None:
    found = ranks.run(_as_copied, 4, options, deadline_s=30.0)
    assert [same for same, _ in found] == [True] * 4
    assert all(shared > 0 for _, shared in found)


def test_no_two_counters_have_a_word_in_common() -> None:
    spans = {
        at: FINGERPRINT_SLOTS if name in ("FINGERPRINTS", "SOURCES") else 1
        for name, at in vars(Counter).items()
        if name.isupper()
    }
    words = [word for at, count in spans.items() for word in range(at, at + count)]
    assert len(spans) == sum(name.isupper() for name in vars(Counter))
    assert len(set(words)) == len(words)
    # Those that ranks sleep for are bits of a word.
    assert max(Counter.COPIED_OUT, Counter.POSTED, Counter.READ) < 63
