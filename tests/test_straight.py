"""Small tensors past the lanes: mixed with everything else, with late ranks and wrong ones."""

import random
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.jobs import blocks, communicator
from topo_ar.errors import ExecutionError
from topo_ar.execution.switching import PromptSwitching

SHAPES = [
    pytest.param(blocks(2, 4), marks=pytest.mark.slow),
    blocks(4, 1),
    blocks(3, 2),
    [0, 1, 0, 1],
]


def _mixed(
    rank: int, world_size: int, hosts: list[int], seed: int, plan: str = "hierarchical_leader"
) -> tuple[int, int]:
    """Small ones, some of them late, between large and plain ones; count wrong and straight."""
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    wrong = 0
    with communicator(rank, hosts, plan=plan) as made:
        straight = made._loop._straight
        done = 0
        run = straight.run

        def counted(*args: object) -> object:
            nonlocal done
            left = run(*args)  # type: ignore[arg-type]
            done += left is None
            return left

        straight.run = counted  # type: ignore[method-assign, assignment]
        pending: list[tuple[object, torch.Tensor, torch.Tensor]] = []
        for step in range(60):
            numel = shared.choice([1, 5, 1000, 1024, 16_384, 200_000])
            dtype = shared.choice([torch.float32, torch.int64, torch.bfloat16])
            way = shared.choice(["sync", "sync", "sync", "async", "plain"])
            tensor = (torch.arange(numel) % 5 + rank + step % 3).to(dtype)
            expected = (torch.arange(numel) % 5 + step % 3) * world_size
            expected = (expected + sum(range(world_size))).to(dtype)
            if own.random() < 0.1:
                time.sleep(own.choice([0.0005, 0.003, 0.03]))
            if way == "plain":
                bits = torch.tensor([1 << rank])
                made.all_reduce_sync(bits, dist.ReduceOp.BOR)
                wrong += int(bits) != (1 << world_size) - 1
            elif way == "async":
                pending.append((made.all_reduce(tensor), tensor, expected))
            else:
                made.all_reduce_sync(tensor)
                wrong += not torch.equal(tensor, expected)
        for future, tensor, expected in pending:
            future.wait()  # type: ignore[attr-defined]
            wrong += not torch.equal(tensor, expected)
    return wrong, done


@pytest.mark.parametrize("hosts", SHAPES, ids=str)
def test_small_tensors_between_others_are_right(ranks, hosts) -> None:
    found = ranks.run(_mixed, len(hosts), hosts, 3)
    assert [wrong for wrong, _ in found] == [0] * len(hosts)
    assert any(done for _, done in found)


@pytest.mark.parametrize("kind", ["ring", "halving", "doubling"])
@pytest.mark.parametrize("hosts", [blocks(4, 1), blocks(3, 2), blocks(7, 1)], ids=str)
def test_owners_go_straight_from_round_to_round(ranks, hosts, kind) -> None:
    found = ranks.run(_mixed, len(hosts), hosts, 5, f"hierarchical_{kind}")
    assert [wrong for wrong, _ in found] == [0] * len(hosts)
    if kind == "doubling" or len(set(hosts)) == len(hosts):  # one owner a node
        assert any(done for _, done in found)


def _another_size(rank: int, world_size: int, hosts: list[int]) -> str:
    with communicator(rank, hosts, plan="hierarchical_leader", timeout_s=5.0) as made:
        for _ in range(3):
            made.all_reduce_sync(torch.ones(100))
            made.all_reduce_sync(torch.ones(300))
        try:
            made.all_reduce_sync(torch.ones(300 if rank == 3 else 100))
        except ExecutionError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("hosts", [blocks(2, 2), blocks(4, 1)], ids=str)
def test_ranks_with_another_size_are_refused_on_all(ranks, hosts) -> None:
    texts = ranks.run(_another_size, 4, hosts)
    assert all("equal arguments in equal order" in text for text in texts), texts


def test_the_switch_interval_is_short_while_collectives_fly_and_restored_after() -> None:
    usual = sys.getswitchinterval()
    with PromptSwitching():
        with PromptSwitching():
            assert sys.getswitchinterval() == pytest.approx(5e-4)
        assert sys.getswitchinterval() == pytest.approx(5e-4)
    assert sys.getswitchinterval() == usual
