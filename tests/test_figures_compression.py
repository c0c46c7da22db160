import math
from pathlib import Path

import pytest

from experiments.compression_ddp import table
from experiments.compression_targets import accuracy_lines, kernel_lines
from tests.figure_checks import assert_readable, lines, said, script
from topo_ar import figures
from topo_ar.errors import ConfigError
from topo_ar.figures.codec_speedup import break_even
from topo_ar.telemetry.records import RecordWriter, read_records

RESULTS = Path(__file__).parents[1] / "experiments" / "results"


def training(codec, accuracy, sent, seed=0, feedback=True, optimizer="sgd"):
    return {
        "task": "mnist1d",
        "optimizer": optimizer,
        "codec": codec,
        "feedback": feedback,
        "seed": seed,
        "accuracy": accuracy,
        "node_sent_nbytes_per_step": sent,
    }


TRAININGS = [
    training("none", 0.95, 100_000.0, feedback=False),
    *(training("int8", 0.9 + 0.02 * seed, 26_000.0, seed) for seed in range(3)),
    training("topk:0.01", 0.8, 4000.0),
    training("topk:0.05", 0.9, 20_000.0),
    training("topk:0.01", 0.6, 4000.0, feedback=False),
    training("randomk:0.01", None, None),
    training("none", 0.9, 100_000.0, feedback=False, optimizer="adam"),
]


def test_accuracy_over_bytes_has_means_and_the_range_of_seeds():
    figure = figures.accuracy_over_bytes(TRAININGS)
    sgd, adam = figure.axes
    assert (sgd.get_title(loc="left"), adam.get_title(loc="left")) == (
        "mnist1d, sgd",
        "mnist1d, adam",
    )
    curves = [curve for _, curve in sorted(lines(sgd).items()) if len(curve[0]) == 2]
    assert ([4.0, 20.0], [pytest.approx(20), pytest.approx(10)]) in curves
    (bar,) = [
        container
        for container in sgd.containers
        if container.lines[0].get_xydata().tolist() == [[26.0, pytest.approx(8)]]
    ]
    (segment,) = bar.lines[2][0].get_segments()
    assert [y for _, y in segment] == [pytest.approx(6), pytest.approx(10)]
    (hollow,) = [c for c in sgd.containers if c.lines[0].get_markerfacecolor() == "white"]
    assert hollow.lines[0].get_xydata().tolist() == [[4.0, pytest.approx(40)]]
    assert "1 trainings that were not finite are left out" in said(figure)
    assert "topk: 0.01, 0.05" in said(figure)
    assert_readable(figure)
    with pytest.raises(ConfigError, match="trainings with codecs"):
        figures.accuracy_over_bytes([])


def kernel(name, theirs, ours):
    around = (0.99, 1.0, 1.01)
    return {
        "kernel": name,
        "nbytes": 25_000_000,
        "num_threads": 1,
        "torch_seconds": [theirs * each for each in around],
        "ours_seconds": [ours * each for each in around],
    }


KERNELS = [
    kernel("topk:0.01", 0.08, 0.02),
    kernel("finite check", 0.01, 0.0005),
    kernel("topk:0.01", 0.08, 0.004),
]


def test_kernel_throughput_counts_the_last_row_of_each():
    figure = figures.kernel_throughput(KERNELS)
    (axes,) = figure.axes
    rates = sorted(round(bar.get_width(), 4) for bar in axes.patches)
    assert rates == [0.3125, 2.5, 6.25, 50.0]
    assert "20.00 x (" in said(figure)
    assert "Median of 3 interleaved samples, threads: 1" in said(figure)
    assert "GB/s" in axes.get_xlabel()
    assert_readable(figure)
    with pytest.raises(ConfigError, match="needs rows of kernels"):
        figures.kernel_throughput([])


def step(candidate, rate, seconds, optimizer="sgd", **more):
    samples = [seconds * each for each in (0.99, 1.0, 1.01)]
    return {
        "experiment": "compression_ddp",
        "candidate": candidate,
        "optimizer": optimizer,
        "nic": rate,
        "nodes": 2,
        "ranks_per_node": 4,
        "seconds": samples,
        "step_seconds": [[each] for each in samples],
        "settings": {"optimizer": optimizer, "policy": "int8,topk:0.01"},
        "manifest": {"emulation": "namespaces"},
    } | more


def verdict(codec, sequential, overlapped):
    found = {"sequential_break_even": sequential, "overlapped_break_even": overlapped}
    return {"codec": codec, **found}


PLAN = {"codecs": [verdict("int8", 125e6, 250e6), verdict("topk:0.01", None, None)]}
STEPS = [
    step(candidate, rate, seconds, **more)
    for rate, all_seconds in {
        "100mbit": (0.1, 8.0, 4.0, 1.0, 0.5, 0.5),
        "1gbit": (0.1, 0.8, 0.4, 0.5, 0.2, 0.2),
    }.items()
    for candidate, seconds, more in zip(
        ("compute", "plain DDP", "none", "int8", "topk:0.01", "auto"),
        all_seconds,
        ({}, {}, {}, {}, {}, {"plan": PLAN, "codecs": ["topk:0.01"], "reason": "it is fast"}),
        strict=True,
    )
]
HOOKS = [
    step(hook, rate, 1.0)
    for rate in ("100mbit", "1gbit")
    for hook in ("torch fp16", "torch PowerSGD")
]


def test_break_even_is_where_the_speed_up_crosses_one():
    # 4 times as fast at 0.1 Gbit/s, 0.8 times at 1 Gbit/s, on a line of logarithms.
    found = break_even(STEPS, "int8")
    share = math.log(4) / (math.log(4) - math.log(0.8))
    assert found.measured == pytest.approx(12.5e6 * 10**share)
    assert found.predicted == (125e6, 250e6)
    assert break_even(STEPS, "topk:0.01").measured is None
    assert break_even(STEPS, "topk:0.01").pays_everywhere
    assert break_even(STEPS, "topk:0.01").predicted is None


def test_codec_speedup_is_against_plain_ddp():
    adam = [row | {"optimizer": "adam"} for row in STEPS if row["candidate"] != "topk:0.01"]
    figure = figures.codec_speedup([*STEPS, *HOOKS, *adam])
    left, right, below, beside = figure.axes
    curves = {c.get_label(): c.lines[0].get_xydata().tolist() for c in left.containers}
    assert curves["int8"] == [[0.1, pytest.approx(8)], [1.0, pytest.approx(1.6)]]
    assert set(curves) == {"none", "int8", "topk:0.01", "auto", "torch fp16", "torch PowerSGD"}
    diamonds = [line.get_xdata()[0] for line in right.get_lines() if line.get_marker() == "D"]
    assert diamonds == [pytest.approx(break_even(STEPS, "int8").measured / 125e6)]
    assert [label.get_text() for label in right.get_yticklabels()] == ["int8", "topk:0.01"]
    assert [label.get_text() for label in beside.get_yticklabels()] == ["int8"]
    assert "2 hosts of 4 ranks, adam" in below.get_title(loc="left")
    assert "medians of 3 interleaved rounds" in said(figure)
    assert "emulated on one machine" in said(figure)
    assert_readable(figure)
    with pytest.raises(ConfigError, match="needs records"):
        figures.codec_speedup([])
    with pytest.raises(ConfigError, match="rows of plain DDP and none"):
        figures.codec_speedup(STEPS[:2])


def test_targets_are_held_against_records():
    text = "\n".join(table([*STEPS, *HOOKS]))
    assert "NICs of 100mbit, sgd: 3 rounds in 1 pieces" in text
    assert "auto / best admitted, topk:0.01, n=3" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("auto / best")] == [
        "PASS"
    ] * 2
    assert "16.000 [16.000, 16.000], at most 80.0 for compute PASS" in text
    slower = [
        row
        if row["candidate"] != "auto"
        else step("auto", row["nic"], 3.0) | {key: row[key] for key in ("plan", "codecs", "reason")}
        for row in STEPS
    ]
    missed = "\n".join(table([*slower, *HOOKS]))
    assert missed.count("MISS") == 3


def test_targets_of_kernels_and_accuracy():
    found = list(kernel_lines(KERNELS))
    assert [line.split()[-1] for line in found[1:]] == ["PASS", "PASS"]
    assert list(kernel_lines(KERNELS[:1]))[-1].endswith("MISS")
    rows = read_records(RESULTS / "compression_accuracy.jsonl")
    by_what = {line[:44].strip(): line.split()[-1] for line in accuracy_lines(rows)}
    assert by_what["mnist1d, sgd: lost by int8"] == "PASS"
    lost = training("int8", None, None)
    coded = [training(codec, 0.95, 1.0) for codec in ("powersgd:2", "powersgd:4", "topk:0.01")]
    exact = [training("none", 0.95, 1.0, feedback=False), training("topk:0.01", 0.8, 1.0, 0, False)]
    words = [line.split()[-1] for line in accuracy_lines([*exact, lost, *coded])]
    assert words[1:] == ["MISS", "PASS", "PASS", "0.00", "PASS"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [("accuracy.py", TRAININGS), ("kernels.py", KERNELS), ("codec_speedup.py", [*STEPS, *HOOKS])],
)
def test_plot_scripts(tmp_path, name, rows):
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        for row in rows:
            writer.write(row)
    done = script(name, path, "-o", tmp_path / "figure.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figure.png").stat().st_size > 5000
