"""Every operation and dtype gives what torch gives, by any plan, and the same bits on all ranks."""

import hashlib

import pytest
import torch
import torch.distributed as dist

import topo_ar
from tests.jobs import blocks, communicator
from tests.reductions import AVG, MAX, MIN, PRODUCT, SUM, reference, whole_numbers
from topo_ar import api
from topo_ar.errors import ExecutionError

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64, torch.int8, torch.uint8]
FAST = "hierarchical"


def _all_operations(rank: int, world_size: int, hosts: list[int], plan: str) -> list[str]:
    wrong = []
    with communicator(rank, hosts, plan=plan) as made:
        pending = []
        for dtype in [*FLOATS, *INTEGERS, torch.bool]:
            for op in (SUM, AVG, PRODUCT, MIN, MAX):
                if op == AVG and not dtype.is_floating_point:
                    continue
                for numel in (1, 7, 3001):
                    parts = [
                        whole_numbers(r, world_size, numel, dtype, op) for r in range(world_size)
                    ]
                    future = made.all_reduce(parts[rank].clone(), op)
                    pending.append((reference(parts, op), future, f"{dtype} {op} {numel}"))
        for expected, future, what in pending:
            # Also as bytes: a bool is one bit in a byte.
            if not torch.equal(future.wait().view(torch.uint8), expected.view(torch.uint8)):
                wrong.append(what)
        if plan == FAST:
            assert all(kept.program for kept in made._plans._kept.values())
    return wrong


@pytest.mark.parametrize(
    ("hosts", "plan"),
    [([0, 0, 1, 1], FAST), ([0, 0, 0, 1, 2], FAST), ([0, 1, 2], FAST), ([0, 0, 1, 1], "flat")],
    ids=str,
)
def test_every_operation_of_every_dtype(ranks, hosts, plan) -> None:
    assert ranks.run(_all_operations, len(hosts), hosts, plan) == [[]] * len(hosts)


def _extremes(rank: int, world_size: int, hosts: list[int], plan: str) -> tuple[list[str], str]:
    """MIN and MAX of what is hard to compare; what differs from torch, and a digest of the bits."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, -1e-8, 3.0])
    wrong, bits = [], hashlib.sha256()
    with communicator(rank, hosts, plan=plan) as made:
        for dtype in FLOATS:
            for op, pairwise in ((MIN, torch.minimum), (MAX, torch.maximum)):
                parts = []
                for r in range(world_size):
                    drawn = torch.Generator().manual_seed(r)
                    parts.append(special[torch.randint(7, (5001,), generator=drawn)].to(dtype))
                expected = parts[0]
                for part in parts[1:]:
                    expected = pairwise(expected, part)
                result = made.all_reduce_sync(parts[rank].clone(), op)
                bits.update(result.view(torch.uint8).numpy().tobytes())
                if not torch.equal(result.nan_to_num(7.5), expected.nan_to_num(7.5)):
                    wrong.append(f"{dtype} {op}")
    return wrong, bits.hexdigest()


def test_the_least_and_the_largest_are_torchs_also_with_nans(ranks) -> None:
    """Gloo loses a NaN in half of the places."""
    digests = set()
    for hosts in ([0, 0, 1, 1], [0, 1, 0, 2], [0, 0, 0, 0]):
        results = ranks.run(_extremes, 4, hosts, FAST)
        assert all(wrong == [] for wrong, _ in results)
        digests |= {digest for _, digest in results}
    assert len(digests) == 1
    results = ranks.run(_extremes, 4, [0, 0, 1, 1], "flat")
    assert all(result == ([], results[0][1]) for result in results)


def _mixed_operations(rank: int, world_size: int) -> str:
    try:
        with communicator(rank, blocks(2, 2), plan=FAST) as made:
            made.all_reduce(torch.ones(100_000), MAX if rank == 2 else MIN).wait()
    except ExecutionError as error:
        return str(error)
    return "no error"


def test_different_operations_are_an_error_on_every_rank(ranks) -> None:
    for text in ranks.run(_mixed_operations, 4):
        assert "another size, dtype, operation or plan" in text


def _wrapped_operation(rank: int, world_size: int) -> list[object]:
    """Options of torch's own backends hold operations in another class."""
    options = dist.AllreduceOptions()
    options.reduceOp = MAX
    with communicator(rank, [0, 1], plan=FAST) as made:
        most = made.all_reduce(torch.tensor([rank]), options.reduceOp).wait()
        turned = made.all_reduce(torch.full((3,), 2 + rank * 2j), AVG).wait()
        return [int(most), turned.tolist()]


def test_operations_in_torchs_other_class_and_averages_of_complex_numbers(ranks) -> None:
    assert ranks.run(_wrapped_operation, 2) == [[1, [2 + 1j] * 3]] * 2


def _small_whole_numbers(rank: int, world_size: int, dtype: torch.dtype) -> tuple[int, str]:
    value = [1, 2, 2, 3][rank]
    with communicator(rank, blocks(2, 2), plan=FAST) as made:
        try:
            made.all_reduce(torch.tensor([value], dtype=dtype), AVG)
            refused = ""
        except ValueError as error:
            refused = str(error)
        assert int(made.all_reduce_sync(torch.tensor([value], dtype=dtype), SUM)) == 8
        with pytest.raises(ValueError, match="AVG of .* is not defined"):
            topo_ar.all_reduce(torch.tensor([value], dtype=dtype), AVG)
        with api.communicator():
            return int(topo_ar.all_reduce(torch.tensor([value], dtype=dtype))), refused


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_averages_of_integers_are_refused_and_not_truncated_twice(ranks, dtype) -> None:
    """R05."""
    refusal = f"AVG of {dtype} is not defined; use SUM and divide"
    assert ranks.run(_small_whole_numbers, 4, dtype) == [(8, refusal)] * 4
