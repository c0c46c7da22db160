"""Failures that everyone survives: the same step ends by plain all-reduce, on all ranks."""

import logging
import os
import random
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests import fault_injection as faults
from tests.compressed_training import attached, batch, model, on_hosts, train_step, weights
from tests.jobs import blocks, communicator
from topo_ar.errors import ExecutionError

_KINDS = {kind.__name__: kind for kind in (MemoryError, OSError, RuntimeError, IndexError)}
_BREAKS = {fault.__name__: fault for fault in faults.BREAKS}
_SAID = {
    "shut": "ended",
    "reset": "ended",
    "no_frame": "a frame that is not ours",
    "frame_of_nobody": "which is done",
    "frame_of_unknown_kind": "unknown kind 77",
}
LARGE = (1, 100_000, 700_001, 3, 65_536, 300_000)
SMALL = (1, 300, 3, 1000)
THREE = [0, 0, 1, 1, 2, 2]
UNEQUAL = [0, 0, 0, 1, 1, 2]


def _listen() -> tuple[list[str], logging.Handler]:
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("topo_ar").addHandler(handler)
    return heard, handler


def _expected(rank_count: int, step: int, i: int, op: "dist.ReduceOp.RedOpType") -> float:
    total = float(sum(rank + step + i for rank in range(rank_count)))
    if op == dist.ReduceOp.MAX:
        return float(rank_count - 1 + step + i)
    return total / rank_count if op == dist.ReduceOp.AVG else total


def _put(made: topo_ar.Communicator, what: str, where: str, shared: random.Random) -> None:
    """Put a fault into this rank: into a lane, into a half-read frame or on the straight line."""
    chunk, seed = shared.randrange(12), shared.randrange(100)
    if where == "frame":
        faults.within_frame(made, chunk, _BREAKS[what])
        return
    fault = faults.on_a_flow(made, _BREAKS[what], seed) if what in _BREAKS else None
    fault = fault or faults.fails(_KINDS[what])
    if where == "lane":
        faults.before_chunk(made, shared.choice(faults.LANES), chunk, fault)
    else:
        step = shared.choice(faults.STEPS_OF_A_LINE)
        faults.on_the_line(made, step, chunk, fault, after=shared.random() < 0.5)


def _under_fault(
    rank: int, world_size: int, hosts: list[int], seed: int, what: str, where: str
) -> dict[str, object]:
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    op = shared.choice([dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX])
    share = shared.random() < 0.5
    victim = shared.randrange(world_size)
    heard, handler = _listen()
    numels, steps = (SMALL, 24) if where == "line" else (LARGE, 6)
    buckets = [torch.empty(n) for n in numels]
    wrong = 0
    with communicator(rank, hosts, plan="hierarchical") as made:
        if share:
            for bucket in buckets:
                made.share(bucket).wait()
        if rank == victim:
            _put(made, what, where, shared)
        for step in range(steps):
            futures = []
            for i, bucket in enumerate(buckets):
                bucket.fill_(float(rank + step + i))
                if own.random() < 0.2:
                    time.sleep(own.random() * 0.003)
                if where == "line":
                    made.all_reduce_sync(bucket, op)
                else:
                    futures.append(made.all_reduce(bucket, op))
            for future in futures:
                future.wait()
            for i, bucket in enumerate(buckets):
                expected = torch.full_like(bucket, _expected(world_size, step, i, op))
                wrong += int(not torch.equal(bucket, expected))
                bucket.fill_(-1.0)  # what a caller does with a result must reach no other rank
        dist.barrier()
        found = {"wrong": wrong, "fallbacks": made.fallbacks, "reason": made.plain_reason}
    logging.getLogger("topo_ar").removeHandler(handler)
    return found | {"heard": heard}


def _require_right(found: list[dict[str, object]], what: str, *, certain: bool = True) -> None:
    """Right everywhere, and all or none have left the fast path, said once."""
    count = found[0]["fallbacks"]
    assert count == 1 or not certain
    for rank in found:
        assert rank["wrong"] == 0, rank
        assert rank["fallbacks"] == count, rank
        if count:
            assert _SAID.get(what, f"{what}: injected") in str(rank["reason"]), rank
            assert "rank " in str(rank["reason"])
            assert "stage i" in str(rank["reason"]), rank
            assert "of collective" in str(rank["reason"]), rank
    assert len(found[0]["heard"]) == count, found[0]  # type: ignore[arg-type]
    assert all(not rank["heard"] for rank in found[1:])


@pytest.mark.parametrize("hosts", [blocks(2, 2), blocks(1, 4), blocks(4, 1)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_failure_in_a_ranks_own_work_is_survived_by_all(ranks, hosts, seed) -> None:
    found = ranks.run(_under_fault, 4, hosts, seed, "MemoryError", "lane")
    _require_right(found, "MemoryError")


@pytest.mark.parametrize("what", _BREAKS)
@pytest.mark.parametrize(
    ("hosts", "where"), [(blocks(4, 1), "frame"), ([0, 0, 1], "lane"), (blocks(2, 1), "line")]
)
def test_a_broken_flow_or_frame_is_survived_by_all(ranks, hosts, where, what) -> None:
    found = ranks.run(_under_fault, len(hosts), hosts, 4, what, where)
    _require_right(found, what, certain=where == "frame")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize(
    "hosts", [blocks(2, 2), blocks(4, 1), THREE, UNEQUAL, [0, 1, 0, 1], [0, 0, 0, 1]], ids=str
)
def test_whatever_fails_wherever_all_survive_it(ranks, hosts, seed) -> None:
    rng = random.Random(seed)
    where = rng.choice(["lane", "frame", "line"])
    kinds = [] if where == "frame" else list(_KINDS)
    what = rng.choice([*kinds, *_BREAKS])
    found = ranks.run(_under_fault, len(hosts), hosts, seed, what, where)
    _require_right(found, what, certain=False)


@pytest.mark.parametrize("hosts", [THREE, UNEQUAL], ids=str)
def test_small_tensors_on_three_nodes_survive_a_failure(ranks, hosts) -> None:
    _require_right(
        ranks.run(_under_fault, 6, hosts, 1, "MemoryError", "line"), "MemoryError", certain=False
    )


def _in_the_last_step(
    rank: int, world_size: int, hosts: list[int], pause_s: float
) -> tuple[bool, float]:
    """Rank 1 fails on what it took of the others, who have all they need and close."""
    with communicator(rank, hosts, plan="hierarchical") as made:
        made.all_reduce(torch.ones(300_000)).wait()
        pipeline = made._loop.pipeline
        if rank == 1:

            def late() -> None:
                time.sleep(pause_s)
                raise MemoryError("injected")

            faults.before_chunk(made, "_copy_out", pipeline.end, late)
        last = made.all_reduce(torch.full((100_000,), float(rank)), dist.ReduceOp.MAX).wait()
        right = bool((last == world_size - 1).all())
        begin = time.monotonic()
    return right, time.monotonic() - begin


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
@pytest.mark.parametrize("hosts", [blocks(1, 4), blocks(4, 1)], ids=str)
def test_who_closes_helps_those_that_fall_back(ranks, hosts, pause_s) -> None:
    for right, seconds in ranks.run(_in_the_last_step, 4, hosts, pause_s):
        assert right
        assert seconds < 2.0  # it is not kept longer than needed


def _too_late(rank: int, world_size: int, hosts: list[int]) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        _in_the_last_step(rank, world_size, hosts, 3.0)
    except ExecutionError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [blocks(1, 4), blocks(4, 1)], ids=str)
def test_who_fails_long_after_the_others_closed_says_both(ranks, hosts) -> None:
    texts = ranks.run(_too_late, 4, hosts)
    text, seconds = texts[1]
    assert "MemoryError: injected; and the ranks could not agree to go on without it" in text
    assert "on node 0" in text
    assert "last completed collective 0" in text
    assert seconds < 8.0
    assert [other for other, _ in (texts[0], *texts[2:])] == [""] * 3


def _trains(
    rank: int,
    world_size: int,
    hosts: list[int],
    compression: str | None,
    options: dict[str, object],
) -> dict[str, object]:
    """Several buckets in flight each step; a rank fails in the middle of the fourth step."""
    on_hosts(rank, hosts)
    heard, handler = _listen()
    if compression is None:
        ddp = _large()
        attach = partial(topo_ar.attach, ddp, plan="hierarchical", timeout_s=20.0)
    else:
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02)
        attach = partial(attached, ddp, compression)
    with attach(**options) as handle:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(8):
            if step == 3 and rank == 1:
                made = handle.communicator
                faults.before_chunk(made, "_reduce", 0, faults.fails(MemoryError))
            if step == 3 and compression is not None:
                # The exact all-reduce in which the fault is met.
                handle.communicator.all_reduce(torch.ones(70_000)).wait()
            train_step(ddp, optimizer, batch(rank, step))
        found = {"fallbacks": handle.fallbacks, "error": handle.error}
        if compression is not None:
            found |= {"reason": handle.compression.reason, "state": handle.state_dict()}
    logging.getLogger("topo_ar").removeHandler(handler)
    return found | {"weights": weights(ddp), "heard": heard}


@pytest.mark.parametrize("options", [{}, {"zero_copy": True}, {"grad_norm": True}], ids=str)
def test_training_goes_on_with_several_buckets_in_flight(ranks, options) -> None:
    found = ranks.run(_trains, 4, blocks(2, 2), None, options)
    alone = ranks.run(_plainly, 4)
    for rank in found:
        assert (rank["fallbacks"], rank["error"]) == (1, None)
        assert torch.equal(rank["weights"], found[0]["weights"])
        torch.testing.assert_close(rank["weights"], alone[0], rtol=1e-4, atol=1e-6)


def _large() -> DistributedDataParallel:
    """Four buckets of 400 kB and more."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 320), nn.Tanh(), nn.Linear(320, 320), nn.Tanh(), nn.Linear(320, 320)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2)


def _plainly(rank: int, world_size: int) -> torch.Tensor:
    ddp = _large()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(8):
        train_step(ddp, optimizer, batch(rank, step))
    return weights(ddp)


@pytest.mark.parametrize("codec", ["int8", "powersgd:2"])
def test_compression_ends_with_the_fast_path_and_training_goes_on(ranks, codec) -> None:
    found = ranks.run(_trains, 4, blocks(2, 2), codec, {})
    for rank in found:
        assert (rank["fallbacks"], rank["error"]) == (1, None)
        assert torch.equal(rank["weights"], found[0]["weights"])
        assert "compression ends, and what was not sent is dropped" in rank["reason"]
        assert "MemoryError: injected" in rank["reason"]
        assert rank["state"] == {}
    assert bool(found[0]["weights"].isfinite().all())


def _killed_after(rank: int, world_size: int, hosts: list[int]) -> tuple[str, tuple[int, ...], int]:
    with communicator(rank, hosts, plan="hierarchical", timeout_s=20.0) as made:
        if rank == 0:
            faults.before_chunk(made, "_copy_in", 1, faults.fails(MemoryError))
        try:
            while True:
                made.all_reduce(torch.ones(3_000_000)).wait()
                if made.fallbacks and rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        except ExecutionError as error:
            return str(error), error.ranks, made.fallbacks


@pytest.mark.parametrize("hosts", [blocks(2, 2), blocks(4, 1)], ids=str)
def test_a_rank_that_dies_after_a_fallback_is_named_on_every_node(ranks, hosts) -> None:
    begin = time.monotonic()
    for outcome in ranks.fresh(_killed_after, 4, hosts, deadline_s=20.0):
        if outcome.rank != 1:
            assert outcome.exitcode == 0, outcome.error
            text, named, fallbacks = outcome.result
            assert (named, fallbacks) == ((1,), 1), text
            assert "in stage flat_all_reduce of collective" in text
    assert time.monotonic() - begin < 12.0
