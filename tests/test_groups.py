"""Groups of a running job against what each member can work out alone, and when a member dies."""

import random
import signal
import time

import pytest
import torch

from tests.jobs import blocks, communicator
from tests.ranks import tell
from topo_ar.errors import ConfigError, ExecutionError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8)
# Up to some rounds of shared memory, which is 3 MiB a round.
NUMELS = (0, 1, 2, 3, 7, 130, 1000, 300_001)
LARGE = 1_700_003


def _tensor(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 20, (numel,), generator=generator).to(dtype)


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = total + tensor.to(wide)
    return total


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def _members(made, rank: int):
    mine = next(node for node in made.nodes if rank in node)
    at = mine.index(rank)
    return mine, tuple(node[at] for node in made.nodes)


def _one_group(group, members, choices, seed: int) -> int:
    """Do one operation of a group and return how many results are wrong."""
    op, numel, dtype = choices
    mine = members[group.index]
    if op == "all_reduce":
        tensors = [_tensor(seed + m, numel, dtype) for m in members]
        ours = group.all_reduce(tensors[group.index])
        return int(not _same(ours, _sum(tensors).to(dtype)))
    if op == "all_gather":
        # Other lengths on other members.
        lengths = {m: numel * (m % 3) // 2 + m for m in members}
        found = group.all_gather(_tensor(seed + mine, lengths[mine], dtype))
        return sum(
            not _same(found[i], _tensor(seed + m, lengths[m], dtype)) for i, m in enumerate(members)
        )
    lengths = {(a, b): (numel * ((a + 2 * b) % 3)) // 2 for a in members for b in members}
    parts = [_tensor(seed + mine * 31 + m, lengths[mine, m], dtype) for m in members]
    found = group.all_to_all(parts)
    return sum(
        not _same(found[i], _tensor(seed + m * 31 + mine, lengths[m, mine], dtype))
        for i, m in enumerate(members)
    )


def _laws(rank: int, world_size: int, hosts: list[int], rounds: int) -> int:
    choose = random.Random(0)  # the same on all ranks
    delays = random.Random(rank)
    wrong = []
    with communicator(rank, hosts, plan="hierarchical") as made:
        node_members, rail_members = _members(made, rank)
        for number in range(rounds):
            steps = [
                (
                    choose.random() < 0.5,
                    choose.choice(["all_reduce", "all_gather", "all_to_all"]),
                    choose.choice(NUMELS),
                    choose.choice(DTYPES),
                )
                for _ in range(4)
            ]

            def work(node, rail, steps=steps, number=number):
                for i, (inside, *choices) in enumerate(steps):
                    if delays.random() < 0.1:
                        time.sleep(delays.random() * 0.003)
                    group, members = (node, node_members) if inside else (rail, rail_members)
                    wrong.append(_one_group(group, members, choices, 100 * number + i))

            # Chunks of the pipeline before and after, in the same memory and on the same flows.
            before = torch.full((200_000,), float(rank))
            after = torch.full((200_000,), float(rank + number))
            futures = [
                made.all_reduce(before),
                made.run(before, work, number),
                made.all_reduce(after),
            ]
            for future in futures:
                future.wait()
            wrong.append(int(not (before == sum(range(world_size))).all()))
            expected = sum(range(world_size)) + world_size * number
            wrong.append(int(not (after == expected).all()))
    assert len(wrong) == 6 * rounds
    return sum(wrong)


@pytest.mark.parametrize(
    "hosts", [blocks(2, 2), [0, 1, 0, 1], [0, 1, 2], blocks(1, 4), blocks(2, 4)], ids=str
)
def test_operations_return_what_the_members_gave(ranks, hosts) -> None:
    assert ranks.run(_laws, len(hosts), hosts, 12) == [0] * len(hosts)


def _scatters(rank: int, world_size: int, hosts: list[int]) -> list[bool]:
    found = []
    with communicator(rank, hosts, plan="hierarchical") as made:
        members, _ = _members(made, rank)

        def work(node, rail):
            for seed, (numel, dtype) in enumerate(
                [
                    (0, torch.float32),
                    (5, torch.float32),
                    (LARGE, torch.float32),
                    (LARGE, torch.bfloat16),
                    (LARGE // 3, torch.float64),
                ]
            ):
                cuts = sorted(random.Random(seed).choices(range(numel + 1), k=node.size - 1))
                bounds = [0, *cuts, numel]
                buffers = [_tensor(seed * 100 + m, numel, dtype) for m in members]
                mine = slice(bounds[node.index], bounds[node.index + 1])
                shard = node.reduce_scatter(buffers[node.index], bounds)
                found.append(_same(shard, _sum([b[mine] for b in buffers])))
                whole = torch.zeros(numel, dtype=dtype)
                node.all_gather_into(whole, bounds, buffers[node.index][mine])
                expected = torch.cat(
                    [b[x:y] for b, x, y in zip(buffers, bounds, bounds[1:], strict=False)]
                )
                found.append(_same(whole, expected))

        made.run(torch.empty(0), work, 0).wait()
    return found


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1, 1, 1], [0, 1]], ids=str)
def test_shards_of_a_node_are_exact_and_come_back_together(ranks, hosts) -> None:
    for found in ranks.run(_scatters, len(hosts), hosts):
        assert found == [True] * 10


def _counts(rank: int, world_size: int, hosts: list[int]) -> list[int]:
    sent = []
    with communicator(rank, hosts, plan="hierarchical") as made:

        def work(node, rail):
            for do in (
                lambda: rail.all_reduce(torch.ones(3000)),
                lambda: rail.all_gather(torch.ones(1000 + rank)),
                lambda: rail.all_to_all([torch.ones(100 * i) for i in range(rail.size)]),
                lambda: node.all_reduce(torch.ones(1000)),
            ):
                before = rail.sent_nbytes
                do()
                sent.append(rail.sent_nbytes - before)

        made.run(torch.empty(0), work, 0).wait()
    return sent


def test_bytes_are_counted(ranks) -> None:
    for rank, sent in enumerate(ranks.run(_counts, 3, [0, 1, 2])):
        to_others = sum(400 * i for i in range(3) if i != rank)
        assert sent == [16_000, 2 * 4 * (1000 + rank), to_others, 0]


def _unequal(rank: int, world_size: int, hosts: list[int]) -> str:
    with communicator(rank, hosts) as made, pytest.raises(ConfigError) as caught:
        made.run(torch.empty(0), lambda node, rail: None, 0)
    return str(caught.value)


def test_nodes_of_unequal_numbers_of_ranks_have_no_groups(ranks) -> None:
    for text in ranks.run(_unequal, 3, [0, 0, 1]):
        assert text == "there are no groups to work with: the nodes have unequal numbers of ranks"


def _forever(rank: int, world_size: int, hosts: list[int], timeout_s: float) -> dict[str, object]:
    with communicator(rank, hosts, plan="hierarchical", timeout_s=timeout_s) as made:

        def work(node, rail):
            buffer = torch.ones(1_000_000)
            bounds = [len(buffer) * i // node.size for i in range(node.size + 1)]
            for number in range(10_000):
                shard = node.reduce_scatter(buffer, bounds)
                rail.all_reduce(shard)
                node.all_gather_into(buffer, bounds, shard)
                if number == 3:
                    tell("running")

        try:
            made.run(torch.empty(0), work, 0).wait()
        except ExecutionError as error:
            tell("raised")
            return {"text": str(error), "ranks": error.ranks, "at": time.monotonic()}
    return {}


@pytest.mark.parametrize(
    ("hosts", "victim"), [(blocks(2, 2), 1), (blocks(2, 2), 2), ([0, 1, 2], 0)], ids=str
)
def test_survivors_of_a_killed_member_raise_and_name_it(ranks, hosts, victim) -> None:
    killed = []

    def on_message(run, rank, message) -> None:
        if rank == victim and not killed:
            run.kill(victim)
            killed.append(time.monotonic())

    size = len(hosts)
    outcomes = ranks.fresh(_forever, size, hosts, 30.0, deadline_s=20.0, on_message=on_message)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.exitcode == 0, outcome.error
            assert outcome.result["ranks"] == (victim,), outcome.result
            assert f"rank {victim}" in outcome.result["text"]
            assert outcome.result["at"] - killed[0] < 10


@pytest.mark.parametrize("hosts", [blocks(2, 2), [0, 1, 2]], ids=str)
def test_a_stopped_member_is_named_when_the_deadline_passes(ranks, hosts) -> None:
    raised = []

    def on_message(run, rank, message) -> None:
        if message == "raised":
            raised.append(rank)
            if len(raised) == len(hosts) - 1:
                run.kill(1)  # nothing else ends it, and the test with it
        elif rank == 1:
            run.kill(1, signal.SIGSTOP)

    size = len(hosts)
    outcomes = ranks.fresh(_forever, size, hosts, 2.0, deadline_s=30.0, on_message=on_message)
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.exitcode == 0, outcome.error
            assert "nothing moved for 2 s" in outcome.result["text"]
            assert 1 in outcome.result["ranks"]


def _differs(rank: int, world_size: int, hosts: list[int], how: str) -> str:
    with communicator(rank, hosts, plan="hierarchical", timeout_s=3.0) as made:

        def work(node, rail):
            if how == "raises" and rank == 1:
                raise RuntimeError("no memory for the codec")
            if how == "operation" and rank == 1:
                rail.all_to_all([torch.ones(10)] * rail.size)
            node.all_reduce(torch.ones(10))
            rail.all_reduce(torch.ones(10))

        fingerprint = int(how == "work" and rank == 1)
        try:
            if how == "kind" and rank == 1:
                made.all_reduce(torch.ones(100_000)).wait()
            else:
                made.run(torch.empty(0), work, fingerprint).wait()
        except ExecutionError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["work", "operation", "raises", "kind"])
@pytest.mark.parametrize("hosts", [blocks(2, 2), [0, 1, 2]], ids=str)
def test_members_that_do_something_else_end_the_job_for_all(ranks, hosts, how) -> None:
    texts = ranks.run(_differs, len(hosts), hosts, how)
    for text in texts:
        assert "rank" in text
        assert "1" in text
        if how == "raises":
            assert "no memory for the codec" in text
