"""All-reduces beside compute: rows of real ranks, and a table from rows whose ratios are known."""

import pytest

from experiments import compute_load
from experiments.auto_choice_ranks import AUTO
from experiments.compute_load_ranks import (
    COMPUTE,
    GLOO,
    HOOK,
    HOOK_FLAT,
    HOOK_ZERO_COPY,
    PLAIN,
    PLAN,
    ZERO_COPY,
    Settings,
)
from tests.compressed_training import on_hosts
from topo_ar.telemetry.records import RecordWriter

TINY = Settings(
    samples=3, warm_up=1, nbytes=4000, side=128, idle_seconds=0.01, width=8, image_side=8,
    timeout_s=20.0, auto_width=8, auto_trials=1,
)  # fmt: skip


def _measured(rank, world_size, part, hosts):
    on_hosts(rank, hosts)
    return compute_load.PARTS[part].measure(TINY)


def test_every_way_to_reduce_is_timed_beside_products(ranks):
    for rows in ranks.run(_measured, 2, "products", [0, 1]):
        assert [row["candidate"] for row in rows] == [COMPUTE, GLOO, PLAN, ZERO_COPY]
        for row in rows:
            assert len(row["seconds"]) == len(row["products_per_second"]) == TINY.samples
            assert min(row["seconds"]) > 0
        assert min(rows[0]["products_per_second"]) > 0


def test_every_way_to_train_takes_its_turns(ranks):
    results = ranks.run(_measured, 2, "step", [0, 0])
    assert results[0] == results[1]
    names = [row["candidate"] for row in results[0]]
    assert names == [PLAIN, HOOK, HOOK_ZERO_COPY, HOOK_FLAT, COMPUTE]
    assert all(len(row["seconds"]) == TINY.samples for row in results[0])


def test_what_auto_chooses_stands_beside_what_it_chose_from(ranks):
    results = ranks.run(_measured, 2, "auto-one-node", [0, 0], deadline_s=50.0)
    assert results[0] == results[1]
    assert [row["candidate"] for row in results[0]] == [AUTO, PLAIN, HOOK, HOOK_FLAT]
    choice, *rows = results[0]
    assert choice["path"] in {"planned", "plain"}
    assert choice["steps"] in {16, 24, 32, 40}
    assert choice["speedup"][1] <= choice["speedup"][0] <= choice["speedup"][2]
    assert all(len(row["seconds"]) == TINY.samples for row in rows)


def test_the_table_says_whether_auto_chose_well():
    rows = [
        {"candidate": AUTO, "path": "planned", "reason": "because"},
        _row(PLAIN, 0.3),
        _row(HOOK, 0.1),
        _row(HOOK_FLAT, 0.4),
    ]
    *_, flat, ours = compute_load.choice_table(rows)
    assert flat.split()[-4:] == ["0.750", "[0.750,", "0.750]", "MISS"]
    assert ours.startswith("auto, planned")
    assert ours.split()[-4:] == ["3.000", "[3.000,", "3.000]", "PASS"]


def test_core_time_is_the_share_of_products_that_is_lost():
    idle = {"products_per_second": [1000.0, 500.0]}
    row = {"seconds": [0.2, 0.4], "products_per_second": [750.0, 500.0], "cores": 2}
    assert compute_load.core_seconds(row, idle) == pytest.approx([0.1, 0.0])


def _row(candidate, seconds, products_per_second=1000.0):
    return {
        "candidate": candidate,
        "seconds": [seconds] * 3,
        "products_per_second": [products_per_second] * 3,
        "cores": 2,
    }


def test_the_table_holds_targets_against_the_rows(tmp_path):
    with RecordWriter(compute_load.path_of(tmp_path, "products", quick=False)) as writer:
        for row in (
            _row(COMPUTE, 0.5),
            _row(GLOO, 0.4, 700.0),
            _row(PLAN, 0.2, 500.0),
            _row(ZERO_COPY, 0.3, 1000.0),
        ):
            writer.write(row)
    with RecordWriter(compute_load.path_of(tmp_path, "step", quick=False)) as writer:
        steps = {PLAIN: 0.5, HOOK: 0.45, HOOK_ZERO_COPY: 0.48, HOOK_FLAT: 0.51, COMPUTE: 0.4}
        for name, seconds in steps.items():
            writer.write(_row(name, seconds))
    verdicts = [
        line.split(":")[-1].split()
        for line in compute_load.table(tmp_path, quick=False)
        if any(word in line for word in ("PASS", "MISS", "NONE"))
    ]
    words = [next(w for w in line if w in ("PASS", "MISS", "NONE")) for line in verdicts]
    # The products: twice as fast for 0.83 of the core time; 1.33 as fast, and nothing to compare.
    # The steps: 2 and 1.25 times less exposed, and two per cent lost.
    assert words == ["PASS", "PASS", "MISS", "NONE", "PASS", "PASS", "MISS"]


def test_parts_that_are_there_are_not_measured_again(tmp_path, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(compute_load, "_measure", lambda name, *rest: measured.append(name))
    compute_load.path_of(tmp_path, "products", quick=False).touch()
    compute_load.run(["products", "step"], tmp_path, quick=False)
    assert measured == ["step"]
    assert "step: 1 of 1, about 3 min left" in capsys.readouterr().out
