"""Workloads: what is read, how it is divided, what counts as reached; short trainings learn."""

import importlib
import importlib.util
import os

import numpy as np
import pytest
import torch

from experiments.training_runs import HOOK, PLAIN, RunSettings, one_cycle, train
from experiments.workloads import catalogue, language, packaged, recommender, vision
from experiments.workloads.catalogue import NAMES, load
from experiments.workloads.workload import Baseline, Place
from tests.compressed_training import on_hosts
from topo_ar.telemetry.records import read_records

script = importlib.import_module("experiments.11_time_to_accuracy")


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_installed_is_made_up_and_says_so(nothing_installed, capsys, name):
    found = load(name)
    assert found.synthetic
    assert found.source.startswith("generated")
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 1
    assert "make workloads-data" in messages[0]
    assert 0 < found.baseline.quality < 10
    again = load(name)
    assert all(torch.equal(found.data[key], again.data[key]) for key in found.data)


def test_a_recommender_holds_out_each_users_last_item_and_ranks_it_among_unseen_ones():
    users = np.array([0, 0, 1, 1, 1, 2, 2, 2])
    items = np.array([5, 6, 5, 7, 8, 150, 1, 2])
    times = np.array([9, 3, 1, 3, 2, 1, 2, 3])
    found = recommender.held_out(users, items, times)
    assert found["held_out_users"].tolist() == [0, 1, 2]
    assert found["candidates"][:, 0].tolist() == [5, 7, 2]
    kept = sorted(zip(found["users"].tolist(), found["items"].tolist(), strict=True))
    assert kept == [(0, 6), (1, 5), (1, 8), (2, 1), (2, 150)]
    assert found["before"][found["items"] == 8].tolist() == [5]
    assert found["before"][found["items"] == 6].tolist() == [151]  # nothing
    assert found["held_out_before"].tolist() == [6, 8, 1]
    for user, others in enumerate(found["candidates"][:, 1:]):
        assert len(others.unique()) == 99
        assert not set(others.tolist()) & set(items[users == user].tolist())


def test_a_hit_is_one_of_the_first_ten_and_ties_count_half():
    fit = torch.zeros(4, 100)
    fit[0, 0] = 1.0  # the best
    fit[1, 1:10] = 1.0  # nine are better, the others are worse
    fit[1, 10:] = -1.0
    fit[2, 1:11] = 1.0  # ten are better
    assert recommender.hits_of(fit).tolist() == [1, 1, 0, 0]  # the last: all the same


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_a_nodes_interactions_are_those_of_its_users(num_nodes):
    users = torch.arange(50).repeat(3)
    shards = [recommender.shard(users, node, num_nodes) for node in range(num_nodes)]
    assert sorted(torch.cat(shards).tolist()) == list(range(150))
    owners = [set(users[each].tolist()) for each in shards]
    assert sum(map(len, owners)) == 50


def test_ranks_of_a_recommender_train_on_their_nodes_users_alone(nothing_installed):
    found = load("recommender")
    for node in range(2):
        places = [Place(4 * node + r, 8, node, 2, r, 4) for r in range(4)]
        taken = [found.indices(0, 1, seed=3, place=place) for place in places]
        together = torch.cat(taken)
        assert len(together) == len(together.unique()) == found.global_batch // 2
        assert set((found.data["users"][together] % 2).tolist()) == {node}


def test_ranks_divide_each_batch_and_an_epoch_takes_no_example_twice(nothing_installed):
    found = load("vision")
    places = [Place(rank, 8) for rank in range(8)]
    taken = [
        found.indices(2, step, 5, place)
        for step in range(found.steps_per_epoch)
        for place in places
    ]
    assert {len(each) for each in taken} == {32}
    together = torch.cat(taken)
    assert len(together.unique()) == len(together) == 15 * 256
    assert not torch.equal(found.indices(3, 0, 5, places[0]), taken[0])


def test_bert_masks_15_percent_of_the_pieces_and_shows_a_tenth_of_these():
    pieces = torch.randint(400, (500, 64), generator=torch.Generator().manual_seed(0))
    shown, wanted = language.masked(pieces, 512, 511, torch.Generator().manual_seed(1))
    assert wanted.float().mean() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(shown[~wanted], pieces[~wanted])
    assert (shown[wanted] == 511).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (shown[wanted] == pieces[wanted]).float().mean() == pytest.approx(0.1, abs=0.02)


def test_the_unigram_cross_entropy_is_that_of_training_frequencies_at_the_places_asked():
    data = {
        "train": torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1]]),  # 7 and 3 of 12 with one more each
        "held_out": torch.tensor([[0, 1, 2]]),
        "held_out_wanted": torch.tensor([[1, 1, 0]]),
        "num_pieces": torch.tensor(4),
    }
    found = language.Language(data, "by hand", synthetic=True)
    right = -(np.log(7 / 12) + np.log(3 / 12)) / 2
    assert found.baseline == Baseline("unigram cross-entropy", pytest.approx(right))
    assert found.target == pytest.approx(right - 0.25)
    assert found.reached(right - 0.26)
    assert not found.reached(right - 0.24)


def test_markup_of_a_page_is_left_out():
    long = "the first letter and the first vowel of the alphabet, which has many more of both "
    dump = (
        "<text>#REDIRECT [[B]]</text>"
        "<text>'''A''' is {{lang|x {{y}}}} [[vowel|VOWEL]] &lt;ref&gt;no&lt;/ref&gt; "
        f"{long}\n"
        f"* {long}\n{{| a table {long} |}}\nshort</text>"
    )
    assert list(language.wikipedia_pages(dump)) == [[f"a is vowel {long.strip()}"]]


def test_the_learning_rate_rises_in_a_tenth_and_ends_near_nothing():
    rates = [one_cycle(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 1e-3


class _Toy(vision.Vision):
    """Stripes that a few steps tell apart."""

    width = 8
    global_batch = 8
    target = 0.5
    rate = 0.02


def _train(rank, world_size, hosts, options):
    """Train on the generated stripes; return rank 0's rows."""
    on_hosts(rank, hosts)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    real = packaged.find_spec, catalogue._WORKLOADS["vision"]
    packaged.find_spec = lambda name: None
    catalogue._WORKLOADS["vision"] = (_Toy, vision.read_vision)
    try:
        return list(train(RunSettings(workload="vision", timeout_s=20.0, **options)))
    finally:  # other tests use this process
        packaged.find_spec, catalogue._WORKLOADS["vision"] = real
        del os.environ["LOCAL_WORLD_SIZE"]


def _curves(rows):
    return {
        row["candidate"]: [each["quality"] for each in row["evaluations"]]
        for row in rows
        if row["record"] == "training"
    }


def test_a_training_that_was_interrupted_goes_on_as_if_it_had_not_been(ranks, tmp_path):
    options = {"candidates": (PLAIN, HOOK, "topk:0.25"), "epochs": 2, "steps": 6}
    whole = ranks.run(_train, 2, [0, 1], options)[0]
    kept = {**options, "checkpoint": str(tmp_path / "job.checkpoint")}
    first = ranks.run(_train, 2, [0, 1], {**kept, "stop_after": 1})[0]
    assert {row["record"] for row in first} == {"evaluation"}
    second = ranks.run(_train, 2, [0, 1], kept)[0]
    assert _curves(second) == _curves(whole)
    for row in second:
        if row["record"] == "training":
            assert len(row["seconds"]) == 12
            assert [each["step"] for each in row["evaluations"]] == [6, 12]
            assert row["synthetic"]
    assert _curves(second)["topk:0.25"][0] == _curves(second)[PLAIN][0]  # exact for ten steps


def _row(candidate, seed, quality, seconds, reached):
    return {
        "workload": "vision", "candidate": candidate, "seed": seed, "data": "by hand",
        "synthetic": False, "metric": "accuracy", "falling": False, "target": 0.96,
        "tolerance": 0.01, "baseline": {"name": "chance", "quality": 0.1}, "quality": quality,
        "target_reached": quality >= 0.96, "reached_seconds": reached, "seconds": [seconds] * 3,
    }  # fmt: skip


def test_the_table_compares_means_over_seeds_with_plain_ddp():
    rows = [
        *(_row(PLAIN, seed, 0.97, 0.4, 10.0 + seed) for seed in range(3)),
        *(_row(HOOK, seed, 0.965, 0.2, 5.0) for seed in range(3)),
        _row("int8", 0, 0.95, 0.1, None),
        _row("int8", 1, 0.97, 0.1, None),
        _row("int8", 2, 0.95, 0.1, 3.0),
    ]
    head, plain, hook, codec = script.workload_table(rows)
    assert "target 0.9600, chance 0.1000" in head
    assert "target met by 3 of 3; in 11.0 s (10.0, 11.0, 12.0)" in plain
    assert "2.00 [2.00, 2.00] x plain DDP; 0.0050 apart: PASS" in hook
    assert "target met by 1 of 3; in inf s (inf, inf, 3.0)" in codec
    assert codec.endswith("0.0133 apart: MISS")


def test_seeds_that_are_there_are_not_trained_again(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(script, "_make", lambda settings, out: made.append(settings) or [])
    script.path_of(tmp_path, "vision_0", quick=False).touch()
    monkeypatch.setattr(
        "sys.argv",
        ["x", "--only", "vision", "--seeds", "2", "--out", str(tmp_path)],
    )
    assert script.main() == 0
    assert [settings.seed for settings in made] == [1]
    assert read_records(script.path_of(tmp_path, "vision_1", quick=False)) == []
    assert "vision_1: 1 of 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_training_of_a_recommender_beats_popularity(ranks):
    if importlib.util.find_spec("recbole") is None:
        pytest.skip("needs make workloads-data")
    options = {"candidates": (PLAIN, HOOK), "epochs": 3}
    rows = ranks.run(_recommend, 2, options, deadline_s=280.0)[0]
    for row in rows:
        if row["record"] == "training":
            assert not row["synthetic"]
            assert row["quality"] > row["baseline"]["quality"] + 0.05


def _recommend(rank, world_size, options):
    return list(train(RunSettings(workload="recommender", timeout_s=60.0, **options)))


def test_the_script_for_a_workstation_says_what_it_chose(ranks):
    for plain, name in ((True, PLAIN), (False, "hook:auto")):
        first, second = ranks.run(_on_a_workstation, 2, plain, deadline_s=50.0)
        assert first["candidate"] == name
        assert len(first["seconds"]) == len(first["losses"]) == 2
        assert (first["path"] is None) == plain
        assert first["losses"] == second["losses"]


def _on_a_workstation(rank, world_size, plain):
    real = packaged.find_spec, catalogue._WORKLOADS["vision"]
    packaged.find_spec = lambda name: None
    catalogue._WORKLOADS["vision"] = (_Toy, vision.read_vision)
    try:
        return importlib.import_module("experiments.workstation").train(1, 2, plain=plain)
    finally:
        packaged.find_spec, catalogue._WORKLOADS["vision"] = real
