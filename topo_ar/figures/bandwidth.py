"""Bus bandwidth over message size, beside what the wire allows."""

from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

from topo_ar.figures.style import (
    GREY,
    Record,
    caption,
    colour,
    count_range,
    legend_below_title,
    marker,
    new_figure,
    one_of,
    size_axis,
    styled,
)
from topo_ar.telemetry.metrics import busbw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GB = 1e9


@dataclass(slots=True)
class _Point:
    """One candidate at one size: bandwidths in GB/s, and the share of the wire limit."""

    nbytes: int
    mid: float
    low: float
    high: float
    fraction: float | None
    num_samples: int
    is_marked: bool


@styled
def busbw_over_size(rows: list[Record]) -> "Figure":
    """Return bus bandwidth (left) and the share of the wire limit (right) over message size.

    Each candidate is a line through its medians with the 5th to 95th percentile as bars; rows of
    the same candidate and size are pooled. Rows with wrong results are left out and counted, rows
    with marks are drawn hollow and have no share.

    Parameters
    ----------
    rows : list of dict
        Rows of ``topo-ar bench`` for one collective, type, world size and number of hosts.

    Raises
    ------
    ConfigError
        If no row is right, or the rows are of different set-ups.
    """
    right = [row for row in rows if not row.get("wrong")]
    collective, dtype, world_size, hosts = one_of(
        right, ("collective", "dtype", "world_size", "hosts"), "bus bandwidth"
    )
    series = {
        name: _points([row for row in right if row["candidate"] == name], world_size)
        for name in dict.fromkeys(row["candidate"] for row in right)
    }
    figure = new_figure(9.0, 4.2)
    left, share = figure.subplots(1, 2, width_ratios=(3, 2), sharex=True)
    _draw_bandwidth(left, series, _limits(right, world_size))
    _draw_share(share, series)
    for axes in (left, share):
        size_axis(axes, [row["nbytes"] for row in right])
    samples = count_range(point.num_samples for points in series.values() for point in points)
    figure.suptitle(f"{collective}, {world_size} ranks on {hosts} hosts, {dtype}", fontsize=10)
    marks = sorted({mark for row in right for mark in row.get("marks") or ()})
    caption(
        figure,
        [
            f"Median of {samples} samples; bars: 5th to 95th percentile.",
            f"Hollow: marked {', '.join(marks)}, no share of the limit." if marks else "",
            f"{len(rows) - len(right)} rows with wrong results left out."
            if len(right) < len(rows)
            else "",
            _unshaped(right),
        ],
    )
    return figure


def _points(rows: list[Record], world_size: int) -> list[_Point]:
    by_size: dict[int, list[Record]] = {}
    for row in rows:
        by_size.setdefault(row["nbytes"], []).append(row)
    return [_point(nbytes, same, world_size) for nbytes, same in sorted(by_size.items())]


def _point(nbytes: int, rows: list[Record], world_size: int) -> _Point:
    seconds = [sample for row in rows for sample in row["seconds"]]
    cuts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else seconds * 19
    low, mid, high = (
        busbw(nbytes, value, world_size) / _GB for value in (cuts[-1], median(seconds), cuts[0])
    )
    fractions = [row["fraction"] for row in rows if row.get("fraction") is not None]
    return _Point(
        nbytes=nbytes,
        mid=mid,
        low=low,
        high=high,
        fraction=median(fractions) if fractions else None,
        num_samples=len(seconds),
        is_marked=any(row.get("marks") for row in rows),
    )


def _limits(rows: list[Record], world_size: int) -> list[tuple[int, float]]:
    """Return the bus bandwidth in GB/s that the wire limit stands for, by size."""
    limits = {row["nbytes"]: row["wire_limit_seconds"] for row in rows}
    return [
        (nbytes, busbw(nbytes, seconds, world_size) / _GB)
        for nbytes, seconds in sorted(limits.items())
        if seconds
    ]


def _draw_bandwidth(
    axes: "Axes", series: dict[str, list[_Point]], limits: list[tuple[int, float]]
) -> None:
    if limits:
        xs, ys = zip(*limits, strict=True)
        axes.plot(xs, ys, color=GREY, linestyle="--", linewidth=1.2, label="wire limit")
    colours, markers = colour(series), marker(series)
    for name, points in series.items():
        mid = [point.mid for point in points]
        axes.errorbar(
            [point.nbytes for point in points],
            mid,
            yerr=(
                [max(0.0, p.mid - p.low) for p in points],
                [max(0.0, p.high - p.mid) for p in points],
            ),
            color=colours[name],
            elinewidth=1,
            capsize=2,
            label=name,
        )
        _draw_markers(axes, points, mid, colours[name], markers[name])
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_ylim(bottom=0)
    legend_below_title(axes)


def _draw_share(axes: "Axes", series: dict[str, list[_Point]]) -> None:
    colours, markers = colour(series), marker(series)
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1.2)
    for name, points in series.items():
        shown = [point for point in points if point.fraction is not None]
        fractions = [point.fraction or 0.0 for point in shown]
        axes.plot([p.nbytes for p in shown], fractions, color=colours[name])
        _draw_markers(axes, shown, fractions, colours[name], markers[name])
    if not any(point.fraction is not None for points in series.values() for point in points):
        axes.text(0.5, 0.5, "no row has a share", transform=axes.transAxes, ha="center", color=GREY)
    axes.set_ylabel("share of the wire limit")
    axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))


def _draw_markers(
    axes: "Axes", points: list[_Point], heights: list[float], colour_name: str, shape: str
) -> None:
    for point, height in zip(points, heights, strict=True):
        face = "white" if point.is_marked else colour_name
        axes.plot(
            [point.nbytes],
            [height],
            marker=shape,
            linestyle="none",
            markeredgecolor=colour_name,
            markerfacecolor=face,
        )


def _unshaped(rows: list[Record]) -> str:
    kinds = {(row.get("manifest") or {}).get("emulation") for row in rows}
    if "loopback" in kinds:
        return "Unshaped loopback: these times say nothing about a network."
    return "Hosts and links are emulated on one machine." if "namespaces" in kinds else ""
