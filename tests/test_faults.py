import os
import signal
import time

import pytest
import torch

from tests import detection
from tests.jobs import blocks, communicator
from tests.ranks import tell
from topo_ar.errors import ExecutionError
from topo_ar.planning.schedule import Stage

STAGES = {str(stage) for stage in Stage}


def _loop(rank: int, world_size: int, hosts: list[int], timeout_s: float) -> dict[str, object]:
    with communicator(rank, hosts, plan="hierarchical", timeout_s=timeout_s) as made:
        try:
            for iteration in range(10_000):
                made.all_reduce(torch.ones(1_000_000)).wait()
                if iteration == 5:
                    tell("running")
        except ExecutionError as error:
            failed_at = time.monotonic()
            tell("failed")
            try:
                made.all_reduce(torch.ones(10)).wait()
            except ExecutionError as again:
                return {
                    "text": str(error),
                    "ranks": error.ranks,
                    "stage": error.stage,
                    "at": failed_at,
                    "again": str(again),
                }
    return {}


@pytest.mark.parametrize(
    ("hosts", "victim"),
    [
        (blocks(2, 4), 1),
        (blocks(2, 4), 6),
        ([0, 0, 0, 0, 1, 1, 1, 2], 0),
        ([0, 0, 0, 0, 1, 1, 1, 2], 7),
    ],
    ids=str,
)
def test_survivors_of_a_killed_rank_raise_and_name_it(ranks, hosts, victim) -> None:
    killed = []

    def on_message(run, rank, message) -> None:
        if rank == victim and message == "running":
            run.kill(victim)
            killed.append(time.monotonic())

    outcomes = ranks.fresh(_loop, 8, hosts, 30.0, deadline_s=25.0, on_message=on_message)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert outcome.exitcode == 0, outcome.error
        found = outcome.result
        assert f"rank {victim}" in found["text"]
        assert victim in found["ranks"]
        assert found["stage"] in STAGES
        assert found["stage"] in found["text"]
        assert found["again"] == found["text"]
        # Seen from the closed sockets and the ended process, long before the 30 s deadline.
        assert found["at"] - killed[0] < 10.0
    last = max(outcome.result["at"] for outcome in outcomes if outcome.rank != victim)
    detection.note("killed rank", hosts, last - killed[0], 30.0)


def test_a_stopped_rank_is_named_when_the_deadline_passes(ranks) -> None:
    failed = set()
    stopped: list[float] = []

    def on_message(run, rank, message) -> None:
        if message == "failed":
            failed.add(rank)
        elif rank == 2:
            run.kill(2, signal.SIGSTOP)
            stopped.append(time.monotonic())
        if len(failed) == 3:
            run.kill(2)

    outcomes = ranks.fresh(_loop, 4, blocks(2, 2), 1.5, deadline_s=20.0, on_message=on_message)
    assert failed == {0, 1, 3}
    for outcome in outcomes:
        if outcome.rank != 2:
            assert outcome.exitcode == 0, outcome.error
            assert "nothing moved for 1.5 s" in outcome.result["text"]
            assert 2 in outcome.result["ranks"]
    last = max(outcome.result["at"] for outcome in outcomes if outcome.rank != 2)
    detection.note("stopped rank", [0, 0, 1, 1], last - stopped[0], 1.5)


def _leave_early(rank: int, world_size: int, hosts: list[int]) -> str:
    with communicator(rank, hosts, plan="hierarchical") as made:
        made.all_reduce(torch.ones(100)).wait()
        if rank == 1:
            return "left"
        try:
            made.all_reduce(torch.ones(100_000)).wait()
        except ExecutionError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 0]], ids=str)
def test_a_rank_that_closes_early_is_named(ranks, hosts) -> None:
    texts = ranks.run(_leave_early, 4, hosts)
    assert texts[1] == "left"
    for text in (texts[0], texts[2], texts[3]):
        assert "rank 1" in text


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _create_and_close(rank: int, world_size: int, hosts: list[int]) -> tuple[int, int]:
    counts = []
    for _ in range(6):
        with communicator(rank, hosts, plan="hierarchical") as made:
            made.all_reduce(torch.ones(5000)).wait()
        counts.append(_open_files())
    return counts[1], counts[-1]


def test_closing_releases_every_descriptor(ranks) -> None:
    for early, late in ranks.run(_create_and_close, 4, blocks(2, 2)):
        assert late <= early


def _forked_child_lives_on(rank: int, world_size: int, hosts: list[int]) -> dict[str, object]:
    with communicator(rank, hosts, plan="hierarchical", timeout_s=30.0) as made:
        made.all_reduce(torch.ones(1000)).wait()
        if rank == 3 and os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        made.all_reduce(torch.ones(1000)).wait()
        tell("forked")
        begin = time.monotonic()
        try:
            made.all_reduce(torch.ones(1000)).wait()
            if rank == 3:
                time.sleep(3.5)
            made.all_reduce(torch.ones(1000)).wait()
        except ExecutionError as error:
            return {"ranks": error.ranks, "seconds": time.monotonic() - begin}
    return {}


def test_a_forked_worker_does_not_hide_its_parents_death(ranks) -> None:
    def on_message(run, rank, message) -> None:
        if rank == 3:
            time.sleep(0.5)
            run.kill(3)

    outcomes = ranks.fresh(
        _forked_child_lives_on, 4, blocks(2, 2), deadline_s=15.0, on_message=on_message
    )
    for outcome in outcomes[:3]:
        assert outcome.exitcode == 0, outcome.error
        assert 3 in outcome.result["ranks"]
        assert outcome.result["seconds"] < 3.0
