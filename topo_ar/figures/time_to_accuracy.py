"""What each plan and codec buys on a slow network: quality over wall time."""

from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import GREY, Record, caption, colour, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def quality_over_time(rows: list[Record]) -> "Figure":
    """Return quality over the clock of each candidate: a panel a workload, a line a seed.

    Parameters
    ----------
    rows : list of dict
        Records of ``experiments/11_time_to_accuracy.py``.

    Raises
    ------
    ConfigError
        If there are none.
    """
    rows = [row for row in rows if row.get("record") == "training" and row.get("evaluations")]
    if not rows:
        raise ConfigError("the figure of time to accuracy needs trainings, and there are none")
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    colours = colour(dict.fromkeys(row["candidate"] for row in rows))
    figure = new_figure(max(5.2, 4.0 * len(workloads)), 4.2)
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for workload, axes in zip(workloads, panels, strict=True):
        mine = [row for row in rows if row["workload"] == workload]
        seen: set[str] = set()
        for row in mine:
            name = row["candidate"]
            times = [point["seconds"] for point in row["evaluations"]]
            label = None if name in seen else name
            seen.add(name)
            quality = [point["quality"] for point in row["evaluations"]]
            axes.plot(times, quality, color=colours[name], linewidth=1, alpha=0.8, label=label)
        axes.axhline(mine[0]["target"], color=GREY, linestyle="--", linewidth=1, label="target")
        axes.set_title(f"{workload}, NICs of {mine[0]['nic']}", pad=34)
        axes.set_xlabel("time in steps (s)")
        axes.set_ylabel(mine[0]["metric"])
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)
    seeds = len({row["seed"] for row in rows})
    caption(
        figure,
        [
            f"A line a seed, {seeds} in all; targets were set before.",
            "The clock adds up a candidate's own steps; evaluations do not count.",
        ],
    )
    return figure
