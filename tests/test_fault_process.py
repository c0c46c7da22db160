"""Faults of one rank's own process: late, out of memory, forking, leaving with work in flight."""

import multiprocessing
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests import detection
from tests import fault_injection as faults
from tests.hosts import ROOT
from tests.jobs import blocks, communicator
from tests.ranks import tell
from topo_ar.errors import ExecutionError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.transports.segment import HOST_ID_ENV

SHAPES = [
    blocks(2, 2),
    pytest.param(blocks(1, 4), marks=pytest.mark.slow),
    pytest.param(blocks(4, 1), marks=pytest.mark.slow),
]


def _slow(rank: int, world_size: int, hosts: list[int], pauses: list[float]) -> dict[str, object]:
    total, begin = 0.0, 0.0
    with communicator(rank, hosts, plan="hierarchical", timeout_s=1.0) as made:
        for pause in pauses:
            begin = time.monotonic()
            if rank == 2:
                time.sleep(pause)
            try:
                total += float(made.all_reduce(torch.ones(500_000)).wait()[-1])
            except ExecutionError as error:
                took = time.monotonic() - begin
                return {"total": total, "text": str(error), "ranks": error.ranks, "took": took}
    return {"total": total, "text": ""}


@pytest.mark.parametrize("hosts", SHAPES, ids=str)
def test_a_slow_rank_is_waited_for_until_the_deadline_and_then_named(ranks, hosts) -> None:
    found = ranks.run(_slow, 4, hosts, [0.6, 0.6, 0.0, 4.0])
    for rank, row in enumerate(found):
        assert row["total"] == 12.0  # no false alarm: three calls were right
        if rank != 2:
            assert "nothing moved for 1 s" in row["text"]
            assert 2 in row["ranks"], row["text"]
            assert 0.9 < row["took"] < 3.0
        else:
            assert row["text"]  # it comes too late, and learns so
    detection.note("slow rank", hosts, max(row["took"] for row in found[:2]), 1.0)


def _short_of_memory(
    rank: int, world_size: int, hosts: list[int], spare_kb: int
) -> dict[str, object]:
    """Rank 1 may take little more when buffers for the first large tensor are wanted."""
    tensors = [torch.full((1_000_000,), float(rank + i)) for i in range(3)]
    with communicator(rank, hosts, plan="hierarchical", timeout_s=8.0) as made:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        if rank == 1:
            status = Path("/proc/self/status").read_text()
            (kilobytes,) = re.findall(r"VmData:\s+(\d+) kB", status)
            resource.setrlimit(resource.RLIMIT_DATA, (int(kilobytes) + spare_kb << 10, before[1]))
        text = ""
        try:
            for tensor in tensors:
                made.all_reduce(tensor).wait()
        except ExecutionError as error:
            text = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
        expected = [float(sum(range(world_size)) + world_size * i) for i in range(3)]
        right = [bool((t == e).all()) for t, e in zip(tensors, expected, strict=True)]
        return {"text": text, "right": right, "fallbacks": made.fallbacks, "why": made.plain_reason}


@pytest.mark.parametrize("spare_kb", [0, pytest.param(500, marks=pytest.mark.slow), 1500])
@pytest.mark.parametrize(
    "hosts", [blocks(2, 2), pytest.param(blocks(4, 1), marks=pytest.mark.slow)], ids=str
)
def test_a_rank_out_of_memory_is_survived_or_ends_the_job_everywhere(
    ranks, hosts, spare_kb
) -> None:
    outcomes = ranks.fresh(_short_of_memory, 4, hosts, spare_kb, deadline_s=30.0)
    assert not any(outcome.hung for outcome in outcomes), outcomes
    if outcomes[1].result is None:  # the C++ runtime ends a process that cannot even raise
        outcomes.pop(1)
    found = [outcome.result for outcome in outcomes]
    assert len({bool(row["text"]) for row in found}) == 1, found
    for row in found:
        if row["text"]:
            assert "rank 1" in row["text"], row
            assert "emory" in row["text"] or "rank 1 ended" in row["text"], row
        else:
            assert row["right"] == [True] * 3
            assert row["fallbacks"] == 1
            assert "rank 1" in row["why"]
            assert "MemoryError" in row["why"]


def _with_data_loaders(rank: int, world_size: int, hosts: list[int], falls: bool) -> list[object]:
    """Workers are forked, and used, while all-reduces fly."""
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    data = DataLoader(
        TensorDataset(torch.arange(24.0)),
        batch_size=4,
        num_workers=2,
        multiprocessing_context="fork",
    )
    wrong = 0
    with communicator(rank, hosts, plan="hierarchical", timeout_s=15.0) as made:
        if falls and rank == 1:
            faults.before_chunk(made, "_reduce", 4, faults.fails(MemoryError))
        for epoch in range(3):
            flying = [made.all_reduce(torch.full((1_000_000,), float(epoch))) for _ in range(2)]
            seen = 0.0
            for (values,) in data:
                flying.append(made.all_reduce(torch.ones(100_000)))
                seen += float(values.sum())
            wrong += seen != 276.0
            for i, future in enumerate(flying):
                wrong += not bool((future.wait() == world_size * (epoch if i < 2 else 1)).all())
        return [wrong, made.fallbacks]


@pytest.mark.parametrize(
    "falls",
    [
        pytest.param(False, id="whole", marks=pytest.mark.slow),
        pytest.param(True, id="falling back"),
    ],
)
def test_data_loaders_fork_while_collectives_fly(ranks, falls) -> None:
    outcomes = ranks.fresh(_with_data_loaders, 4, blocks(2, 2), falls, deadline_s=40.0)
    assert [outcome.result for outcome in outcomes] == [[0, int(falls)]] * 4, outcomes


def _forks_while_falling_back(rank: int, world_size: int, hosts: list[int]) -> list[object]:
    children: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        children.append(pid)

    with communicator(rank, hosts, plan="hierarchical", timeout_s=15.0) as made:
        if rank == 1:
            faults.before_chunk(made, "_add", 2, faults.fails(MemoryError))
            agree = made._loop._recovery.agree

            def forks(**options: object) -> bool:
                fork()
                agreed = agree(**options)
                fork()
                return bool(agreed)

            made._loop._recovery.agree = forks
        flying = [made.all_reduce(torch.ones(700_000)) for _ in range(4)]
        while not all(future.done() for future in flying) and len(children) < 10:
            fork()  # from the other thread
        totals = {float(future.wait()[-1]) for future in flying}
        found = [totals, made.fallbacks]
    codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children}
    return [*found, codes]


def test_forks_in_the_middle_of_a_fallback_harm_nobody(ranks) -> None:
    outcomes = ranks.fresh(_forks_while_falling_back, 4, blocks(2, 2), deadline_s=30.0)
    assert [outcome.result for outcome in outcomes] == [[{4.0}, 1, {0}]] * 4, outcomes


def _leaves(rank: int, world_size: int, hosts: list[int], how: str) -> dict[str, object]:
    os.environ[HOST_ID_ENV] = str(hosts[rank])
    made = Communicator(plan="hierarchical", timeout_s=10.0)
    made.all_reduce(torch.ones(1000)).wait()
    flying = [made.all_reduce(torch.ones(1_000_000)) for _ in range(3)]
    begin = time.monotonic()
    if rank == 1:
        tell(("leaving", begin))
        if how == "sys.exit":
            sys.exit(7)
        if how == "exception":
            raise RuntimeError("the training failed")
        if how == "os._exit":
            os._exit(7)
    try:
        while True:
            flying.append(made.all_reduce(torch.ones(1_000_000)))
            flying.pop(0).wait()
    except ExecutionError as error:
        return {"at": time.monotonic(), "text": str(error), "ranks": error.ranks}


@pytest.mark.parametrize("how", ["sys.exit", "exception", "os._exit"])
@pytest.mark.parametrize("hosts", SHAPES, ids=str)
def test_a_rank_that_exits_with_work_in_flight_is_named_in_time(ranks, hosts, how) -> None:
    left = []

    def on_message(run: object, rank: int, message: tuple[str, float]) -> None:
        left.append(message[1])

    outcomes = ranks.fresh(_leaves, 4, hosts, how, deadline_s=20.0, on_message=on_message)
    assert not any(outcome.hung for outcome in outcomes), outcomes
    assert outcomes[1].exitcode == (7 if how == "os._exit" else 1)
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.exitcode == 0, outcome.error
            assert 1 in outcome.result["ranks"], outcome.result["text"]
            assert "rank 1" in outcome.result["text"]
            assert outcome.result["at"] - left[0] < 6.0
    last = max(outcome.result["at"] for outcome in outcomes if outcome.rank != 1)
    detection.note(f"exit by {how}", hosts, last - left[0], 10.0)


def _all_leave(rank: int, world_size: int, hosts: list[int]) -> bool:
    os.environ[HOST_ID_ENV] = str(hosts[rank])
    made = Communicator(plan="hierarchical", timeout_s=10.0)
    if rank == 2:
        time.sleep(0.3)
    for _ in range(3):
        made.all_reduce(torch.ones(1_000_000))
    return True


def test_all_may_exit_with_work_in_flight(ranks) -> None:
    begin = time.monotonic()
    outcomes = ranks.fresh(_all_leave, 4, blocks(2, 2), deadline_s=20.0)
    assert [(outcome.exitcode, outcome.result) for outcome in outcomes] == [(0, True)] * 4
    assert time.monotonic() - begin < 12.0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_torchrun_restarts_a_job_on_the_same_ports(tmp_path) -> None:
    """A rank is killed in the first life; the second one resumes and meets nothing of the first.

    The store of torchrun's agent, which torch 2.13 shares between lives, is none for gloo: its own
    `init_process_group` meets the addresses of the dead there.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--max-restarts=1"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29677", "--monitor-interval=0.1"),
        *("-m", "tests.restarted_worker", str(tmp_path)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    for _ in range(2):  # and once more, another job on the ports of this one
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lives = sorted(path.read_text() for path in tmp_path.glob("rank*"))
        assert lives == ["life 1 from step 5: 20 steps right"] * 4, lives
        for path in tmp_path.iterdir():
            path.unlink()
