"""Targets: read, held, and given way to on all ranks in the same step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.compressed_training import on_hosts
from topo_ar.errors import ConfigError
from topo_ar.telemetry.breaches import BreachWatch
from topo_ar.telemetry.incidents import read_incident
from topo_ar.telemetry.targets import Targets, read_targets

FAST_S, SLOW_S, LIMIT_S = 0.01, 0.1, 0.05
PRICES = 'currency = "EUR"\nnode_hour = 36.0\nsent_gigabyte = 1.0\n'


def test_a_file_holds_limits_and_its_price_list(tmp_path) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    path = tmp_path / "targets.toml"
    path.write_text(
        'step_bytes_between = "40MB"\ncost_per_step = 0.02\nprices = "prices.toml"\n'
        'on_breach = "warn"\n'
    )
    targets = read_targets(path)
    assert targets.limit("step_bytes_between") == 40e6
    assert targets.prices.node_hour == 36.0
    assert (targets.on_breach, targets.patience_steps, targets.step_seconds) == ("warn", 2, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "no target; give one of step_seconds"),
        ("step_second = 1.0", "unknown field `step_second`"),
        ("step_seconds = -1.0", "step_seconds is -1.0"),
        ('step_bytes_between = "many"', "many"),
        ("cost_per_step = 1.0", "needs prices"),
        ("step_seconds = 1.0\npatience_steps = 0", "patience_steps must be 1"),
        ('step_seconds = 1.0\non_breach = "panic"', "on_breach"),
        ('cost_per_step = 1.0\nprices = "none.toml"', "none.toml"),
    ],
)
def test_what_holds_no_targets_is_explained(tmp_path, text, message) -> None:
    path = tmp_path / "targets.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_targets(path)
    assert str(tmp_path) in str(caught.value)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
def test_a_breach_is_that_many_missed_steps_in_a_row(missed, patience) -> None:
    watch = BreachWatch(Targets(step_seconds=LIMIT_S, patience_steps=patience))
    run = 0
    for step, miss in enumerate(missed):
        breach = watch.add(step, {"step_seconds": SLOW_S if miss else FAST_S}, None)
        run = run + 1 if miss else 0
        assert (breach is not None) == (run >= patience)
        if breach is not None:
            assert (breach.first_step, breach.last_step) == (step - run + 1, step)
            assert breach.values == {"step_seconds": SLOW_S}


def test_a_loss_drifts_from_its_lowest_level() -> None:
    watch = BreachWatch(Targets(loss_drift=0.1, patience_steps=1))
    losses = [2.0 - 0.05 * min(step, 20) for step in range(40)]  # down to 1.0
    assert not any(watch.add(i, {}, loss) for i, loss in enumerate(losses))
    assert watch.add(40, {}, 100.0) is None  # a spike is no level
    later = [watch.add(41 + i, {}, 1.2) for i in range(20)]
    assert later[0] is None
    assert later[-1].values["loss_drift"] == pytest.approx(0.2)
    assert watch.add(70, {}, math.nan).values == {"loss_drift": math.inf}


def _trains(rank, world_size, directory, options, steps, seconds, targets):
    """Train with clocks of our own: `seconds` of (rank, step) are computing and waiting."""
    on_hosts(rank, range(world_size))
    ddp = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    given_topology = topo_ar.preset("cpu-host", nodes=world_size, ranks_per_node=1)
    now, at, wrong, ways = 50.0 * rank, 0, 0, []
    with topo_ar.attach(
        ddp,
        topology=given_topology,
        timeout_s=20.0,
        telemetry=directory,
        targets=targets,
        **options,
    ) as handle:
        handle.telemetry.clock = handle.hook.path.clock = lambda: now
        submit = handle.communicator.all_reduce

        def all_reduce(*args, **kinds):
            nonlocal now
            now += seconds(rank, at)[1]
            ways.append("plain" if kinds.get("plain") else "planned")
            return submit(*args, **kinds)

        handle.communicator.all_reduce = all_reduce
        for at in range(steps):
            ddp.zero_grad()
            now += seconds(rank, at)[0]
            if targets.loss_drift is not None:
                handle.report_loss(1.0 if at < 30 else 3.0)
            ddp(torch.full((1, 64), float(rank + at % 7))).sum().backward()
            expected = torch.full((64, 64), (world_size - 1) / 2 + at % 7)
            wrong += not torch.allclose(ddp.module.weight.grad, expected, atol=0.05)
        rows = [
            (
                i.first_missed_step,
                i.breach_step,
                i.acted_step,
                i.action,
                i.path_before,
                i.path_after,
            )
            for i in handle.incidents
        ]
        complete = all(incident.complete for incident in handle.incidents)
        return rows, complete, wrong, ways, handle.compression.reason


def _all_slow(rank, step):
    return (FAST_S, SLOW_S if step >= 20 else 0.0)


def _one_slow(rank, step):
    late = SLOW_S if step >= 20 else 0.0
    return (FAST_S + late, 0.0) if rank == 1 else (FAST_S, late)


def _steady(rank, step):
    return (FAST_S, 0.0)


STEP = Targets(step_seconds=LIMIT_S)


def test_all_ranks_roll_back_to_plain_in_the_same_step(ranks, tmp_path) -> None:
    found = ranks.run(_trains, 2, tmp_path, {"plan": "hierarchical"}, 40, _all_slow, STEP)
    assert found[0] == found[1]
    incidents, complete, wrong, ways, _ = found[0]
    # Step 19 ends when step 20 calls, before its wait: the first long one is 20.
    [(first, breach, acted, action, before, after), left] = incidents
    assert (first, breach, acted) == (20, 21, 23)
    assert (action, before, after) == ("plain all-reduce", "planned", "plain")
    assert left[3] == "warned: there is nothing else to try"
    assert ways == ["planned"] * 23 + ["plain"] * 17
    assert complete
    assert wrong == 0
    kept = read_incident(tmp_path / "incident-00000023.json")
    assert kept.limits == {"step_seconds": LIMIT_S}
    assert kept.values["step_seconds"] == pytest.approx(FAST_S + SLOW_S)
    assert [account.rank for account in kept.ranks] == [0, 1]
    assert kept.ranks[1].trace.steps[-1].buckets[0].numel == 64 * 64


def test_a_rank_that_is_late_by_itself_changes_no_plan(ranks, tmp_path) -> None:
    found = ranks.run(_trains, 2, tmp_path, {"plan": "hierarchical"}, 32, _one_slow, STEP)
    incidents, complete, wrong, ways, _ = found[0]
    assert [(row[3], row[5]) for row in incidents] == [("warned", "planned")]
    assert set(ways) == {"planned"}
    assert (complete, wrong) == (True, 0)
    [file] = tmp_path.glob("incident-*.json")
    assert "rank 1" in read_incident(file).cause


def test_with_auto_the_network_is_looked_at_again_first(ranks, tmp_path) -> None:
    found = ranks.run(_trains, 2, tmp_path, {}, 130, _late_slow, STEP, deadline_s=50.0)
    assert found[0][:4] == found[1][:4]
    incidents, complete, wrong, *_ = found[0]
    assert incidents[0][3] == "the network is measured and planned for anew"
    assert incidents[0][2] - incidents[0][0] == 3
    assert [row[2] for row in incidents] == sorted(row[2] for row in incidents)
    assert 2 <= len(incidents) <= 4
    assert incidents[-1][3].startswith("warned")
    assert (complete, wrong) == (True, 0)


def _late_slow(rank, step):
    return (FAST_S, SLOW_S if step >= 60 else 0.0)


def test_a_loss_that_drifts_ends_compression(ranks, tmp_path) -> None:
    options = {"plan": "hierarchical", "compression": "int8", "start_step": 2}
    found = ranks.run(_trains, 2, tmp_path, options, 60, _steady, Targets(loss_drift=0.5))
    for incidents, complete, wrong, _, reason in found:
        assert incidents[0][3] == "gradients are exact again"
        assert "loss_drift above target" in reason
        assert (complete, wrong) == (True, 0)


def _refused(rank, world_size, telemetry):
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="targets need telemetry"):
        topo_ar.attach(ddp, telemetry=telemetry, targets=STEP)


@pytest.mark.parametrize("telemetry", [None, "a.jsonl"])
def test_targets_need_a_place_for_incidents(ranks, telemetry) -> None:
    ranks.run(_refused, 2, telemetry)
