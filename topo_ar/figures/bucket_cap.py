"""How large DDP's buckets should be: step time over bucket cap."""

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
def step_over_bucket_cap(rows: list[Record]) -> "Figure":
    """Return the step's time over the bucket cap, measured and simulated, the chosen cap marked.

    Parameters
    ----------
    rows : list of dict
        Records of ``experiments/04_bucket_cap.py``.

    Raises
    ------
    ConfigError
        If none of them is measured.
    """
    rows = [row for row in rows if row.get("experiment") == "bucket_cap"]
    measured = [row for row in rows if not row["simulated"]]
    if not measured:
        raise ConfigError("the figure of bucket caps needs measured rows, and there are none")
    names = list(dict.fromkeys(row["candidate"] for row in measured))
    colours, markers = colour(names), marker(names)
    figure = new_figure(6.4, 4.4)
    axes = figure.subplots()
    for name in names:
        simulated = sorted(
            (row["bucket_cap_mib"], 1000 * row["median_seconds"])
            for row in rows
            if row["simulated"] and row["candidate"] == name
        )
        if simulated:
            axes.plot(*zip(*simulated, strict=True), color=colours[name], linewidth=1, alpha=0.8)
        mine = sorted(
            (row for row in measured if row["candidate"] == name),
            key=lambda row: float(row["bucket_cap_mib"]),
        )
        middle = [1000 * row["median_seconds"] for row in mine]
        below = [1000 * (row["median_seconds"] - row["low_seconds"]) for row in mine]
        above = [1000 * (row["high_seconds"] - row["median_seconds"]) for row in mine]
        axes.errorbar(
            [row["bucket_cap_mib"] for row in mine],
            middle,
            yerr=[below, above],
            fmt=markers[name],
            color=colours[name],
            capsize=2,
            label=name,
        )
    chosen = measured[0].get("chosen_cap_mib")
    if chosen is not None:
        axes.axvline(chosen, color=GREY, linestyle="--", linewidth=1, label="the simulator's best")
    axes.set(xscale="log", ylim=(0, None))
    axes.set_xlabel("bucket cap (MiB)")
    axes.set_ylabel("step time (ms)")
    legend_below_title(axes)
    samples = count_range(len(row["seconds"]) for row in measured)
    caption(
        figure,
        [
            f"Points: measured on emulated hosts, NICs of {measured[0]['nic']}, medians of "
            f"{samples} steps, bars: 95 %.",
            "Lines: simulated." * any(row["simulated"] for row in rows),
        ],
    )
    return figure
