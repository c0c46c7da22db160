"""How much faster a training step is with codecs, over the rate of the NICs; where each pays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import (
    GREY,
    PALE,
    Record,
    caption,
    colour,
    count_range,
    marker,
    new_figure,
    one_of,
    styled,
)
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.units import parse_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN, EXACT, AUTO, COMPUTE = "plain DDP", "none", "auto", "compute"
_BYTES_PER_GBIT = 1e9 / 8
_RATE_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_SPEEDUP_TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50)
_DASHES: tuple[object, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
_MORE = 1.3

# By candidate and rate in bytes/s: the seconds of all its steps.
Samples = dict[str, dict[float, list[float]]]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Rates of a node's NICs, in bytes/s, below which a codec makes a step shorter.

    Attributes
    ----------
    predicted : tuple of (float, float) or None
        The planner's, with nothing overlapped and with everything; infinite where the codec costs
        nothing; None where it says never.
    measured : float or None
        Where the measured speed-up over exact sums crosses 1; None where it does not.
    pays_everywhere : bool
        Without a crossing: whether it is above 1, or else below, at all rates.
    """

    predicted: tuple[float, float] | None
    measured: float | None
    pays_everywhere: bool


def break_even(rows: Sequence[Record], codec: str) -> BreakEven:
    """Return where a codec breaks even with exact sums by the same plan.

    Between two rates the speed-up is taken for a straight line over the logarithm of the rate. The
    prediction is the median of those that the planner made in the pieces.

    Parameters
    ----------
    rows : sequence of dict
        Rows of ``05_compression.py --ddp`` with one optimizer.
    codec : str
        Such as ``topk:0.01``.
    """
    samples = _samples(rows)
    points = [
        (math.log(rate), math.log(median(samples[EXACT][rate]) / median(seconds)))
        for rate, seconds in sorted(samples[codec].items())
    ]
    crossings = [
        x0 + (x1 - x0) * y0 / (y0 - y1) for (x0, y0), (x1, y1) in pairwise(points) if y0 > 0 >= y1
    ]
    measured = math.exp(crossings[-1]) if crossings else None
    return BreakEven(_predicted(rows, codec), measured, all(y > 0 for _, y in points))


@styled
def codec_speedup(rows: list[Record]) -> "Figure":
    """Return speed-up over plain DDP by NIC rate (left), and every codec's break-even (right).

    A line of panels for each optimizer. On the right bars reach from the planner's prediction with
    nothing overlapped to that with everything overlapped; diamonds are measured, arrows say that
    the codec breaks even beyond the rates that were measured.

    Parameters
    ----------
    rows : list of dict
        Rows of ``05_compression.py --ddp``; pieces are pooled.

    Raises
    ------
    ConfigError
        If there is none, they are of several shapes of the job, or one lacks what codecs are
        compared with.
    """
    rows = [row for row in rows if row.get("experiment") == "compression_ddp"]
    nodes, ranks = one_of(rows, ("nodes", "ranks_per_node"), "codec speed-up")
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    names = _shown(rows)
    figure = new_figure(10.0, 1.6 + 3.5 * len(optimizers))
    panels = figure.subplots(len(optimizers), 2, width_ratios=(3, 2), squeeze=False)
    for optimizer, (left, right) in zip(optimizers, panels, strict=True):
        mine = [row for row in rows if row["optimizer"] == optimizer]
        samples = _samples(mine)
        if PLAIN not in samples or EXACT not in samples:
            raise ConfigError(f"the codec speed-up figure needs rows of {PLAIN} and {EXACT}")
        _draw_speedups(left, samples, names)
        _draw_break_even(right, mine, _codecs(mine, names), sorted(samples[PLAIN]))
        left.set_title(f"ResNet-18, {nodes} hosts of {ranks} ranks, {optimizer}", loc="left")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=6)
    rounds = count_range(
        len(seconds)
        for optimizer in optimizers
        for by_rate in _samples([r for r in rows if r["optimizer"] == optimizer]).values()
        for seconds in by_rate.values()
    )
    kinds = {row["manifest"].get("emulation") for row in rows}
    caption(
        figure,
        [
            f"Left: ratio of medians of {rounds} interleaved rounds; bars: 95 % interval. Dashed "
            "grey: as if nothing were communicated; none: exact sums by the plan.",
            "Right: below which rate a codec beats exact sums by the same plan. Bars: predicted, "
            "from one after the other to all overlapped.",
            "Diamonds: measured; arrows: the codec breaks even beyond the rates measured (shaded).",
            "Hosts and links are emulated on one machine." * (kinds == {"namespaces"}),
            "Unshaped loopback: these times say nothing about a network." * ("loopback" in kinds),
        ],
    )
    return figure


def _samples(rows: Sequence[Record]) -> Samples:
    found: Samples = {}
    for row in rows:
        by_rate = found.setdefault(row["candidate"], {})
        by_rate.setdefault(parse_rate(row["nic"]), []).extend(row["seconds"])
    return found


def _shown(rows: Sequence[Record]) -> list[str]:
    """Return exact sums, all codecs, the planner's choice and torch's hooks."""
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    codecs = [name for name in names if name in _priced(rows)]
    torch_hooks = [name for name in names if name.startswith("torch ")]
    return [EXACT, *codecs, *(name for name in names if name == AUTO), *torch_hooks]


def _codecs(rows: Sequence[Record], names: Sequence[str]) -> list[str]:
    tried = {row["candidate"] for row in rows}
    return [name for name in names if name in tried and name in _priced(rows)]


def _priced(rows: Sequence[Record]) -> set[str]:
    """Return the codecs that the planner has looked at."""
    plans = [row["plan"] for row in rows if row.get("plan")]
    return {verdict["codec"] for plan in plans for verdict in plan["codecs"]}


def _predicted(rows: Sequence[Record], codec: str) -> tuple[float, float] | None:
    verdicts = [
        verdict
        for row in rows
        for verdict in (row.get("plan") or {}).get("codecs", ())
        if verdict["codec"] == codec
    ]
    ends = []
    for key in ("sequential_break_even", "overlapped_break_even"):
        rates = [verdict[key] for verdict in verdicts if verdict[key] is not None]
        if not rates:
            return None
        ends.append(median(rates))
    return ends[0], ends[1]


def _draw_speedups(axes: "Axes", samples: Samples, names: Sequence[str]) -> None:
    families = list(dict.fromkeys(_family(name) for name in names if name != AUTO))
    colours, markers = colour(families), marker(families)
    colours[AUTO], markers[AUTO] = GREY, "x"
    seen: dict[str, int] = {}
    if COMPUTE in samples:
        bound = [
            (rate / _BYTES_PER_GBIT, median(samples[PLAIN][rate]) / median(seconds))
            for rate, seconds in sorted(samples[COMPUTE].items())
        ]
        axes.plot(*zip(*bound, strict=True), color=GREY, linestyle="--", linewidth=1.2)
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    for name in names:
        family = _family(name)
        turn = seen.setdefault(family, -1) + 1
        seen[family] = turn
        by_rate = sorted(samples.get(name, {}).items())
        found = [speedup_interval(samples[PLAIN][rate], seconds) for rate, seconds in by_rate]
        axes.errorbar(
            [rate / _BYTES_PER_GBIT for rate, _ in by_rate],
            [each.ratio for each in found],
            yerr=(
                [max(0.0, each.ratio - each.low) for each in found],
                [max(0.0, each.high - each.ratio) for each in found],
            ),
            color=colours[family],
            marker=markers[family],
            markersize=9 if name == AUTO else 4,
            linestyle="none" if name == AUTO else _DASHES[turn % len(_DASHES)],
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            label=name,
        )
    _rate_axis(axes, [rate / _BYTES_PER_GBIT for rate in samples[PLAIN]])
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [tick for tick in _SPEEDUP_TICKS if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("times as fast as plain DDP")


def _family(name: str) -> str:
    kind = name.partition(":")[0]
    return {"bf16": "fp16", "int4": "int8"}.get(kind, "torch" if "torch" in kind else kind)


def _draw_break_even(
    axes: "Axes", rows: Sequence[Record], codecs: Sequence[str], rates: Sequence[float]
) -> None:
    found = [break_even(rows, codec) for codec in codecs]
    ends = [end for each in found if each.predicted for end in each.predicted if end < math.inf]
    first, last = rates[0] / _BYTES_PER_GBIT, rates[-1] / _BYTES_PER_GBIT
    far = max([last, *(end / _BYTES_PER_GBIT for end in ends)]) * _MORE**2
    axes.axvspan(first, last, color=PALE, linewidth=0)
    for place, each in enumerate(found):
        if each.predicted is not None:
            low, high = (min(far, end / _BYTES_PER_GBIT) for end in each.predicted)
            axes.plot(
                [low, high],
                [place, place],
                color=colour(["plan"])["plan"],
                linewidth=4,
                alpha=0.6,
                marker="|",
                markersize=11,
                markeredgewidth=2,
                solid_capstyle="butt",
            )
        if each.measured is not None:
            axes.plot([each.measured / _BYTES_PER_GBIT], [place], "D", color="black")
        else:
            at, tip = (last, 2.0) if each.pays_everywhere else (first, 0.5)
            axes.annotate(
                "",
                (at * tip, place),
                xytext=(at, place),
                arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 1.4},
            )
    axes.set_yticks(range(len(codecs)), codecs)
    axes.set_ylim(len(codecs) - 0.4, -0.6)
    _rate_axis(axes, [first / 2, max(far, 2 * last)])
    axes.set_title("breaks even with exact sums", loc="left")


def _rate_axis(axes: "Axes", rates: Sequence[float]) -> None:
    low, high = min(rates) / _MORE, max(rates) * _MORE
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = [tick for tick in _RATE_TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("NIC rate (Gbit/s)")
