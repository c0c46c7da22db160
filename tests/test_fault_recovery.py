"""Failures that everyone survives: the same step ends by plain all-reduce, on all ranks."""

import logging
import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.fault_injection import LANES, before_chunk, breaks_flow, fails
from tests.jobs import blocks, communicator

_KINDS = {kind.__name__: kind for kind in (MemoryError, OSError, RuntimeError, IndexError)}
NUMELS = (1, 100_000, 700_001, 3, 65_536, 300_000)


def _expected(rank_count: int, step: int, i: int, op: "dist.ReduceOp.RedOpType") -> float:
    total = float(sum(rank + step + i for rank in range(rank_count)))
    return total / rank_count if op == dist.ReduceOp.AVG else total


def _under_fault(
    rank: int, world_size: int, hosts: list[int], seed: int, what: str, op_name: str = "SUM"
) -> dict[str, object]:
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    op = getattr(dist.ReduceOp, op_name)
    victim = shared.randrange(world_size)
    lane, chunk = shared.choice(LANES), shared.randrange(30)
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("topo_ar").addHandler(handler)
    wrong = 0
    with communicator(rank, hosts, plan="hierarchical") as made:
        if rank == victim:
            fault = breaks_flow(made) if what == "flow" else fails(_KINDS[what])
            before_chunk(made, lane, chunk, fault)
        for step in range(6):
            buckets = [torch.full((n,), float(rank + step + i)) for i, n in enumerate(NUMELS)]
            futures = []
            for bucket in buckets:
                if own.random() < 0.2:
                    time.sleep(own.random() * 0.003)
                futures.append(made.all_reduce(bucket, op))
            for i, future in enumerate(futures):
                expected = torch.full_like(buckets[i], _expected(world_size, step, i, op))
                wrong += int(not torch.equal(future.wait(), expected))
                buckets[i].fill_(-1.0)  # what a caller does with a result must reach no other rank
        found = {"wrong": wrong, "fallbacks": made.fallbacks, "reason": made.plain_reason}
    logging.getLogger("topo_ar").removeHandler(handler)
    return found | {"heard": heard, "victim": victim, "lane": lane, "chunk": chunk}


@pytest.mark.parametrize("hosts", [blocks(2, 2), blocks(1, 4), blocks(4, 1)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_a_failure_in_a_ranks_own_work_is_survived_by_all(ranks, hosts, seed) -> None:
    found = ranks.run(_under_fault, 4, hosts, seed, "MemoryError")
    for rank in found:
        assert rank["wrong"] == 0, rank
        assert rank["fallbacks"] == 1, rank
        assert "MemoryError" in rank["reason"], rank
    assert len(found[0]["heard"]) == 1, found[0]
    assert all(not rank["heard"] for rank in found[1:])
