"""Debug mode: collectives that differ between ranks are an error on all of them."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import blocks, communicator
from topo_ar.errors import ExecutionError
from topo_ar.execution.agreement import DEBUG_ENV, odd_ranks

HOSTS = blocks(2, 2)


def _said(rank: int, hosts: list[int], calls: object, **options: object) -> dict[str, object]:
    with communicator(rank, hosts, debug=True, **options) as made:
        futures = [made.all_reduce(torch.ones(8)), made.all_reduce(torch.ones(100_000))]
        try:
            for future in futures:
                future.wait()
            calls(made, rank)
        except ExecutionError as error:
            return {"text": str(error), "ranks": error.ranks}
        except RuntimeError as error:  # of a future
            return {"text": str(error), "ranks": made.error.ranks}
    return {"text": "no error", "ranks": ()}


def _sizes(made, rank):
    made.all_reduce(
        torch.ones(10 + (rank == 3)), dist.ReduceOp.BAND if rank < 0 else dist.ReduceOp.SUM
    ).wait()


def _bits(made, rank):
    dtype = torch.int32 if rank == 3 else torch.int64
    made.all_reduce(torch.ones(4, dtype=dtype), dist.ReduceOp.BOR).wait()


def _sparse(made, rank):
    dense = torch.ones(4)
    made.all_reduce(dense.to_sparse() if rank == 3 else dense).wait()


def _empty(made, rank):
    made.all_reduce(torch.ones(0 if rank == 3 else 5)).wait()


def _operation(made, rank):
    op = dist.ReduceOp.BAND if rank == 3 else dist.ReduceOp.BOR
    made.all_reduce_sync(torch.ones(4, dtype=torch.int64), op)


def _one(made):
    made.all_reduce(torch.ones(7))


def _other(made):
    made.all_reduce(torch.ones(7))


def _swapped(made, rank):
    for call in (_other, _one) if rank == 3 else (_one, _other):
        call(made)
    made.all_reduce(torch.ones(1)).wait()


CASES = {
    "size": (_sizes, ["shape", "[10]", "[11]"]),
    "dtype on the plain path": (_bits, ["dtype", "int64", "int32"]),
    "sparse": (_sparse, ["layout", "strided", "sparse_coo"]),
    "empty": (_empty, ["shape", "[5]", "[0]"]),
    "operation": (_operation, ["operation", "BOR", "BAND"]),
    "order": (_swapped, ["caller", "test_agreement.py _one", "test_agreement.py _other"]),
}


def _case(rank: int, world_size: int, hosts: list[int], case: str) -> dict[str, object]:
    return _said(rank, hosts, CASES[case][0])


@pytest.mark.parametrize("case", CASES)
def test_calls_that_differ_are_shown_in_a_table_on_every_rank(ranks, case) -> None:
    texts = set()
    for said in ranks.run(_case, 4, HOSTS, case):
        assert said["ranks"] == (3,), said["text"]
        for part in ["rank 3 differ", "ranks 0-2", *CASES[case][1]]:
            assert part in said["text"]
        texts.add(said["text"].partition("ranks do not call")[2])
    assert len(texts) == 1


def _absent(rank: int, world_size: int, hosts: list[int], timeout_s: float) -> dict[str, object]:
    def calls(made, rank):
        if rank == 2:
            time.sleep(2.5 * timeout_s)
        made.all_reduce(torch.ones(3)).wait()

    return _said(rank, hosts, calls, timeout_s=timeout_s)


def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks) -> None:
    for said in ranks.run(_absent, 4, HOSTS, 1.0):
        assert said["ranks"] == (2,), said["text"]
        assert "rank 2 did not come to call 3" in said["text"]


def _all_right(rank: int, world_size: int, hosts: list[int]) -> list[float]:
    os.environ[DEBUG_ENV] = "1"
    try:
        with communicator(rank, hosts, plan="hierarchical") as made:
            tensors = [torch.full((n,), float(rank)) for n in (1, 300, 70_000)]
            futures = [made.all_reduce(tensor) for tensor in tensors]
            small = made.all_reduce_sync(torch.ones(5))
            flags = made.all_reduce_sync(torch.tensor([rank]), dist.ReduceOp.BOR)
            return [*(float(f.wait().unique()) for f in futures), float(small[0]), float(flags)]
    finally:
        del os.environ[DEBUG_ENV]


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 2]], ids=str)
def test_equal_calls_are_right_in_debug_mode(ranks, hosts) -> None:
    assert ranks.run(_all_right, 4, hosts) == [[6.0, 6.0, 6.0, 4.0, 3.0]] * 4


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_odd_ranks_are_those_that_are_not_as_most(values) -> None:
    odd = odd_ranks(values)
    usual = {value for rank, value in enumerate(values) if rank not in odd}
    assert len(usual) <= 1
    if len(odd) < len(values):
        kept = usual.pop()
        assert all(values.count(kept) > values.count(values[rank]) for rank in odd)
    else:
        assert len(set(values)) > 1
