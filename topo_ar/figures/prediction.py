"""What was predicted beside what was measured."""

from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import (
    GREY,
    PALE,
    Record,
    caption,
    colour,
    legend_below_title,
    marker,
    new_figure,
    size_axis,
    styled,
)
from topo_ar.units import format_seconds, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def predicted_measured(rows: list[Record], tolerance: float = 0.15) -> "Figure":
    """Return predicted and measured seconds (left) and their ratio over message size (right).

    The line is perfect prediction, the band is `tolerance` to both sides. The caption counts the
    points inside it and names the worst.

    Parameters
    ----------
    rows : list of dict
        Rows of ``topo-ar bench``; those without a prediction are counted and left out.
    tolerance : float
        Half width of the band as a share of the measured median.

    Raises
    ------
    ConfigError
        If no row has a prediction.
    """
    points = [row for row in rows if row.get("predicted_seconds") and row.get("median_seconds")]
    if not points:
        raise ConfigError("the prediction figure needs rows with predicted_seconds; there are none")
    figure = new_figure(9.0, 4.4)
    times, ratios = figure.subplots(1, 2)
    _draw_band(times, ratios, points, tolerance)
    names = list(dict.fromkeys(row["candidate"] for row in points))
    colours, markers = colour(names), marker(names)
    for name in names:
        mine = [row for row in points if row["candidate"] == name]
        style = {"color": colours[name], "marker": markers[name], "linestyle": "none"}
        predicted = [row["predicted_seconds"] for row in mine]
        times.plot(predicted, [row["median_seconds"] for row in mine], label=name, **style)
        ratios.plot([row["nbytes"] for row in mine], [_ratio(row) for row in mine], **style)
    size_axis(ratios, [row["nbytes"] for row in points])
    ratios.set_ylim(min(0.5, ratios.get_ylim()[0]), max(1.5, ratios.get_ylim()[1]))
    ratios.set_ylabel("predicted / measured")
    legend_below_title(times)
    caption(figure, [*_verdict(points, tolerance), _left_out(len(rows) - len(points))])
    return figure


def _draw_band(times: "Axes", ratios: "Axes", points: list[Record], tolerance: float) -> None:
    values = [row[key] for row in points for key in ("predicted_seconds", "median_seconds")]
    span = [min(values) / 1.6, max(values) * 1.6]
    below, above = ([x / (1 + sign * tolerance) for x in span] for sign in (1, -1))
    times.fill_between(span, below, above, color=PALE, label=f"within {tolerance:.0%}", linewidth=0)
    times.plot(span, span, color=GREY, linestyle="--", linewidth=1)
    times.set(xscale="log", yscale="log", xlim=span, ylim=span)
    times.set_xlabel("predicted (s)")
    times.set_ylabel("measured, median (s)")
    ratios.axhspan(1 - tolerance, 1 + tolerance, color=PALE, linewidth=0)
    ratios.axhline(1, color=GREY, linestyle="--", linewidth=1)


def _ratio(row: Record) -> float:
    return float(row["predicted_seconds"] / row["median_seconds"])


def _verdict(points: list[Record], tolerance: float) -> tuple[str, str]:
    worst = max(points, key=lambda row: abs(_ratio(row) - 1))
    num_inside = sum(abs(_ratio(row) - 1) <= tolerance for row in points)
    return (
        f"{num_inside} of {len(points)} within {tolerance:.0%} of the measured median.",
        f"Worst: {worst['candidate']} at {format_size(worst['nbytes'])}, "
        f"{format_seconds(worst['predicted_seconds'])} predicted and "
        f"{format_seconds(worst['median_seconds'])} measured ({_ratio(worst) - 1:+.1%}).",
    )


def _left_out(num_rows: int) -> str:
    return f"{num_rows} rows without a prediction left out." if num_rows else ""
