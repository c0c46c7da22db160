"""How fast the kernels of compression are, beside torch's own operations."""

from statistics import median, quantiles
from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import (
    Record,
    caption,
    colour,
    count_range,
    legend_below_title,
    new_figure,
    one_of,
    styled,
)
from topo_ar.telemetry.metrics import speedup_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GB = 1e9
_HEIGHT = 0.36
_TICKS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)
_SIDES = {"torch": "torch_seconds", "topo_ar": "ours_seconds"}


@styled
def kernel_throughput(rows: list[Record]) -> "Figure":
    """Return two bars for each kernel, torch's and ours: GB/s of the fp32 gradient.

    Parameters
    ----------
    rows : list of dict
        Rows of ``05_compression.py --kernels``; the last of each kernel counts.

    Raises
    ------
    ConfigError
        If there is none, or they are of several numbers of threads.
    """
    found = {row["kernel"]: row for row in rows if "kernel" in row}
    if not found:
        raise ConfigError("the kernel figure needs rows of kernels, and there are none")
    (threads,) = one_of(found.values(), ("num_threads",), "kernel")
    figure = new_figure(8.0, 1.4 + 0.42 * len(found))
    axes = figure.subplots()
    colours = colour(_SIDES)
    widest = max(_draw(axes, place, row, colours) for place, row in enumerate(found.values()))
    axes.set_yticks(range(len(found)), [_label(row) for row in found.values()], fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)
    slowest = min(
        row["nbytes"] / max(row[key]) for row in found.values() for key in _SIDES.values()
    )
    axes.set_xscale("log")
    # Room for the ratios behind the bars.
    axes.set_xlim(slowest / _GB / 2, widest * 8)
    axes.set_xticks([tick for tick in _TICKS if slowest / _GB / 2 <= tick <= widest], minor=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("gradient per second (GB/s of fp32)")
    legend_below_title(axes)
    samples = count_range(len(row["ours_seconds"]) for row in found.values())
    caption(
        figure,
        [
            f"Median of {samples} interleaved samples, threads: {threads}; "
            "bars: 5th to 95th percentile.",
            "Behind the bars: torch's time over ours, with its 95 % interval.",
        ],
    )
    return figure


def _draw(axes: "Axes", place: int, row: Record, colours: dict[str, str]) -> float:
    """Draw a kernel and return how far its bars reach."""
    reach = 0.0
    for side, (name, key) in enumerate(_SIDES.items()):
        rates = [row["nbytes"] / seconds / _GB for seconds in row[key]]
        middle = row["nbytes"] / median(row[key]) / _GB
        cuts = quantiles(rates, n=20, method="inclusive") if len(rates) > 1 else rates * 19
        axes.barh(
            place + (side - 0.5) * _HEIGHT,
            middle,
            height=_HEIGHT,
            color=colours[name],
            label=name if place == 0 else None,
        )
        axes.errorbar(
            [middle],
            [place + (side - 0.5) * _HEIGHT],
            xerr=([max(0.0, middle - cuts[0])], [max(0.0, cuts[-1] - middle)]),
            color="black",
            capsize=2,
            elinewidth=0.8,
        )
        reach = max(reach, middle, cuts[-1])
    ratio = speedup_interval(row["torch_seconds"], row["ours_seconds"])
    axes.annotate(
        f"{ratio.ratio:.2f} x ({ratio.low:.2f} - {ratio.high:.2f})",
        (reach, place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
    )
    return reach


def _label(row: Record) -> str:
    return f"{row['kernel']} ({row['nbytes'] / 1e6:.1f} MB)"
