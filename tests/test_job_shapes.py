"""Tensors and jobs at the edges: more than 2 GiB, sixteen ranks, groups of some of the ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.jobs import blocks, communicator
from tests.ranks import RankPool
from tests.reductions import SUM, in_fixed_order, reference, whole_numbers

GIB = 1 << 30


def _beyond(rank: int, world_size: int, hosts: list[int], dtype: torch.dtype, plan: str) -> str:
    """Ones and twos but for some marked elements, so that no second tensor is needed to compare."""
    numel = 2 * GIB // dtype.itemsize + 13
    marks = [0, 1, numel // 2, numel - 14, numel - 13, numel - 12, numel - 1]
    tensor = torch.full((numel,), rank + 1, dtype=dtype)
    for place, mark in enumerate(marks):
        tensor[mark] = 10 * place + rank
    with communicator(rank, hosts, plan=plan, timeout_s=100.0) as made:
        made.all_reduce_sync(tensor)
    found = [int(tensor[mark]) for mark in marks]
    tensor[marks] = 3
    if found != [20 * place + 1 for place in range(len(marks))]:
        return f"marked elements: {found}"
    low, high = tensor.aminmax()
    return f"{int(low)} to {int(high)}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hosts", "dtype", "plan"),
    [
        ([0, 0], torch.int8, "hierarchical"),
        ([0, 1], torch.int8, "hierarchical"),
        ([0, 1], torch.float32, "hierarchical"),
        ([0, 1], torch.uint8, "flat"),
    ],
    ids=str,
)
def test_more_than_two_gibibytes(hosts, dtype, plan) -> None:
    pool = RankPool()  # what a rank has used up stays with it
    try:
        assert pool.run(_beyond, 2, hosts, dtype, plan, deadline_s=200.0) == ["3 to 3"] * 2
    finally:
        pool.close()


def _right(rank: int, world_size: int, hosts: list[int]) -> list[str]:
    wrong = []
    with communicator(rank, hosts, plan="hierarchical", reproducible=True) as made:
        for numel in (0, 1, 15, 17, 70_001):
            for dtype in (torch.float32, torch.int8):
                parts = [whole_numbers(r, world_size, numel, dtype, SUM) for r in range(world_size)]
                if not torch.equal(
                    made.all_reduce(parts[rank].clone()).wait(), reference(parts, SUM)
                ):
                    wrong.append(f"{numel} {dtype}")
            spread = [
                torch.randn(numel, generator=torch.Generator().manual_seed(r))
                for r in range(world_size)
            ]
            if not torch.equal(
                made.all_reduce_sync(spread[rank].clone()), in_fixed_order(spread, SUM)
            ):
                wrong.append(f"bits of {numel}")
    return wrong


@pytest.fixture(scope="module")
def sixteen() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "hosts",
    [
        blocks(1, 16),
        blocks(2, 8),
        blocks(4, 4),
        blocks(8, 2),
        blocks(16, 1),
        [rank % 4 for rank in range(16)],
        [0] * 9 + [1],
        [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4],
        [0, 3, 1, 2, 0, 0, 1, 3, 3, 0, 2, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2],
    ],
    ids=str,
)
def test_jobs_of_up_to_sixteen_ranks(sixteen, hosts) -> None:
    assert sixteen.run(_right, len(hosts), hosts, deadline_s=50.0) == [[]] * len(hosts)


GROUPS = ((0, 1, 2, 3), (2, 3, 4), (0, 5), (1, 4, 5), (4,))


def _overlapping(rank: int, world_size: int, hosts: list[int]) -> list[float]:
    """Communicators that share ranks, each made by its own ranks alone, all at work at once."""
    groups = [dist.new_group(list(members)) for members in GROUPS]
    made, futures = {}, []
    for at, (members, group) in enumerate(zip(GROUPS, groups, strict=True)):
        if rank in members:
            own = [hosts[member] for member in members]
            made[at] = communicator(members.index(rank), own, group=group, plan="hierarchical")
    opened = {at: each.__enter__() for at, each in made.items()}
    for step in range(20):
        # Each rank goes through its groups in an order of its own.
        for at in sorted(opened, key=lambda at: (at * (rank + step)) % 7):
            tensor = torch.full((3000 * (at + 1) + step,), float(10**at * (rank + 1)))
            futures.append((at, opened[at].all_reduce(tensor)))
    wrong = 0
    for at, future in futures:
        expected = 10**at * sum(member + 1 for member in GROUPS[at])
        wrong += int(not bool((future.wait() == expected).all()))
    for each in reversed(made.values()):
        each.__exit__(None, None, None)
    return [float(wrong), float(len(futures))]


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]], ids=str)
def test_overlapping_groups_at_work_at_once(ranks, hosts) -> None:
    counts = [20.0 * sum(rank in members for members in GROUPS) for rank in range(6)]
    assert ranks.run(_overlapping, 6, hosts) == [[0.0, count] for count in counts]


def _alone(rank: int, world_size: int) -> float:
    """A communicator of two of four ranks; the others know nothing of it."""
    if rank not in (1, 3):
        return 0.0
    group = dist.new_group([1, 3], use_local_synchronization=True)
    with communicator([1, 3].index(rank), [0, 1], group=group) as made:
        return float(made.all_reduce_sync(torch.full((999,), float(rank))).unique())


def test_a_group_that_only_its_own_ranks_make(ranks) -> None:
    assert ranks.run(_alone, 4) == [0.0, 4.0, 0.0, 4.0]
