"""A training with the plain all-reduce beside one through the hook."""

from statistics import median, quantiles
from typing import TYPE_CHECKING

from topo_ar.figures.style import (
    GREY,
    Record,
    caption,
    colour,
    legend_below_title,
    new_figure,
    one_of,
    styled,
)
from topo_ar.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def step_time(rows: list[Record]) -> "Figure":
    """Return a bar for each candidate: the median step, and the part that waited for communication.

    Parameters
    ----------
    rows : list of dict
        Rows with ``candidate``, ``world_size``, ``step_seconds`` (all samples),
        ``exposed_seconds`` and ``overlap_efficiency`` (null without communication); rows of the
        same candidate are pooled, with the median of their exposed times.

    Raises
    ------
    ConfigError
        If there are no rows, or they are of different world sizes.
    """
    (world_size,) = one_of(rows, ("world_size",), "step time")
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    colours = colour(names)
    figure = new_figure(7.0, 1.6 + 0.7 * len(names))
    axes = figure.subplots()
    counts = []
    for place, name in enumerate(names):
        mine = [row for row in rows if row["candidate"] == name]
        samples = [1e3 * value for row in mine for value in row["step_seconds"]]
        counts.append(len(samples))
        step = median(samples)
        exposed = 1e3 * median(row["exposed_seconds"] or 0.0 for row in mine)
        cuts = quantiles(samples, n=20, method="inclusive") if len(samples) > 1 else [step]
        axes.barh(place, step - exposed, height=0.55, color=colours[name])
        axes.barh(
            place,
            exposed,
            left=step - exposed,
            height=0.55,
            color="white",
            edgecolor=colours[name],
            hatch="////",
        )
        errors = [[max(0.0, step - cuts[0])], [max(0.0, cuts[-1] - step)]]
        axes.errorbar(step, place, xerr=errors, color="black", capsize=3, elinewidth=1)
        label = f"{format_seconds(step / 1e3)}, {_exposure(mine, exposed)}"
        axes.annotate(
            label,
            (max(step, cuts[-1]), place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("training step (ms)")
    axes.set_title(f"Training step, {world_size} ranks", loc="left")
    samples_text = "-".join(str(n) for n in dict.fromkeys((min(counts), max(counts))))
    caption(
        figure,
        [
            f"Median of {samples_text} steps; bars: 5th to 95th percentile.",
            "Hatched: exposed communication, the part of the step that computing does not hide.",
        ],
    )
    return figure


@styled
def training_parity(rows: list[Record]) -> "Figure":
    """Return the loss of each candidate over the steps, and how far it is from the first one's.

    Parameters
    ----------
    rows : list of dict
        Rows with ``candidate``, ``world_size`` and ``losses`` (one a step); the first row is what
        the others are compared with.

    Raises
    ------
    ConfigError
        If there are no rows, or they are of different world sizes.
    """
    (world_size,) = one_of(rows, ("world_size",), "training parity")
    base = rows[0]
    colours = colour(row["candidate"] for row in rows)
    figure = new_figure(8.0, 3.6)
    loss, distance = figure.subplots(1, 2)
    notes, differs = [], False
    for index, row in enumerate(rows):
        name, losses = row["candidate"], row["losses"]
        style = {"linestyle": "-" if index == 0 else (0, (4, 2 + index))}
        loss.plot(range(1, len(losses) + 1), losses, color=colours[name], label=name, **style)
        if index:
            apart = [abs(a - b) for a, b in zip(losses, base["losses"], strict=False)]
            # A logarithm has no place for 0: equal losses leave a gap.
            shown = [value or float("nan") for value in apart]
            distance.plot(range(1, len(apart) + 1), shown, "o-", color=colours[name], markersize=3)
            differs |= any(apart)
            num_equal = sum(value == 0 for value in apart)
            notes.append(f"{name}: {num_equal} of {len(apart)} losses equal to the last bit.")
    if differs:
        distance.set_yscale("log")
    else:
        distance.text(0.5, 0.5, "all equal", transform=distance.transAxes, ha="center", color=GREY)
    loss.set_ylabel("loss")
    distance.set_ylabel(f"distance from {base['candidate']}")
    for axes in (loss, distance):
        axes.set_xlabel("step")
    legend_below_title(loss)
    figure.suptitle(f"Training, {world_size} ranks", fontsize=10)
    caption(figure, notes)
    return figure


def _exposure(rows: list[Record], exposed_ms: float) -> str:
    hidden = [row["overlap_efficiency"] for row in rows if row["overlap_efficiency"] is not None]
    if not hidden:
        return "no communication"
    return f"{exposed_ms:.3g} ms exposed ({max(0.0, median(hidden)):.0%} hidden)"
