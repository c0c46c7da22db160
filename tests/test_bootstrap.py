"""A communicator is made on all ranks or on none, whoever fails at what: nobody waits in vain."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks, communicator
from topo_ar.errors import ExecutionError
from topo_ar.execution import communicator as engine
from topo_ar.execution import gather, job
from topo_ar.topology.presets import preset

VICTIM = 1
# What a rank does while it makes a communicator, each step the first of a stage in which the
# others wait for it in another way.
STEPS = {
    "interfaces": (gather, "local_address"),
    "shared memory": (job, "Owned"),
    "co-location": (gather, "open_peer"),
    "options": (engine, "require_equal"),
    "probe": (engine, "discover_job"),
    "listening": (job, "listen"),
    "flows": (job, "connect"),
    "control": (job.Job, "open_control"),
    "loop": (engine, "Loop"),
    "measurement": (engine, "measure_levels"),
    "plans": (engine, "Plans"),
}
_SOON_S = 10.0


def _raises(*arguments: object, **options: object) -> None:
    raise MemoryError("injected")


def _outcome(make: Callable[[], object]) -> tuple[str, str, tuple[int, ...], bool]:
    """Return class, text, the ranks that are blamed, and whether that took long."""
    begin = time.monotonic()
    try:
        make()
    except Exception as error:
        late = time.monotonic() - begin > _SOON_S
        kind = ExecutionError if isinstance(error, ExecutionError) else type(error)
        return kind.__name__, str(error), tuple(getattr(error, "ranks", ())), late
    return "made", "", (), False


def _make(rank: int, hosts: list[int], **options: object) -> None:
    with communicator(rank, hosts, **{"timeout_s": 30.0, **options}) as made:
        assert float(made.all_reduce(torch.ones(3)).wait()[0]) == len(hosts)


def _fails_at(rank: int, world_size: int, hosts: list[int], step: str) -> list[object]:
    owner, name = STEPS[step]
    real = getattr(owner, name)
    if rank == VICTIM:
        setattr(owner, name, _raises)
    try:
        failed = _outcome(lambda: _make(rank, hosts, measure=step == "measurement"))
    finally:
        setattr(owner, name, real)
    return [failed, _outcome(lambda: _make(rank, hosts))]


@pytest.mark.parametrize(
    "hosts",
    [
        blocks(2, 2),
        pytest.param(blocks(4, 1), marks=pytest.mark.slow),
        pytest.param(blocks(1, 4), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("step", STEPS)
def test_whatever_fails_on_one_rank_all_raise_with_its_reason(ranks, hosts, step) -> None:
    found = ranks.run(_fails_at, len(hosts), hosts, step, deadline_s=28.0)
    if step in {"listening", "flows"} and len(set(hosts)) == 1:
        step = ""  # there is nobody to connect with
    for rank, (failed, again) in enumerate(found):
        assert again[0] == "made", again
        kind, text, blamed, late = failed
        assert not late
        if rank == VICTIM:
            assert (kind, text) == ("MemoryError", "injected")
        else:
            assert kind == "ExecutionError", failed
            assert text == (
                f"rank {VICTIM} could not make its communicator: MemoryError: injected"
            ), step
            assert blamed == (VICTIM,)


def _on_one_rank(rank: int, world_size: int, options: dict[str, object]) -> list[object]:
    mine = options if rank == VICTIM else {}
    found = [_outcome(lambda: _make(rank, blocks(2, 2), **mine))]
    if isinstance(options.get("plan", ""), str):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        found.append(_outcome(lambda: topo_ar.attach(ddp, timeout_s=30.0, **mine).close()))
    return found


def test_a_plan_of_other_nodes_on_one_rank_is_refused_on_all(ranks) -> None:
    plan = topo_ar.plan(preset("cpu-host", nodes=2, ranks_per_node=4), 4_000_000)
    for (kind, text, *_), *_ in ranks.run(_on_one_rank, 4, {"plan": plan}):
        assert kind == "ConfigError"
        assert f"plan is {plan.hash} on rank {VICTIM} but auto on rank 0" in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"plan": "fastest"}, "plan='fastest' is not one of"), ({"reproducible": True}, "reproduc")],
    ids=str,
)
def test_options_of_one_rank_are_refused_on_all(ranks, options, reason) -> None:
    for rank, found in enumerate(ranks.run(_on_one_rank, 4, options)):
        for kind, text, *_ in found:
            mine = rank == VICTIM or "reproducible" in options
            assert kind == ("ConfigError" if mine else "ExecutionError"), text
            assert reason in text
            assert mine or f"rank {VICTIM} could not make its communicator: ConfigError" in text


def _attaches(rank: int, world_size: int) -> list[object]:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    options = {"compression": "nonsense"} if rank == VICTIM else {}
    failed = _outcome(lambda: topo_ar.attach(ddp, timeout_s=30.0, **options).close())
    return [failed, _outcome(lambda: topo_ar.ddp(nn.Linear(2, 2), timeout_s=30.0))]


def test_options_of_attach_on_one_rank_fail_all(ranks) -> None:
    for rank, (failed, again) in enumerate(ranks.run(_attaches, 4)):
        assert again[0] == "made"
        assert failed[0] == ("ConfigError" if rank == VICTIM else "ExecutionError")
        assert "nonsense" in failed[1]
        assert rank == VICTIM or failed[2] == (VICTIM,)


def _absent(rank: int, world_size: int) -> list[object]:
    if rank == VICTIM:
        return []
    return [_outcome(lambda: _make(rank, blocks(2, 2), timeout_s=1.5))]


def test_ranks_that_do_not_come_are_named(ranks) -> None:
    for rank, found in enumerate(ranks.run(_absent, 4)):
        for kind, text, blamed, late in found:
            assert (kind, blamed, late) == ("ExecutionError", (VICTIM,), False), rank
            assert "ranks [1] did not come to make the communicator in 1.5 s" in text


def _dies(rank: int, world_size: int, hosts: list[int], step: str) -> tuple[str, bool]:
    owner, name = STEPS[step]
    if rank == VICTIM:
        setattr(owner, name, lambda *rest, **more: os.kill(os.getpid(), signal.SIGKILL))
    kind, _, _, late = _outcome(lambda: _make(rank, hosts, timeout_s=4.0))
    return kind, late


_RARE = [pytest.param(step, marks=pytest.mark.slow) for step in ("interfaces", "flows", "plans")]


@pytest.mark.parametrize("step", ["probe", *_RARE])
def test_who_dies_on_the_way_fails_the_others_within_the_deadline(ranks, step) -> None:
    hosts = blocks(2, 2)
    for outcome in ranks.fresh(_dies, len(hosts), hosts, step):
        if outcome.rank != VICTIM:
            assert outcome.result == ("ExecutionError", False), outcome.error
