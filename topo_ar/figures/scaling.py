"""How training scales to thousands of GPUs: efficiency over the number of GPUs."""

from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import (
    GREY,
    Record,
    caption,
    colour,
    count_range,
    marker,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def scaling_efficiency(rows: list[Record], kind: str = "weak") -> "Figure":
    """Return simulated efficiency against one GPU: a panel for each model and system.

    Parameters
    ----------
    rows : list of dict
        Records of ``experiments/09_scaling.py``.
    kind : str
        ``weak`` (the batch of a GPU is kept) or ``strong`` (the global batch is).

    Raises
    ------
    ConfigError
        If no row is of that kind.
    """
    rows = [row for row in rows if row.get("experiment") == "scaling" and row["kind"] == kind]
    if not rows:
        raise ConfigError(f"the scaling figure needs rows of kind {kind!r}, and there are none")
    models = list(dict.fromkeys(row["model"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    colours, markers = colour(names), marker(names)
    figure = new_figure(2.9 * len(systems) + 0.6, 2.1 * len(models) + 1.2)
    panels = figure.subplots(len(models), len(systems), squeeze=False, sharex=True, sharey=True)
    for model, line in zip(models, panels, strict=True):
        for system, axes in zip(systems, line, strict=True):
            for name in names:
                mine = [
                    row
                    for row in rows
                    if (row["model"], row["system"], row["candidate"]) == (model, system, name)
                ]
                mine.sort(key=lambda row: int(row["gpus"]))
                gpus = [row["gpus"] for row in mine]
                middle = [row["efficiency"] for row in mine]
                style = {"color": colours[name], "marker": markers[name], "markersize": 3}
                axes.plot(gpus, middle, label=name, linewidth=1, **style)
                low = [row["low_efficiency"] for row in mine]
                high = [row["high_efficiency"] for row in mine]
                axes.fill_between(gpus, low, high, color=colours[name], alpha=0.15, linewidth=0)
            axes.axhline(1, color=GREY, linewidth=0.8, linestyle="--")
            axes.set(xscale="log", ylim=(0, 1.1))
            axes.set_title(f"{model}, {system}", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("GPUs")
    for line in panels:
        line[0].set_ylabel("efficiency")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(names))
    draws = count_range(len(row["seconds"]) for row in rows)
    caption(
        figure,
        [
            f"Simulated, {kind} scaling against one GPU; median of {draws} draws of jitter.",
            "Bands: exposed communication moved by the 95th percentile of the simulator's errors "
            "on emulated hosts.",
        ],
    )
    return figure
