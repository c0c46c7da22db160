from pathlib import Path

import pytest

from experiments.compression_ddp_ranks import Settings, train
from experiments.compression_kernels_powersgd import powersgd_step_seconds
from experiments.compression_pitfalls import PITFALLS, markdown, two_buckets
from experiments.workloads.resnet import resnet18
from tests.compressed_training import on_hosts
from topo_ar.telemetry.records import read_records


@pytest.mark.parametrize(
    "pitfall",
    [
        pytest.param(each, marks=pytest.mark.slow if each is two_buckets else ())
        for each in PITFALLS
    ],
    ids=lambda p: p.__name__,
)
def test_ours_is_right_where_torch_may_not_be(pitfall):
    row = pitfall()
    assert row.right, row


def test_the_documented_table_is_that_of_the_record():
    experiments = Path(__file__).parent.parent / "experiments"
    records = read_records(experiments / "results" / "compression_pitfalls.jsonl")
    assert len(records) == len(PITFALLS)
    assert markdown(records) in (experiments / "README.md").read_text()


def test_both_sides_of_the_kernel_benchmark_run():
    for times in powersgd_step_seconds([(64, 64), (64,)], 2, 3):
        assert len(times) == 3
        assert all(seconds > 0 for seconds in times)


def test_the_ddp_comparison_has_a_row_for_each_candidate(ranks):
    for rows in ranks.run(_side_by_side, 2):
        names = [row["candidate"] for row in rows]
        assert names == ["compute", *TINY.candidates]
        assert all(len(row["seconds"]) == TINY.rounds for row in rows)
        by_name = {row["candidate"]: row for row in rows}
        assert by_name["int8"]["codecs"] == ["int8"]
        assert 0.25 < by_name["int8"]["sent_nbytes"] / by_name["int8"]["dense_nbytes"] < 0.29
        assert by_name["auto"]["reason"]


TINY = Settings(policy="int8", rounds=2, width=8, timeout_s=20.0)


def _side_by_side(rank, world_size):
    on_hosts(rank, [0, 1])
    return train(TINY)


def test_resnet18_has_its_parameters():
    assert round(sum(p.numel() for p in resnet18(10).parameters()), -5) == 11_200_000
