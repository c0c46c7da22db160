"""How a communicator begins and ends: on groups of any kind, with calls in flight, under fire."""

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import topo_ar
from experiments.soak import heap_nbytes
from tests.hosts import ROOT
from tests.jobs import blocks, communicator
from tests.ranks import tell
from topo_ar.errors import ConfigError, ExecutionError, PlanError
from topo_ar.execution import bootstrap
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.network import Nic
from topo_ar.execution.transports.rendezvous import listen
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.execution.transports.tcp import Aborted, Flow, Kind, abort_all
from topo_ar.topology.presets import preset

HOSTS = [0, 0, 1, 1]
MAX = dist.ReduceOp.MAX


def _on_host(rank: int, hosts: list[int] = HOSTS) -> None:
    os.environ[HOST_ID_ENV] = str(hosts[rank])


def _make(rank: int, group: "dist.ProcessGroup | None" = None, **options: object) -> Communicator:
    _on_host(rank)
    return Communicator(group, **{"plan": "hierarchical", "timeout_s": 10.0, **options})


def _total(made: Communicator, value: float = 1.0, numel: int = 5000) -> float:
    return float(made.all_reduce(torch.full((numel,), value)).wait()[-1])


def _held() -> tuple[int, int, int]:
    """Descriptors, threads and mapped segments of this process."""
    with open("/proc/self/maps") as maps:
        segments = sum("topo_ar" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), segments


def _settled(before: tuple[int, int, int]) -> bool:
    """Whether nothing more is held than before, once what is ending has ended."""
    end = time.monotonic() + 3.0
    while any(now > then for now, then in zip(_held(), before, strict=True)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _drop(rank: int, how: str) -> None:
    if how == "communicator":
        _total(_make(rank))
    elif how == "in flight":
        futures = [_make(rank).all_reduce(torch.ones(200_000)) for _ in range(3)]
        assert [float(future.wait()[0]) for future in futures] == [4.0] * 3
    elif how == "model":
        _on_host(rank)
        model = topo_ar.ddp(nn.Linear(4, 4), plan="hierarchical", timeout_s=10.0)
        model(torch.ones(1, 4)).sum().backward()
        del model
        gc.collect()
    else:
        with pytest.raises(PlanError):
            _make(rank, topology=preset("cpu-host", nodes=1, ranks_per_node=4))


def _leaves_nothing(rank: int, world_size: int, how: str) -> bool:
    dist.barrier()
    before = _held()
    for _ in range(3):
        _drop(rank, how)
    return _settled(before)


@pytest.mark.parametrize("how", ["communicator", "in flight", "model", "failed constructor"])
def test_what_is_dropped_without_close_leaves_nothing(ranks, how) -> None:
    assert ranks.run(_leaves_nothing, 4, how) == [True] * 4


@pytest.mark.slow
def test_a_process_may_end_right_after_its_model(tmp_path) -> None:
    """What is attached goes out of scope, and the interpreter ends with its thread at hand."""
    command = [sys.executable, "-m", "experiments.compression_pitfalls_ranks", "ours"]
    for turn in range(3):
        store = str(tmp_path / str(turn))
        ranks = [subprocess.Popen([*command, str(rank), store], cwd=ROOT) for rank in range(2)]
        try:
            assert [rank.wait(60) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()


def _many_calls(rank: int, world_size: int, num_calls: int) -> tuple[bool, int]:
    with communicator(rank, HOSTS, plan="hierarchical") as made:
        for _ in range(20):
            _total(made)
        before = _held()
        for call in range(num_calls):
            made.all_reduce_sync(torch.ones(1000)) if call % 2 else _total(made)
        return _settled(before), len(made._loop.pipeline.chunks)


@pytest.mark.parametrize("num_calls", [300, pytest.param(3000, marks=pytest.mark.slow)], ids=str)
def test_many_calls_hold_no_more_than_few(ranks, num_calls) -> None:
    assert ranks.run(_many_calls, 4, num_calls, deadline_s=50.0) == [(True, 0)] * 4


def _handed_out(rank: int, world_size: int, options: dict[str, object]) -> int:
    """What malloc has handed out for the slots that large buffers need."""
    buffer = torch.ones(1_500_000)
    with communicator(rank, HOSTS, plan="hierarchical", **options) as made:
        _total(made)
        before, _ = heap_nbytes()
        made.all_reduce(buffer).wait()
        return heap_nbytes()[0] - before


@pytest.mark.parametrize("options", [{}, {"reproducible": True}], ids=str)
def test_slots_are_not_left_to_malloc_which_would_keep_them(ranks, options) -> None:
    """A job that made communicators again held 60 MB more after ten of them."""
    assert max(ranks.run(_handed_out, 4, options)) < 200_000


def _close_in_flight(rank: int, world_size: int) -> list[object]:
    made = _make(rank)
    if rank == 3:
        time.sleep(0.3)
    futures = [made.all_reduce(torch.ones(300_000)) for _ in range(4)]
    made.close()
    made.close()
    found = [float(future.wait()[-1]) for future in futures]
    for late in (
        lambda: made.all_reduce(torch.ones(3)).wait(),
        lambda: made.all_reduce_sync(torch.ones(3)),
    ):
        with pytest.raises(ExecutionError, match="the communicator is closed"):
            late()
    return found


def test_close_finishes_what_is_in_flight(ranks) -> None:
    assert ranks.run(_close_in_flight, 4) == [[4.0] * 4] * 4


def _close_in_vain(rank: int, world_size: int) -> str:
    before = _held()
    made = _make(rank, timeout_s=30.0)
    _total(made)
    if rank == 3:
        time.sleep(1.5)
    future = made.all_reduce(torch.ones(300_000))
    made.close(timeout_s=0.5)
    with pytest.raises(ExecutionError) as caught:
        future.wait()
    assert _settled(before)
    return str(caught.value)


def test_close_gives_up_in_time_and_says_on_whom(ranks) -> None:
    texts = ranks.run(_close_in_vain, 4)
    for text in texts[:3]:
        assert "the communicator was closed: ranks [3] have not brought their input" in text


def _close_from_elsewhere(rank: int, world_size: int) -> tuple[float, bool]:
    """By another thread while the caller drives its call, and by a callback."""
    before = _held()
    made = _make(rank)
    found = []
    driver = threading.Thread(
        target=lambda: found.append(float(made.all_reduce_sync(torch.ones(100_000))[0]))
    )
    if rank == 1:
        time.sleep(0.3)
    driver.start()
    time.sleep(0.1)
    made.close()
    driver.join()
    other = _make(rank)
    other.all_reduce(torch.ones(100_000)).then(lambda future: other.close()).wait()
    return found[0], _settled(before)


def test_close_by_another_thread_or_by_a_callback(ranks) -> None:
    assert ranks.run(_close_from_elsewhere, 4) == [(4.0, True)] * 4


def _outlives_torchs_groups(rank: int, world_size: int) -> list[float]:
    store = dist.distributed_c10d._get_default_store()
    old = _make(rank)
    dist.destroy_process_group()
    found = [_total(old), float(old.all_reduce(torch.tensor([float(rank)]), MAX).wait())]
    store = dist.PrefixStore("second", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    old.close()
    with _make(rank) as new:
        found.append(_total(new))
    return found


def test_a_communicator_outlives_torchs_groups(ranks) -> None:
    assert ranks.run(_outlives_torchs_groups, 4) == [[4.0, 3.0, 4.0]] * 4


def _by_hand(rank: int, world_size: int) -> bool:
    """The communicators that `topo_ar.all_reduce` makes go with the groups they were made for."""
    store = dist.distributed_c10d._get_default_store()
    before = None
    for job in range(2):
        assert float(topo_ar.all_reduce(torch.ones(9))[0]) == world_size
        dist.destroy_process_group()
        gc.collect()
        before = before or _held()
        prefixed = dist.PrefixStore(f"job{job}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size)
    dist.barrier()  # who leaves while another still connects fails it
    dist.destroy_process_group()
    gc.collect()
    return _settled(before)


def test_communicators_made_by_hand_go_with_their_groups(ranks) -> None:
    assert ranks.run(_by_hand, 3) == [True] * 3


def _after_a_restart(rank: int, world_size: int) -> float:
    """Ranks that a launcher started again find the store of their predecessors."""
    for attempt in range(2):
        bootstrap._names = bootstrap._Names()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        with _make(rank) as made:
            total = _total(made)
    del os.environ["TORCHELASTIC_RESTART_COUNT"]
    return total


def test_restarted_ranks_do_not_meet_their_predecessors(ranks) -> None:
    assert ranks.run(_after_a_restart, 4) == [4.0] * 4


def _on_parts(rank: int, world_size: int) -> list[float]:
    """Groups of a part of the ranks, made again and again; ranks are in different numbers of them.

    Torch's own names for such groups depend on the number of groups a rank is in.
    """
    low = dist.new_group([0, 1])
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    found = []
    with _make(rank) as world:
        for _ in range(3):
            with _make(rank, pair) as made:
                found += [_total(made, rank), _total(world, rank)]
            if rank < 2:
                with _make(rank, low) as held, _make(rank, low) as more:
                    found += [_total(held), _total(more)]
    return found


def test_groups_of_a_part_of_the_ranks(ranks) -> None:
    zero, one, two, three = ranks.run(_on_parts, 4)
    assert zero == [2.0, 6.0, 2.0, 2.0] * 3
    assert one == [4.0, 6.0, 2.0, 2.0] * 3
    assert (two, three) == ([2.0, 6.0] * 3, [4.0, 6.0] * 3)


def _outside(rank: int, world_size: int) -> str:
    group = dist.new_group([0, 1])
    if rank < 2:
        with Communicator(group, timeout_s=5.0):
            return "made"
    with pytest.raises(ConfigError, match="not in the group"):
        topo_ar.all_reduce(torch.ones(3), group=group)
    with pytest.raises(ConfigError) as caught:
        Communicator(group, timeout_s=5.0)
    return str(caught.value)


def test_a_rank_outside_the_group_is_told(ranks) -> None:
    inside, also, outside, too = ranks.run(_outside, 4)
    assert (inside, also) == ("made", "made")
    assert "rank 2 is not in the group" in outside
    assert "rank 3 is not in the group" in too


def _two_at_once(rank: int, world_size: int) -> int:
    shared, own = random.Random(5), random.Random(rank)
    wrong, pending = 0, []
    with _make(rank) as first, _make(rank) as second:
        for step in range(80):
            tensor = torch.full((shared.randrange(1, 100_000),), float(rank + step))
            if own.random() < 0.1:
                time.sleep(0.002)
            pending.append((step, shared.choice([first, second]).all_reduce(tensor)))
        for step, future in pending:
            wrong += int(not bool((future.wait() == 6 + 4 * step).all()))
    return wrong


def test_two_communicators_interleaved(ranks) -> None:
    assert ranks.run(_two_at_once, 4) == [0] * 4


def _fork_in_flight(rank: int, world_size: int) -> list[object]:
    with _make(rank) as made:
        flying = made.all_reduce(torch.ones(1_000_000))
        reader, writer = os.pipe()
        if os.fork() == 0:
            text = b"no error"
            try:
                made.all_reduce_sync(torch.ones(3))
            except ExecutionError as error:
                text = str(error).encode()
            made.close()
            os.write(writer, text)
            os._exit(0)
        os.close(writer)
        text = os.read(reader, 1000).decode()
        os.wait()
        return [text, float(flying.wait()[0]), _total(made)]


def test_a_fork_in_flight_harms_nobody(ranks) -> None:
    expected = ["a forked process cannot use the communicator of its parent", 4.0, 4.0]
    assert ranks.run(_fork_in_flight, 4) == [expected] * 4


def _late(rank: int, world_size: int) -> list[float]:
    with _make(rank) as made:
        if rank == 1:
            time.sleep(1.5)
        return [_total(made), float(made.all_reduce_sync(torch.ones(3))[0])]


def test_a_rank_may_be_late(ranks) -> None:
    assert ranks.run(_late, 4) == [[4.0, 4.0]] * 4


def _under_fire(
    rank: int, world_size: int, hosts: list[int], plan: str, way: str
) -> tuple[str, tuple[int, ...]]:
    shared = random.Random(3)
    with communicator(rank, hosts, plan=plan, timeout_s=30.0) as made:
        _total(made)
        tell("running")
        pending = []
        try:
            while True:
                tensor = torch.ones(shared.choice([100, 3000, 70_000, 400_000, 2_000_000]))
                if way == "sync":
                    made.all_reduce_sync(tensor)
                else:
                    pending.append(
                        made.all_reduce(tensor, MAX if way == "max" else dist.ReduceOp.SUM)
                    )
                while len(pending) > 3:
                    pending.pop(0).wait()
        except ExecutionError as error:
            return str(error), error.ranks


def _survivors(ranks, hosts, plan, way, victims, signum, seed):
    rng = random.Random(seed)

    def on_message(run, rank, message) -> None:
        if rank == victims[0]:
            time.sleep(rng.random() * 0.4)
            for victim in victims:
                run.kill(victim, signum)
                time.sleep(rng.random() * 0.02)

    outcomes = ranks.fresh(
        _under_fire, len(hosts), hosts, plan, way, deadline_s=15.0, on_message=on_message
    )
    return [outcome for outcome in outcomes if outcome.rank not in victims]


@pytest.mark.parametrize(
    ("hosts", "plan", "way"),
    [
        ([0, 0, 0, 1], "flat", "sync"),
        ([0, 0, 1, 1], "flat", "async"),
        ([0, 1, 2, 3], "flat", "max"),
    ],
    ids=str,
)
@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_killed_on_the_plain_path_is_named(ranks, hosts, plan, way, victim) -> None:
    for outcome in _survivors(ranks, hosts, plan, way, [victim], signal.SIGKILL, 0):
        assert outcome.exitcode == 0, outcome.error
        text, named = outcome.result
        assert named == (victim,), text
        assert f"rank {victim} " in text
        assert "flat_all_reduce" in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_whoever_is_killed_whenever_every_survivor_names_it(ranks, seed) -> None:
    rng = random.Random(seed)
    hosts = blocks(*rng.choice([(2, 2), (2, 4), (4, 2), (1, 4), (3, 2), (4, 1)]))
    victims = rng.sample(range(len(hosts)), 1 + seed % 3 // 2)
    plan = "flat" if seed % 4 == 3 else "hierarchical"
    way = rng.choice(["sync", "async", "max"])
    signum = signal.SIGTERM if seed % 5 == 4 else signal.SIGKILL
    for outcome in _survivors(ranks, hosts, plan, way, victims, signum, seed):
        assert outcome.exitcode == 0, outcome.error
        text, named = outcome.result
        assert named, text
        assert set(named) <= set(victims), text


def _interrupted(rank: int, world_size: int, in_flight: bool) -> str:
    with _make(rank) as made:
        _total(made)
        if rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        if rank == 3:
            time.sleep(1.0)
        try:
            if in_flight:  # then the caller of the next one waits and leaves the work to the thread
                made.all_reduce(torch.ones(1000))
            for _ in range(2):  # those who had what they need of rank 0 learn it at the next one
                made.all_reduce_sync(torch.ones(1000))
        except (KeyboardInterrupt, ExecutionError) as error:
            return f"{type(error).__name__} {error}"
    return "nothing"


@pytest.mark.parametrize("in_flight", [False, True], ids=["driving", "waiting"])
def test_an_interrupted_caller_fails_the_job_with_its_name(ranks, in_flight) -> None:
    outcomes = ranks.fresh(_interrupted, 4, in_flight, deadline_s=10.0)
    assert outcomes[0].result == "KeyboardInterrupt "
    for outcome in outcomes[1:]:
        assert "KeyboardInterrupt (reported by rank 0)" in outcome.result


def _flows() -> tuple[Flow, Flow]:
    with listen(Nic("lo", "127.0.0.1")) as listener:
        calling = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    return Flow(calling, 1), Flow(called, 0)


@pytest.mark.parametrize("num_read", [0, 10, 40, 600], ids=lambda n: f"{n} bytes read")
def test_who_cannot_send_reads_why_the_peer_left_before_blaming_it(num_read) -> None:
    ours, theirs = _flows()
    payload = memoryview(bytes(500))
    ours.send(Kind.EXCHANGE, 0, 0, payload, lambda: None)
    ours.flush()
    theirs.send(Kind.EXCHANGE, 0, 0, payload, lambda: None)
    theirs.flush()
    abort_all([theirs], "rank 7 is to blame")
    theirs.close()  # with bytes unread: the kernel resets the connection
    seen = []
    ours.sock.settimeout(1.0)
    header = ours.sock.recv(min(num_read, 32), socket.MSG_WAITALL)
    ours._header[: len(header)] = header
    ours._header_fill = len(header)
    if len(header) == 32:
        ours._parse_header()
        ours._target_fill = len(ours.sock.recv(min(num_read - 32, 500), socket.MSG_WAITALL))
    ours.sock.setblocking(False)
    for _ in range(100):
        ours.send(Kind.EXCHANGE, 1, 0, payload, lambda: None)
        try:
            ours.flush()
        except ExecutionError as error:
            seen.append(error)
            break
        time.sleep(0.01)
    ours.close()
    assert isinstance(seen[0], Aborted)
    assert str(seen[0]) == "rank 7 is to blame"


def test_telling_a_peer_that_has_told_us_and_left_is_no_error() -> None:
    ours, theirs = _flows()
    ours.send(Kind.EXCHANGE, 0, 0, memoryview(bytes(500)), lambda: None)
    ours.flush()
    abort_all([theirs], "rank 7 is to blame")
    theirs.close()
    for _ in range(3):
        abort_all([ours], "rank 7 is to blame")
        time.sleep(0.01)
    ours.close()


def _memory_after_close(rank: int, world_size: int) -> int:
    """Count the slots that live on after `close` until the garbage collector comes."""
    gc.disable()
    try:
        with communicator(rank, [0, 0, 1, 1], plan="hierarchical") as made:
            made.all_reduce(torch.ones(1_000_000)).wait()
            made.all_reduce_sync(torch.ones(10))
            kept = made._loop.pipeline.slots
            slots = [
                *kept._partials,
                *(s for each in kept._arrivals.values() for s in each),
            ]
            watched = [weakref.ref(slot) for slot in slots if slot.nbytes]
            del kept, slots
        del made
        assert watched
        return sum(slot() is not None for slot in watched)
    finally:
        gc.enable()


def test_a_closed_communicator_gives_its_memory_back_at_once(ranks) -> None:
    assert ranks.run(_memory_after_close, 4) == [0] * 4
