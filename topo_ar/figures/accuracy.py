"""What compression costs in accuracy, over the bytes that it sends."""

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import (
    GREY,
    Record,
    caption,
    colour,
    marker,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DENSE = "none"
_KB = 1e3
# Accuracies are drawn as their errors on a logarithmic axis: 97 and 98 % differ as 60 and 73 do.
_TICKS = (99.9, 99.5, 99, 98, 95, 90, 80, 60, 30, 10)
_LEAST_ERROR = 0.05
_MORE = 1.25
_BYTE_TICKS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)


@styled
def accuracy_over_bytes(rows: list[Record]) -> "Figure":
    """Return accuracy over the bytes a node sends in a step, a panel for each task and optimizer.

    A line joins the settings of a codec with error feedback; without it points are hollow. Points
    are means over seeds, their bars reach from the worst seed to the best. Trainings that were not
    finite are left out and counted.

    Parameters
    ----------
    rows : list of dict
        Rows of ``05_compression.py --accuracy``: one training each.

    Raises
    ------
    ConfigError
        If there is none.
    """
    rows = [row for row in rows if "accuracy" in row and "codec" in row]
    finite = [row for row in rows if row["accuracy"] is not None]
    if not finite:
        raise ConfigError("the accuracy figure needs rows of trainings with codecs; there are none")
    tasks = list(dict.fromkeys(row["task"] for row in finite))
    optimizers = list(dict.fromkeys(row["optimizer"] for row in finite))
    names = list(dict.fromkeys(_family(row) for row in finite))
    figure = new_figure(4.3 * len(optimizers), 1.2 + 2.9 * len(tasks))
    panels = figure.subplots(len(tasks), len(optimizers), squeeze=False, sharex="row", sharey="row")
    for task, line in zip(tasks, panels, strict=True):
        for optimizer, axes in zip(optimizers, line, strict=True):
            mine = [r for r in finite if (r["task"], r["optimizer"]) == (task, optimizer)]
            axes.set_title(f"{task}, {optimizer}", loc="left")
            _draw(axes, mine, names)
        _scales(line[0], [row for row in finite if row["task"] == task])
        line[0].set_ylabel("accuracy (%)")
    for axes in panels[-1]:
        axes.set_xlabel("sent by a node in a step (kB)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=8)
    _describe(figure, rows, finite)
    return figure


def _family(row: Record) -> str:
    return str(row["codec"]).partition(":")[0]


def _draw(axes: "Axes", rows: list[Record], names: list[str]) -> None:
    coded = [name for name in names if name != DENSE]
    colours, markers = {DENSE: GREY} | colour(coded), {DENSE: "*"} | marker(coded)
    dense = [100 - 100 * row["accuracy"] for row in rows if row["codec"] == DENSE]
    if dense:
        axes.axhline(mean(dense), color=GREY, linestyle="--", linewidth=1)
    for name in names:
        for feedback in (True, False):
            mine = [r for r in rows if _family(r) == name and r["feedback"] is feedback]
            points = _points(mine)
            face = colours[name] if feedback or name == DENSE else "white"
            if feedback and points:
                axes.plot([p[0] for p in points], [p[1] for p in points], color=colours[name])
            for nbytes, middle, least, most in points:
                axes.errorbar(
                    [nbytes],
                    [middle],
                    yerr=([middle - least], [most - middle]),
                    color=colours[name],
                    marker=markers[name],
                    markerfacecolor=face,
                    elinewidth=1,
                    capsize=2,
                    linestyle="none",
                )
        axes.plot([], [], color=colours[name], marker=markers[name], label=name)


def _points(rows: Sequence[Record]) -> list[tuple[float, float, float, float]]:
    """Return kB, and mean, least and greatest error in %, of each setting of a codec."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        found.setdefault(row["codec"], []).append(row)
    points = []
    for same in found.values():
        errors = [max(_LEAST_ERROR, 100 - 100 * row["accuracy"]) for row in same]
        sent = mean(row["node_sent_nbytes_per_step"] for row in same) / _KB
        points.append((sent, mean(errors), min(errors), max(errors)))
    return sorted(points)


def _scales(axes: "Axes", rows: Sequence[Record]) -> None:
    errors = [max(_LEAST_ERROR, 100 - 100 * row["accuracy"]) for row in rows]
    sent = [row["node_sent_nbytes_per_step"] / _KB for row in rows]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(max(errors) * _MORE, min(errors) / _MORE)
    axes.set_xlim(min(sent) / _MORE, max(sent) * _MORE)
    low, high = axes.get_ylim()[1], axes.get_ylim()[0]
    ticks = [tick for tick in _TICKS if low <= 100 - tick <= high]
    axes.set_yticks([100 - tick for tick in ticks], [f"{tick:g}" for tick in ticks])
    left, right = axes.get_xlim()
    kilobytes = [tick for tick in _BYTE_TICKS if left <= tick <= right]
    axes.set_xticks(kilobytes, [f"{tick:g}" for tick in kilobytes])
    axes.minorticks_off()


def _describe(figure: "Figure", rows: Sequence[Record], finite: Sequence[Record]) -> None:
    arguments = {
        name: sorted({row["codec"].partition(":")[2] for row in finite if _family(row) == name})
        for name in dict.fromkeys(map(_family, finite))
    }
    settings = "; ".join(
        f"{name}: {', '.join(found)}" for name, found in arguments.items() if found != [""]
    )
    seeds = sorted({row["seed"] for row in rows})
    lost = len(rows) - len(finite)
    caption(
        figure,
        [
            f"Mean of {len(seeds)} seeds; bars: worst and best of them. Dashed: no compression.",
            "Filled: with error feedback; hollow: without.",
            f"Settings, from few bytes to many: {settings}." * bool(settings),
            f"{lost} trainings that were not finite are left out." * bool(lost),
        ],
    )
