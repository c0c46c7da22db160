"""Figures of training experiments: what they show of rows that are known."""

import pytest

from topo_ar import figures
from topo_ar.errors import ConfigError

RATIO = {"experiment": "comm_compute_ratio", "simulated": False, "candidate": "hook", "ratio": 2.0}
RATIO |= {"step_over_compute": 2.5, "low": 2.4, "high": 2.7, "seconds": [1.0] * 10}
CAP = {"experiment": "bucket_cap", "simulated": False, "candidate": "hook", "nic": "1gbit"}
CAP |= {"bucket_cap_mib": 1.0, "median_seconds": 0.2, "low_seconds": 0.19, "high_seconds": 0.25}
CAP |= {"seconds": [0.2] * 5, "chosen_cap_mib": 2.0}
SCALING = {"experiment": "scaling", "kind": "weak", "model": "m", "system": "s", "gpus": 8}
SCALING |= {"candidate": "flat", "efficiency": 0.9, "low_efficiency": 0.8, "high_efficiency": 0.95}
SCALING |= {"seconds": [1.0] * 3}
TRAINING = {"record": "training", "workload": "vision", "candidate": "hook", "seed": 0}
TRAINING |= {"nic": "20mbit", "metric": "accuracy", "target": 0.96}
TRAINING |= {"evaluations": [{"seconds": 1.0, "quality": 0.5}, {"seconds": 3.0, "quality": 0.97}]}


def sentence(figure):
    return figure._supxlabel.get_text()


def test_ratio_has_points_with_intervals_the_curve_and_theory():
    curve = [{**RATIO, "simulated": True, "ratio": r, "step_over_compute": 1 + r} for r in (8, 1)]
    figure = figures.comm_compute_ratio([RATIO, *curve, {"experiment": "other"}])
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    nothing = lines["1 + r: nothing hidden"]
    for r, y in zip(nothing.get_xdata(), nothing.get_ydata(), strict=True):
        assert y == pytest.approx(1 + r)
    simulated = next(line for line in axes.lines if list(line.get_xdata()) == [1, 8])
    assert list(simulated.get_ydata()) == [2, 9]
    (bars,) = axes.containers
    (segment,) = bars.lines[2][0].get_segments()
    assert segment.tolist() == [[2.0, pytest.approx(2.4)], [2.0, pytest.approx(2.7)]]
    assert "medians of 10 steps" in sentence(figure)
    with pytest.raises(ConfigError, match="needs measured rows"):
        figures.comm_compute_ratio(curve)


def test_bucket_caps_are_in_order_with_the_choice_marked():
    rows = [{**CAP, "bucket_cap_mib": cap, "median_seconds": cap / 10 + 0.1} for cap in (4.0, 1.0)]
    rows = [{**row, "low_seconds": 0.1, "high_seconds": 0.6} for row in rows]
    figure = figures.step_over_bucket_cap(rows)
    (axes,) = figure.axes
    points = axes.containers[0].lines[0]
    assert list(points.get_xdata()) == [1.0, 4.0]
    assert list(points.get_ydata()) == pytest.approx([200, 500])
    marked = next(line for line in axes.lines if line.get_label() == "the simulator's best")
    assert list(marked.get_xdata()) == [2.0, 2.0]
    with pytest.raises(ConfigError, match="needs measured rows"):
        figures.step_over_bucket_cap([{**CAP, "simulated": True}])


def test_scaling_has_a_panel_for_each_model_and_system():
    rows = [{**SCALING, "gpus": gpus, "model": model} for model in "ab" for gpus in (64, 8)]
    figure = figures.scaling_efficiency(rows)
    assert [axes.get_title() for axes in figure.axes] == ["a, s", "b, s"]
    assert list(figure.axes[0].lines[0].get_xdata()) == [8, 64]
    assert "weak scaling" in sentence(figure)
    with pytest.raises(ConfigError, match="kind 'strong'"):
        figures.scaling_efficiency(rows, kind="strong")


def test_time_to_accuracy_has_a_line_a_seed_and_one_name_a_candidate():
    rows = [{**TRAINING, "seed": seed} for seed in (0, 1)]
    figure = figures.quality_over_time(rows)
    (axes,) = figure.axes
    assert [list(line.get_xdata()) for line in axes.lines[:2]] == [[1.0, 3.0]] * 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["hook", "target"]
    assert "2 in all" in sentence(figure)
    with pytest.raises(ConfigError, match="needs trainings"):
        figures.quality_over_time([{"record": "training", "evaluations": []}])
