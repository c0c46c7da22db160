"""Steps in turns: rows of real ranks, ratios known beforehand, and the simulated scaling."""

import importlib

import pytest

from experiments import emulated_model, jobs
from experiments.compute_load_ranks import COMPUTE, HOOK, PLAIN
from experiments.step_turns import StepSettings, measure_steps
from tests.compressed_training import on_hosts
from topo_ar.errors import ConfigError
from topo_ar.telemetry.records import RecordWriter, read_records

ratio = importlib.import_module("experiments.03_comm_compute_ratio")
cap = importlib.import_module("experiments.04_bucket_cap")
scaling = importlib.import_module("experiments.09_scaling")

TINY = StepSettings(
    batches=(1, 2), caps=(0.01, 25.0), width=8, image_side=8, warm_up=1, samples=2,
    timeout_s=20.0, spans=True,
)  # fmt: skip


def _steps(rank, world_size, hosts):
    on_hosts(rank, hosts)
    return list(measure_steps(TINY))


def test_every_cap_and_candidate_takes_its_turns_and_says_what_its_buckets_take_alone(ranks):
    first, second = ranks.run(_steps, 2, [0, 1], deadline_s=50.0)
    assert [row["seconds"] for row in first] == [row["seconds"] for row in second]
    expected = [(COMPUTE, None), (PLAIN, 0.01), (HOOK, 0.01), (PLAIN, 25.0), (HOOK, 25.0)]
    for batch in TINY.batches:
        mine = [row for row in first if row["batch"] == batch]
        assert [(row["candidate"], row.get("bucket_cap_mib")) for row in mine] == expected
        assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in mine)
        small, large = mine[1], mine[3]
        assert small["num_buckets"] > large["num_buckets"] == 1
        for row in (mine[2], mine[4]):
            nbytes = sum(4 * bucket["numel"] for bucket in row["buckets"])
            assert nbytes == row["gradient_nbytes"]
            assert {span["rank"] for span in row["spans"]} == {0}
            assert all(0 <= s["begin_seconds"] <= s["end_seconds"] for s in row["spans"])
        assert len(small["alone_seconds"]) == 3


def test_a_point_is_the_step_over_computing_at_plain_ddps_ratio():
    compute = {"candidate": COMPUTE, "seconds": [2.0] * 3, "forward_seconds": [0.5] * 3}
    plain = {"candidate": PLAIN, "seconds": [6.0] * 3, "alone_seconds": [5.0] * 3}
    hook = {"candidate": HOOK, "seconds": [3.0] * 3, "alone_seconds": [4.0] * 3}
    row = ratio.compared(hook, compute, plain)
    assert row["ratio"] == 2.5
    assert (row["step_over_compute"], row["low"], row["high"]) == (1.5, 1.5, 1.5)
    assert row["exposed_seconds"] == 1.0
    assert row["overlap_efficiency"] == 0.75
    codec = ratio.compared({**hook, "candidate": "int8"}, compute, plain)
    assert codec["communication_seconds"] is codec["overlap_efficiency"] is None


def test_a_trace_with_communication_is_made_as_long_as_without():
    call = {"dtype": "float32", "done_seconds": 1.0}
    buckets = [
        {**call, "index": 0, "numel": 10, "parameters": ["b"], "shapes": [[10]], "call_seconds": 1},
        {**call, "index": 1, "numel": 30, "parameters": ["a"], "shapes": [[30]], "call_seconds": 4},
    ]
    found = emulated_model.backward_alone({"world_size": 8, "buckets": buckets}, 2.0)
    assert found.seconds == 2.0
    assert found.ready_seconds == pytest.approx((0.5, 2.0))
    assert found.nbytes == 160


def _base(kind, gpus, seconds, exposed=0.0):
    return {"kind": kind, "gpus": gpus, "median_seconds": seconds, "exposed_seconds": exposed}


def test_efficiency_is_against_one_gpu_and_one_node_with_the_simulators_error():
    weak = scaling.with_efficiency(_base("weak", 64, 1.25, 0.25), {1: 1.0, 8: 1.0}, 0.2)
    assert weak["efficiency"] == pytest.approx(0.8)
    assert weak["efficiency_of_node"] == pytest.approx(0.8)
    assert weak["low_efficiency"] == pytest.approx(1 / 1.3)
    assert weak["high_efficiency"] == pytest.approx(1 / 1.2)
    strong = scaling.with_efficiency(_base("strong", 16, 0.1), {1: 1.0, 8: 0.15}, 0.2)
    assert strong["efficiency"] == pytest.approx(1 / 1.6)
    assert strong["efficiency_of_node"] == pytest.approx(0.15 / 0.2)
    assert scaling.with_efficiency(_base("weak", 1, 1.0), {1: 1.0}, 0.2)["efficiency"] == 1


def test_the_simulators_error_is_the_committed_one(tmp_path):
    assert 0 < scaling.error_of_simulator() < 0.2
    with RecordWriter(tmp_path / "none.jsonl") as writer:
        writer.write({"target": "median error from 1 MiB", "value": 0.1})
    with pytest.raises(ConfigError, match="08_predicted_measured"):
        scaling.error_of_simulator(tmp_path / "none.jsonl")


def test_scaling_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "QUICK_SIZES", (1, 8, 16))
    monkeypatch.setattr(scaling, "MODELS", scaling.MODELS[:1])
    monkeypatch.setattr(scaling, "SYSTEMS", scaling.SYSTEMS[-1:])
    assert scaling.run(tmp_path, quick=True) == 0
    path = tmp_path / "scaling.quick.jsonl"
    whole = read_records(path)
    assert len(whole) == 2 + 2 + 8
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:100])
    assert scaling.run(tmp_path, quick=True) == 0
    again = read_records(path)
    assert [row["efficiency"] for row in again] == [row["efficiency"] for row in whole]
    for row in whole:
        assert row["low_efficiency"] <= row["efficiency"] <= row["high_efficiency"]
        assert 0 < row["efficiency"] <= 1
        assert row["simulated"]
    assert "strong resnet50" in capsys.readouterr().out


def test_a_part_counts_when_it_is_whole(tmp_path, capsys):
    def fails():
        yield {"row": 1}
        raise KeyboardInterrupt

    def path_of(name):
        return tmp_path / f"{name}.jsonl"

    parts = [
        jobs.Part("one", 1, lambda: [{"row": 0}]),
        jobs.Part("two", 2, fails),
    ]
    with pytest.raises(KeyboardInterrupt):
        jobs.run_parts(parts, path_of)
    assert read_records(path_of("one")) == [{"row": 0}]
    assert not path_of("two").exists()
    assert "one: 1 of 2, about 3 min left" in capsys.readouterr().out
    jobs.run_parts([parts[0], jobs.Part("two", 2, lambda: [{"row": 2}])], path_of)
    assert "two: 1 of 1" in capsys.readouterr().out
    assert read_records(path_of("two")) == [{"row": 2}]


def test_hosts_of_uneven_and_misplaced_ranks_are_what_they_are_called():
    uneven = importlib.import_module("experiments.06_uneven")
    placement = importlib.import_module("experiments.07_placement")
    spec = uneven.degraded(4, 0.75)
    assert [node.nics[0] / uneven.RATE for node in spec.nodes] == [1, 1, 1, 0.25]
    assert [len(node.ranks) for node in uneven.unequal().nodes] == [4, 2, 2]
    assert [placement.crossings(placement.spec_of(case)) for case in placement.CASES] == [
        2, 8, 4, 4,
    ]  # fmt: skip
    assert sorted(placement.dealt(3, 4)) == list(range(12))
    assert [node.rack for node in placement.spec_of("racks-dealt").nodes] == ["r0", "r1"] * 2


def test_weighted_shards_are_simulated_to_win_where_a_node_lost_half_of_its_nic(monkeypatch):
    uneven = importlib.import_module("experiments.06_uneven")
    monkeypatch.setattr(
        emulated_model, "host", importlib.import_module("experiments.08_predicted_measured").Host
    )
    well, weighted, equal = (
        emulated_model.all_reduce(uneven.degraded(4, lost), uneven.NBYTES, equal=is_equal)
        for lost, is_equal in ((0.0, False), (0.5, False), (0.5, True))
    )
    # Equal shards wait for the slow NIC, which carries half; weighted ones for what all NICs
    # together carry, 4 over 3.5, and for the slow node's own ranks.
    assert equal / well == pytest.approx(2.0, rel=0.05)
    assert 1.0 < weighted / well < 1.6
