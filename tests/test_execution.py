import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.jobs import blocks, communicator, lag, wrong_under_delays
from topo_ar.errors import ExecutionError

SHAPES = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (4, 2), (4, 1), (8, 1)]
DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 7, 1000, 65_537, 700_001]


def _integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(dtype)


def _sums_are_exact(rank: int, world_size: int, hosts: list[int]) -> list[str]:
    wrong = []
    with communicator(rank, hosts, plan="hierarchical") as made:
        pending = []
        for dtype in DTYPES:
            for numel in SIZES:
                tensor = _integers(rank, numel, dtype)
                expected = sum(_integers(r, numel, dtype).double() for r in range(world_size))
                pending.append((tensor, expected.to(dtype), made.all_reduce(tensor)))
        for tensor, expected, future in pending:
            future.wait()
            if not torch.equal(tensor, expected):
                wrong.append(f"{tensor.dtype} {tensor.numel()}")
        families = {prepared.plan.family for prepared in made._plans._kept.values()}
        if len(hosts) > 1 and all(str(f) == "flat_ring" for f in families):
            wrong.append("only the plain path ran")
    return wrong


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_integer_sums_are_exact_for_every_dtype_and_size(ranks, shape) -> None:
    hosts = blocks(*shape)
    assert ranks.run(_sums_are_exact, len(hosts), hosts) == [[]] * len(hosts)


def test_ranks_dealt_round_robin_form_their_nodes(ranks) -> None:
    assert ranks.run(_sums_are_exact, 4, [0, 1, 0, 1]) == [[]] * 4


def _nodes(rank: int, world_size: int, hosts: list[int]) -> tuple[tuple[int, ...], ...]:
    with communicator(rank, hosts) as made:
        return made.nodes


def test_nodes_come_from_the_handshake(ranks) -> None:
    assert ranks.run(_nodes, 4, [0, 1, 0, 1]) == [((0, 2), (1, 3))] * 4
    assert ranks.run(_nodes, 3, [5, 5, 5]) == [((0, 1, 2),)] * 3


def _same_bits(rank: int, world_size: int, hosts: list[int]) -> list[bytes]:
    found = []
    with communicator(rank, hosts, plan="hierarchical") as made:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                generator = torch.Generator().manual_seed(rank)
                tensor = torch.randn(300_000, generator=generator).to(dtype)
                made.all_reduce(tensor, op).wait()
                found.append(tensor.view(torch.uint8).numpy().tobytes())
    return found


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (4, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_all_ranks_end_with_the_same_bits(ranks, shape) -> None:
    hosts = blocks(*shape)
    results = ranks.run(_same_bits, len(hosts), hosts)
    assert all(result == results[0] for result in results)
    total = sum(
        torch.randn(300_000, generator=torch.Generator().manual_seed(r)).double()
        for r in range(len(hosts))
    )
    got = torch.frombuffer(bytearray(results[0][0]), dtype=torch.float32).double()
    # Seven roundings at most, each of half a unit in the last place of a partial sum below 32.
    assert (got - total).abs().max() < 7 * 2**-20
    average = torch.frombuffer(bytearray(results[0][5]), dtype=torch.bfloat16).double()
    assert (average - total / len(hosts)).abs().max() < 2 * 2**-8 * 4


def _half_averages(rank: int, world_size: int, hosts: list[int]) -> float:
    with communicator(rank, hosts, plan="hierarchical") as made:
        tensor = torch.full((1000,), 60_000.0, dtype=torch.float16)
        made.all_reduce(tensor, dist.ReduceOp.AVG).wait()
        return float(tensor.unique())


def test_a_half_precision_average_does_not_overflow(ranks) -> None:
    assert ranks.run(_half_averages, 8, blocks(2, 4)) == [60_000.0] * 8


def _many_under_delays(rank: int, world_size: int, hosts: list[int]) -> int:
    return wrong_under_delays(rank, hosts, 200, (4000, 9000, 4000, 70_000))


def test_two_hundred_steps_under_random_delays_are_right(ranks) -> None:
    assert ranks.run(_many_under_delays, 4, blocks(2, 2)) == [0] * 4


def _lagging(rank: int, world_size: int, hosts: list[int]) -> int:
    """Rank 0's bytes leave late: its results are unsent long after the node has copied them out."""
    wrong = 0
    with communicator(rank, hosts, plan="hierarchical") as made:
        if rank == 0:
            lag(made)
        patterns = [torch.arange(numel) % 1000 for numel in (60_000, 300_000, 1_000_000)]
        futures = [made.all_reduce((pattern + rank).float()) for pattern in patterns]
        for pattern, future in zip(patterns, futures, strict=True):
            expected = pattern * world_size + sum(range(world_size))
            wrong += int((future.wait() != expected).sum())
    return wrong


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 2]], ids=str)
def test_results_that_are_still_to_be_sent_are_not_written_over(ranks, hosts) -> None:
    assert ranks.run(_lagging, len(hosts), hosts) == [0] * len(hosts)


def _chained(rank: int, world_size: int) -> int:
    """The design that the package avoids: stages chained on futures of gloo groups."""
    intra = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    inter = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    random.seed(rank)
    wrong = 0
    for iteration in range(30):
        buckets = [torch.full((4000,), float(rank + iteration + 10 * i)) for i in range(6)]
        finals = []
        for bucket in buckets:
            time.sleep(random.random() * 0.001)
            half = bucket[(rank % 2) * 2000 : (rank % 2 + 1) * 2000]

            def second(_: object, half: torch.Tensor = half) -> object:
                return dist.all_reduce(half, group=inter, async_op=True).get_future().wait()

            first = dist.all_reduce(bucket, group=intra, async_op=True).get_future()
            finals.append((first.then(second), half))
        for i, (future, half) in enumerate(finals):
            future.wait()
            expected = sum(r + iteration + 10 * i for r in range(world_size))
            wrong += int(not torch.equal(half, torch.full_like(half, expected)))
    return wrong


def test_chained_futures_are_wrong_where_tickets_are_right(ranks) -> None:
    """Negative control: the hazard is real on this machine, so the test above can find it."""
    wrong = ranks.run(_chained, 4, deadline_s=30.0)
    assert sum(wrong) > 0


def _mismatch(rank: int, world_size: int, hosts: list[int]) -> str:
    try:
        with communicator(rank, hosts, plan="hierarchical") as made:
            made.all_reduce(torch.zeros(100_000 + 64 * (rank == 3))).wait()
    except ExecutionError as error:
        return str(error)
    return "no error"


def test_different_sizes_are_an_error_on_every_rank(ranks) -> None:
    for text in ranks.run(_mismatch, 4, blocks(2, 2)):
        assert "another size, dtype, operation or plan" in text


def _refusals(rank: int, world_size: int) -> list[str]:
    texts = []
    with communicator(rank, [0] * world_size) as made:
        for tensor, op in (
            (torch.zeros(4, 4)[:, 0], dist.ReduceOp.SUM),
            (torch.zeros(4, dtype=torch.int64), dist.ReduceOp.AVG),
        ):
            try:
                made.all_reduce(tensor, op)
            except ValueError as error:
                texts.append(str(error))
    return texts


def test_what_cannot_be_right_is_refused_before_anything_is_sent(ranks) -> None:
    for texts in ranks.run(_refusals, 2):
        assert "contiguous" in texts[0]
        assert "AVG of torch.int64" in texts[1]


def _plain_kinds(rank: int, world_size: int, hosts: list[int]) -> list[object]:
    with communicator(rank, hosts) as made:
        flag = torch.tensor([rank == 0])
        most = torch.tensor([float(rank)])
        made.all_reduce(flag, dist.ReduceOp.BOR).wait()
        made.all_reduce(most, dist.ReduceOp.MAX).wait()
        total = torch.full((5000,), float(rank))
        made.all_reduce(total).wait()
        return [bool(flag), float(most), float(total.unique()), made.plain_reason]


def test_other_operations_take_the_plain_path_in_order(ranks) -> None:
    assert ranks.run(_plain_kinds, 4, blocks(2, 2)) == [[True, 3.0, 6.0, None]] * 4


def test_other_operations_take_the_plain_path_on_uneven_nodes(ranks) -> None:
    assert ranks.run(_plain_kinds, 3, [0, 0, 1]) == [[True, 2.0, 3.0, None]] * 3


def _sync_mixed(rank: int, world_size: int, hosts: list[int]) -> int:
    """Calls that the caller drives itself, between and among calls that the thread drives."""
    random.seed(rank)
    wrong = 0
    with communicator(rank, hosts, plan="hierarchical") as made:
        for iteration in range(60):
            first = torch.full((3000 + 50_000 * (iteration % 3),), float(rank))
            second = torch.full((100,), float(rank + 1))
            third = torch.full((70_000,), float(rank + 2))
            if random.random() < 0.2:
                time.sleep(random.random() * 0.002)
            made.all_reduce_sync(first)
            future = made.all_reduce(second)
            made.all_reduce_sync(third)
            future.wait()
            total = sum(range(world_size))
            for tensor, more in ((first, 0), (second, 1), (third, 2)):
                expected = torch.full_like(tensor, total + more * world_size)
                wrong += int(not torch.equal(tensor, expected))
    return wrong


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 0]], ids=str)
def test_calls_driven_by_the_caller_keep_the_order(ranks, hosts) -> None:
    assert ranks.run(_sync_mixed, 4, hosts) == [0] * 4


def _copied_in(rank: int, world_size: int, hosts: list[int]) -> list[int]:
    numel = 250_000
    with communicator(rank, hosts, plan="hierarchical") as made:
        made.all_reduce_sync(torch.full((numel,), rank + 1, dtype=torch.int32))
        slot = made._job.node.owned.segment.staging(0)[: 4 * numel].view(np.int32)
        return [int(np.count_nonzero(part)) for part in np.split(slot, world_size)]


def test_a_rank_copies_in_what_others_reduce_and_reads_the_rest_where_it_lies(ranks) -> None:
    found = ranks.run(_copied_in, 2, blocks(1, 2))
    assert found == [[0, 125_000], [125_000, 0]]


def _recut(rank: int, world_size: int, hosts: list[int]) -> list[str]:
    """Sizes and dtypes whose chunks share slots, in turn: views of one must not serve another."""
    wrong = []
    with communicator(rank, hosts, plan="hierarchical") as made:
        for step in range(40):
            dtype = (torch.float32, torch.int32, torch.float64)[step % 3]
            numel = 60_000 + 512 * (step % 5)
            tensor = _integers(rank + step, numel, dtype)
            expected = sum(_integers(r + step, numel, dtype) for r in range(world_size))
            if not torch.equal(made.all_reduce_sync(tensor), expected):
                wrong.append(f"{dtype} {numel}")
    return wrong


@pytest.mark.parametrize("hosts", [blocks(1, 3), blocks(2, 2)], ids=str)
def test_sizes_and_dtypes_take_turns_in_the_same_slots(ranks, hosts) -> None:
    assert ranks.run(_recut, len(hosts), hosts) == [[]] * len(hosts)
