"""A training with the plain all-reduce beside one through the hook."""

from statistics import median, quantiles
from typing import TYPE_CHECKING

from topo_ar.figures.style import (
    GREY,
    Record,
    caption,
    colour,
    count_range,
    legend_below_title,
    new_figure,
    one_of,
    styled,
)
from topo_ar.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE = "plain"
_MS = 1e3


@styled
def step_time(rows: list[Record]) -> "Figure":
    """Return a bar for each candidate: the median step, and the part that waited for communication.

    Parameters
    ----------
    rows : list of dict
        Records of trainings: ``candidate``, ``world_size``, ``seconds`` (of all steps) and
        ``exposed_seconds``; where there is ``overlap_efficiency``, null means that nothing was
        communicated. Rows of the same candidate are pooled, with the median of their exposed
        times; records without ``exposed_seconds`` are passed over.

    Raises
    ------
    ConfigError
        If there is no such record, or they are of different world sizes.
    """
    rows = _plain_first([row for row in rows if "exposed_seconds" in row])
    (world_size,) = one_of(rows, ("world_size",), "step time")
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    colours = colour(names)
    figure = new_figure(7.0, 1.6 + 0.7 * len(names))
    axes = figure.subplots()
    for place, name in enumerate(names):
        mine = [row for row in rows if row["candidate"] == name]
        _draw_step(axes, place, mine, colours[name])
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("training step (ms)")
    axes.set_title(f"Training step, {world_size} ranks", loc="left")
    num_steps = count_range(len(row["seconds"]) for row in rows)
    caption(
        figure,
        [
            f"Median of {num_steps} steps; bars: 5th to 95th percentile.",
            "Hatched: exposed communication, the part of the step that computing does not hide.",
        ],
    )
    return figure


@styled
def training_parity(rows: list[Record]) -> "Figure":
    """Return the loss of each candidate over the steps, and how far it is from plain DDP's.

    Parameters
    ----------
    rows : list of dict
        Records of trainings: ``candidate``, ``world_size`` and ``losses`` (one a step). The
        candidate ``plain``, else the first, is what the others are compared with; records without
        ``losses`` are passed over.

    Raises
    ------
    ConfigError
        If there is no such record, or they are of different world sizes.
    """
    rows = _plain_first([row for row in rows if "losses" in row])
    (world_size,) = one_of(rows, ("world_size",), "training parity")
    base, *others = rows
    colours = colour(row["candidate"] for row in rows)
    figure = new_figure(8.0, 3.6)
    loss, distance = figure.subplots(1, 2, sharex=True)
    for index, row in enumerate(rows):
        name = row["candidate"]
        style = "-" if row is base else (0, (4, 2 + index))
        steps = range(1, len(row["losses"]) + 1)
        loss.plot(steps, row["losses"], color=colours[name], label=name, linestyle=style)
    notes = [_draw_distance(distance, base, row, colours[row["candidate"]]) for row in others]
    if distance.get_lines():
        distance.set_yscale("log")
    else:
        distance.set_yticks([])
        middle = {"transform": distance.transAxes, "ha": "center", "color": GREY}
        distance.text(0.5, 0.5, "no loss differs", **middle)
    loss.set_ylabel("loss")
    distance.set_ylabel(f"distance from {base['candidate']}")
    for axes in (loss, distance):
        axes.set_xlabel("step")
    legend_below_title(loss)
    figure.suptitle(f"Training, {world_size} ranks", fontsize=10)
    caption(figure, notes)
    return figure


def _plain_first(rows: list[Record]) -> list[Record]:
    return sorted(rows, key=lambda row: row["candidate"] != BASELINE)


def _draw_step(axes: "Axes", place: int, rows: list[Record], shade: str) -> None:
    samples = [_MS * value for row in rows for value in row["seconds"]]
    step = median(samples)
    exposed = _MS * median(row["exposed_seconds"] for row in rows)
    cuts = quantiles(samples, n=20, method="inclusive") if len(samples) > 1 else [step]
    axes.barh(place, step - exposed, height=0.55, color=shade)
    axes.barh(
        place,
        exposed,
        left=step - exposed,
        height=0.55,
        color="white",
        edgecolor=shade,
        hatch="////",
    )
    errors = [[max(0.0, step - cuts[0])], [max(0.0, cuts[-1] - step)]]
    axes.errorbar(step, place, xerr=errors, color="black", capsize=3, elinewidth=1)
    axes.annotate(
        f"{format_seconds(step / _MS)}, {_exposure(rows, exposed / _MS)}",
        (max(step, cuts[-1]), place),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _exposure(rows: list[Record], exposed: float) -> str:
    known = [row["overlap_efficiency"] for row in rows if "overlap_efficiency" in row]
    hidden = [value for value in known if value is not None]
    if known and not hidden:
        return "no communication"
    text = f"{format_seconds(exposed)} exposed" if exposed else "nothing exposed"
    return f"{text} ({max(0.0, median(hidden)):.0%} hidden)" if hidden else text


def _draw_distance(axes: "Axes", base: Record, row: Record, shade: str) -> str:
    """Draw where the losses differ and return how many do not."""
    apart = [abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=False)]
    num_equal = sum(value == 0 for value in apart)
    if num_equal < len(apart):
        # A logarithm has no place for 0: equal losses leave a gap.
        shown = [value or float("nan") for value in apart]
        axes.plot(range(1, len(apart) + 1), shown, "o-", color=shade, markersize=3)
    return f"{row['candidate']}: {num_equal} of {len(apart)} losses equal to the last bit."
