"""Steps that change for good: the network is measured and planned for anew, on all ranks alike."""

import json
import sys
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.compressed_training import TWO_BY_TWO, on_hosts
from tests.fault_injection import before_chunk, fails
from tests.hosts import ROOT, skip_without_hosts
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import start
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.execution.slow_nics import slow
from topo_ar.telemetry import drift
from topo_ar.telemetry.drift import FACTOR, StepWatch
from topo_ar.topology.levels import levels
from topo_ar.topology.measure import with_nic_rates
from topo_ar.topology.model import Source
from topo_ar.topology.presets import preset

LEVEL = 0.1
GBIT = 1e9 / 8


def _steps_until_drift(watch: StepWatch, seconds: float, most: int = 2000) -> int | None:
    """Return after how many steps of `seconds` the watch says that they have changed."""
    for step in range(1, most + 1):
        found = watch.add(seconds)
        if found is not None and watch.drifts(found):
            return step
    return None


def test_windows_last_about_five_seconds() -> None:
    assert StepWatch(LEVEL).window_steps == 50
    assert StepWatch(1e-4).window_steps == 1000
    assert StepWatch(60.0).window_steps == 10
    assert StepWatch(None).window_steps == 10


@given(st.floats(1e-4, 1e2), st.floats(1 / FACTOR + 0.01, FACTOR - 0.01))
def test_steps_that_stay_as_they_were_do_not_drift(level, ratio) -> None:
    assert _steps_until_drift(StepWatch(level), level * ratio) is None


@given(st.floats(1e-4, 1e2), st.floats(FACTOR + 0.01, 100.0), st.booleans())
def test_steps_that_change_for_good_drift_after_two_windows(level, ratio, longer) -> None:
    seconds = level * ratio if longer else level / ratio
    expected = StepWatch(level).window_steps + StepWatch(seconds).window_steps
    assert _steps_until_drift(StepWatch(level), seconds) == expected


def test_pauses_and_a_single_slow_window_are_no_drift() -> None:
    watch = StepWatch(LEVEL)
    assert all(watch.add(10 * LEVEL) is None for _ in range(24))
    paused = [watch.add(LEVEL) for _ in range(26)]
    assert paused == [None] * 25 + [LEVEL]
    for ratio in (2.0, 1.0, 2.0, 0.5, 2.0, 1.2):
        assert not watch.drifts(ratio * LEVEL)
    assert not watch.drifts(0.5 * LEVEL)
    assert watch.drifts(0.6 * LEVEL)


def test_without_a_level_the_first_window_says_it() -> None:
    watch = StepWatch(None)
    assert _steps_until_drift(watch, LEVEL, 10) is None
    assert (watch.level_seconds, watch.window_steps) == (LEVEL, 50)
    assert _steps_until_drift(watch, 2 * LEVEL) == 50 + 25


@pytest.mark.parametrize(
    ("declared", "into", "expected"),
    [
        # Of two nodes both flows are as slow as the slower NIC.
        ([GBIT] * 2, [GBIT / 10] * 2, {0: GBIT / 10, 1: GBIT / 10}),
        # Of four, node 2 slows the flows into it and out of it; its neighbours have another.
        ([GBIT] * 4, [GBIT, GBIT, GBIT / 10, GBIT / 10], {2: GBIT / 10}),
        # As declared, or nearly.
        ([GBIT] * 3, [GBIT, 0.6 * GBIT, 0.7 * GBIT], {}),
        # One flow does not fill a fast NIC: that is no reason to doubt all of them ...
        ([100 * GBIT] * 3, [20 * GBIT] * 3, {}),
        # ... but one that carries less than half of what others do.
        ([100 * GBIT] * 4, [20 * GBIT, 20 * GBIT, 5 * GBIT, 5 * GBIT], {2: 5 * GBIT}),
        # Several NICs are not judged by one flow.
        ([None, GBIT, GBIT], [GBIT / 10] * 3, {1: GBIT / 10, 2: GBIT / 10}),
    ],
)
def test_slow_nics_are_told_from_flows_in_a_ring(declared, into, expected) -> None:
    assert slow(declared, into) == expected


def test_a_slow_nic_counts_for_what_it_carries() -> None:
    topology = preset("cpu-host", nodes=3, ranks_per_node=2)
    before = levels(topology).nodes
    name = before[1].name
    after = levels(with_nic_rates(topology, {name: 1e6})).nodes
    assert (after[1].nics[0].payload, after[1].nics[0].source) == (1e6, Source.MEASURED)
    assert after[0] == before[0]
    assert after[2] == before[2]
    assert with_nic_rates(topology, {}) == topology


def _drifts(rank, world_size, options, side):
    """After the choice every step takes longer: all is looked at again, on both ranks alike."""
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(nn.Linear(side, side, bias=False))
    given = preset("cpu-host", nodes=2, ranks_per_node=1)
    choices, wrong, now = [], 0, 0.0
    with (
        patch.object(drift, "_WINDOW_SECONDS", 0.0),  # windows of ten steps
        topo_ar.attach(ddp, topology=given, timeout_s=20.0, **options) as handle,
    ):
        chooser, plans = handle.hook.path, handle.communicator._plans
        chooser.clock = lambda: now
        for step in range(80):
            ddp.zero_grad()
            ddp(torch.full((1, side), float(rank + step % 7))).sum().backward()
            expected = torch.full_like(ddp.module.weight, 0.5 + step % 7)
            wrong += not torch.equal(ddp.module.weight.grad, expected)
            choices.append(chooser.choice)
            # From ten steps after the first choice on, steps take twice as long.
            first = next((i for i, choice in enumerate(choices) if choice.since_step), step)
            now += (2 if step > first + 10 else 1) * (1.5 if chooser.plain else 1.0)
        assert handle.communicator._plans is not plans
    return choices, wrong


@pytest.mark.parametrize(
    ("options", "side", "path", "trials"),
    [
        ({}, 64, "planned", 2),
        ({"reproducible": True}, 64, "planned", 0),
        ({}, 2000, "plain", 0),  # 16 MB between two ranks: the plan is flat
    ],
    ids=["auto", "reproducible", "flat plan"],
)
def test_after_drift_all_ranks_plan_anew(ranks, options, side, path, trials) -> None:
    (choices, wrong), (theirs, their_wrong) = ranks.run(_drifts, 2, options, side, deadline_s=50.0)
    assert choices == theirs
    assert wrong == their_wrong == 0
    last = choices[-1]
    assert (last.path, last.replans, last.trials) == (path, 1, trials)
    kept = [choice for choice in choices if choice.replans == 0 and choice.path == path]
    # The window in which steps become slow and one more; where the first window says what steps
    # take, it comes before.
    assert len(kept) in range(20, 41)


def _falls_back(rank, world_size):
    """The fast path fails in the trial: from the next look on, plain is all there is."""
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(nn.Linear(512, 512, bias=False))
    given = preset("cpu-host", nodes=2, ranks_per_node=2)
    with topo_ar.attach(ddp, topology=given, timeout_s=20.0) as handle:
        for step in range(30):
            if step == 8 and rank == 1:
                before_chunk(handle.communicator, "_reduce", 0, fails(MemoryError))
            ddp.zero_grad()
            ddp(torch.full((1, 512), float(rank + step))).sum().backward()
            assert torch.equal(ddp.module.weight.grad, torch.full((512, 512), 1.5 + step))
        return handle.choice, handle.fallbacks


def test_after_a_fallback_plain_stays(ranks) -> None:
    found = ranks.run(_falls_back, 4)
    assert all(each == found[0] for each in found)
    choice, fallbacks = found[0]
    assert fallbacks == 1
    assert choice.path == "plain"
    assert "MemoryError" in choice.reason


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(200)
def test_a_nic_cut_to_a_tenth_is_measured_and_planned_for_anew() -> None:
    skip_without_hosts()
    rows: list[dict] = []
    said: list[bytes] = []
    with Cluster(ClusterSpec.uniform(2, 4, ["1gbit"]), keep=[ROOT]) as cluster:

        def on_line(rank: int, line: bytes) -> None:
            said.append(line)
            if line.startswith(b"{"):
                row = json.loads(line)
                rows.append(row)
                if row["event"] == "decided" and rank == 0:
                    cluster.set_rate("host1", "eth0", cluster.rate("host1", "eth0") / 10)

        job = start(
            cluster,
            [sys.executable, "-m", "tests.drift_worker"],
            cwd=ROOT,
            env={"TOPO_AR_LOG": "info"},
            on_line=on_line,
        )
        assert job.wait(170).exit_code == 0, b"".join(said).decode()
    ends = [row for row in rows if row["event"] == "end"]
    assert len(ends) == 8
    for end in ends:
        assert (end["wrong"], end["fallbacks"]) == (0, 0)
        same = ("steps", "hashes", "predicted", "choice")
        assert {key: end[key] for key in same} == {key: ends[0][key] for key in same}
    path, _, trials, replans, _ = ends[0]["choice"]
    assert (trials, replans) == (2, 1)
    assert path in {"planned", "plain"}
    old, new = ends[0]["hashes"]
    assert old != new
    before, after = ends[0]["predicted"]
    assert 5 < after / before < 15
    text = b"".join(said).decode()
    [line] = [line for line in text.splitlines() if "so the network was measured anew" in line]
    assert old[:8] in line
    assert new[:8] in line
