"""What a step takes over its computing, as communication grows against computation."""

from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import (
    GREY,
    Record,
    caption,
    colour,
    count_range,
    legend_below_title,
    marker,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def comm_compute_ratio(rows: list[Record]) -> "Figure":
    """Return the step's time over its computing against the ratio of communication to computation.

    Points are measured, lines are simulated; two lines of theory stand beside: ``1 + r`` where
    nothing is hidden and ``max(1, r)`` where everything is.

    Parameters
    ----------
    rows : list of dict
        Records of ``experiments/03_comm_compute_ratio.py``.

    Raises
    ------
    ConfigError
        If none of them is measured.
    """
    rows = [row for row in rows if row.get("experiment") == "comm_compute_ratio"]
    measured = [row for row in rows if not row["simulated"]]
    if not measured:
        raise ConfigError("the figure of the ratio needs measured rows, and there are none")
    names = list(dict.fromkeys(row["candidate"] for row in measured))
    colours, markers = colour(names), marker(names)
    figure = new_figure(6.4, 4.6)
    axes = figure.subplots()
    low = min(row["ratio"] for row in rows) / 1.2
    high = max(row["ratio"] for row in rows) * 1.2
    theory = [low * (high / low) ** (step / 60) for step in range(61)]
    axes.plot(theory, [1 + r for r in theory], ":", color=GREY, label="1 + r: nothing hidden")
    axes.plot(theory, [max(1, r) for r in theory], "--", color=GREY, label="max(1, r): all hidden")
    for name in names:
        curve = sorted(
            (row["ratio"], row["step_over_compute"])
            for row in rows
            if row["simulated"] and row["candidate"] == name
        )
        if curve:
            axes.plot(*zip(*curve, strict=True), color=colours[name], linewidth=1, alpha=0.8)
        mine = [row for row in measured if row["candidate"] == name]
        middle = [row["step_over_compute"] for row in mine]
        spread = [
            [y - row["low"] for y, row in zip(middle, mine, strict=True)],
            [row["high"] - y for y, row in zip(middle, mine, strict=True)],
        ]
        axes.errorbar(
            [row["ratio"] for row in mine],
            middle,
            yerr=spread,
            fmt=markers[name],
            color=colours[name],
            capsize=2,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.tick_params(which="minor", labelsize=7)
    axes.set_xlabel("communication of plain DDP over computation, r")
    axes.set_ylabel("step time over computing time")
    legend_below_title(axes, num_columns=3)
    samples = count_range(len(row["seconds"]) for row in measured)
    caption(
        figure,
        [
            f"Points: measured on emulated hosts, medians of {samples} steps, bars: 95 %.",
            "Lines: simulated, with a calibration from other runs."
            * any(row["simulated"] for row in rows),
        ],
    )
    return figure
