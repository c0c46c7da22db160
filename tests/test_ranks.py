import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks as module
from tests.ranks import RanksFailedError, tell


def reduced(rank, world_size, value):
    tensor = torch.full((3,), float(value + rank))
    dist.all_reduce(tensor)
    return tensor


def environment(rank, world_size):
    return {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "TOPO_AR_PROBE")}


def process_id(rank, world_size):
    return os.getpid(), os.getppid(), dist.is_initialized(), torch.get_num_threads()


def one_fails(rank, world_size):
    dist.barrier()  # a rank that leaves while others still connect fails them too
    if rank == 1:
        raise ValueError("rank one is unhappy")
    return rank


def one_hangs(rank, world_size):
    if rank == 1:
        time.sleep(600)
    return rank


def one_exits(rank, world_size):
    if rank == 0:
        os._exit(7)
    dist.barrier()


def waits_for_ever(rank, world_size):
    tell("ready")
    time.sleep(600)


def own_rendezvous(rank, world_size):
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def dies_when_told(rank, world_size):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    tell("reduced")
    if rank == 2:
        time.sleep(600)
    dist.all_reduce(tensor)


def hangs_with_its_session(rank, world_size):
    tell(os.getpid())
    time.sleep(600)


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_results_come_back_in_rank_order(ranks, world_size):
    results = ranks.run(reduced, world_size, 10)
    expected = sum(10.0 + rank for rank in range(world_size))
    assert [result.tolist() for result in results] == [[expected] * 3] * world_size


def test_each_run_has_the_environment_of_torchrun_and_leaves_none(ranks):
    first = ranks.run(environment, 2, env={"TOPO_AR_PROBE": "yes"})
    assert first == [
        {"RANK": str(rank), "WORLD_SIZE": "2", "TOPO_AR_PROBE": "yes"} for rank in range(2)
    ]
    assert ranks.run(environment, 1, init=False)[0]["TOPO_AR_PROBE"] is None


def test_processes_are_kept_and_single_threaded(ranks):
    first = ranks.run(process_id, 4)
    second = ranks.run(process_id, 2, init=False)
    assert [pid for pid, *_ in first[:2]] == [pid for pid, *_ in second]
    assert [initialised for *_, initialised, _ in first + second] == [True] * 4 + [False] * 2
    assert {threads for *_, threads in first + second} == {1}


def test_the_fork_server_has_one_thread(ranks):
    server = ranks.run(process_id, 1, init=False)[0][1]
    assert len(os.listdir(f"/proc/{server}/task")) == 1


def test_a_function_may_make_its_own_rendezvous(ranks):
    assert ranks.run(own_rendezvous, 3, init=False) == [3.0] * 3
    assert ranks.run(own_rendezvous, 3, init=False) == [3.0] * 3


def test_a_failure_carries_the_traceback_and_the_pool_recovers(ranks):
    with pytest.raises(RanksFailedError, match="rank one is unhappy") as caught:
        ranks.run(one_fails, 3)
    assert 1 in caught.value.failures
    assert caught.value.hung == ()
    assert "ValueError" in caught.value.failures[1]
    assert len(ranks.run(reduced, 3, 0)) == 3


def test_a_rank_that_exits_is_named_with_its_exit_code(ranks):
    with pytest.raises(RanksFailedError, match="exit code 7") as caught:
        ranks.run(one_exits, 2)
    assert 0 in caught.value.failures


def test_a_hang_ends_at_the_deadline_with_stacks(ranks):
    begin = time.monotonic()
    with pytest.raises(RanksFailedError, match="ranks \\[1\\] hung") as caught:
        ranks.run(one_hangs, 2, deadline_s=0.5)
    assert "one_hangs" in caught.value.failures[1]
    assert set(caught.value.failures) == {1}
    assert time.monotonic() - begin < 4
    assert len(ranks.run(reduced, 2, 0)) == 2


def test_fresh_ranks_report_how_they_ended(ranks):
    outcomes = ranks.fresh(one_fails, 2)
    assert [outcome.exitcode for outcome in outcomes] == [0, 1]
    assert outcomes[0].result == 0
    assert "ValueError: rank one is unhappy" in outcomes[1].error


def test_a_fresh_rank_can_be_killed_by_its_test(ranks):
    told = []

    def kill_the_third(run, rank, message):
        told.append((rank, message))
        if rank == 2:
            run.kill(2)

    outcomes = ranks.fresh(dies_when_told, 3, on_message=kill_the_third)
    assert sorted(told) == [(rank, "reduced") for rank in range(3)]
    assert outcomes[2].exitcode == -signal.SIGKILL
    assert [outcome.exitcode for outcome in outcomes[:2]] == [1, 1]
    assert all("RuntimeError" in outcome.error for outcome in outcomes[:2])


def test_fresh_ranks_that_hang_are_killed_and_marked(ranks):
    outcomes = ranks.fresh(waits_for_ever, 2, deadline_s=1.0)
    assert [(outcome.hung, outcome.exitcode) for outcome in outcomes] == [(True, -9)] * 2
    assert "waits_for_ever" in outcomes[0].error


SESSION = """
from tests import ranks
from tests.test_ranks import hangs_with_its_session

if __name__ == "__main__":
    show = lambda run, rank, pid: print(pid, flush=True)
    ranks.PRELOAD = ["torch"]
    ranks.RankPool().fresh(hangs_with_its_session, 2, on_message=show, init=False)
"""


def test_busy_ranks_die_with_a_killed_session(tmp_path):
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    root = str(Path(module.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
