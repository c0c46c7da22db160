"""How much of what the wire allows each candidate reaches: by size, and by shape of the job."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
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
    size_axis,
    styled,
)
from topo_ar.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BITS_PER_GBIT = 1e9
_TALLEST = 1.1
_TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class _Share:
    """Wire limit over time: median, 5th and 95th percentile."""

    candidate: str
    nbytes: int
    mid: float
    low: float
    high: float
    is_marked: bool
    num_samples: int


@styled
def wire_share(rows: list[Record]) -> "Figure":
    """Return the share of the wire limit over message size (left) and by set-up (right).

    The left side shows the set-up with the most sizes, the right side every set-up at its largest
    size. Points are medians with the 5th to 95th percentile of the samples. Points with marks are
    hollow: there a token bucket's credit may exceed what the wire sustains. Rows of one host, which
    has no wire, and rows with wrong results are left out and counted.

    Parameters
    ----------
    rows : list of dict
        Rows of ``topo-ar bench --emulate``, of any number of set-ups.

    Raises
    ------
    ConfigError
        If no row is of several hosts, or one lacks the description of its links.
    """
    right = [row for row in rows if not row.get("wrong")]
    wired = [row for row in right if row.get("hosts", 1) > 1 and row.get("wire_limit_seconds")]
    if not wired:
        raise ConfigError(
            "the share of the wire limit needs rows of several hosts, and there are none"
        )
    setups: dict[str, list[_Share]] = {}
    for row in wired:
        setups.setdefault(_setup(row), []).append(_share(row))
    by_size = max(setups, key=lambda name: len({share.nbytes for share in setups[name]}))
    names = list(dict.fromkeys(row["candidate"] for row in wired))
    figure = new_figure(9.5, max(4.0, 1.8 + 0.35 * len(setups)))
    left, beside = figure.subplots(1, 2, width_ratios=(1, 1))
    _draw_sizes(left, by_size, setups[by_size], names)
    _draw_setups(beside, setups, names)
    shares = [share for some in setups.values() for share in some]
    samples = count_range(share.num_samples for share in shares)
    marked = any(share.is_marked for share in shares)
    kinds = {row["manifest"].get("emulation") for row in wired}
    caption(
        figure,
        [
            f"Median of {samples} samples; bars: 5th to 95th percentile.",
            "Hollow: a token bucket's credit may exceed what the wire sustains." * marked,
            _left_out(len(rows) - len(right), "with wrong results"),
            _left_out(len(right) - len(wired), "of one host, where no wire is used,"),
            "Unshaped loopback: these times say nothing about a network." * ("loopback" in kinds),
            "Hosts and links are emulated on one machine." * (kinds == {"namespaces"}),
        ],
    )
    return figure


def _left_out(count: int, which: str) -> str:
    return f"{count} rows {which} left out." if count else ""


def _setup(row: Record) -> str:
    """Return ``2x4, 1 Gbit/s``, ``4+2+2, 1 / 0.5 / 0.5 Gbit/s`` and so on."""
    links = (row.get("manifest") or {}).get("links")
    if not links:
        raise ConfigError(
            f"a row of {row['candidate']} does not say what links it was measured over; "
            "pass rows of topo-ar bench --emulate"
        )
    sizes = [len(ranks) for ranks in links["ranks"]]
    equal = len(set(sizes)) == 1
    grid = f"{len(sizes)}x{sizes[0]}" if equal else "+".join(map(str, sizes))
    order = [rank for ranks in links["ranks"] for rank in ranks]
    if order != sorted(order):
        grid += " dealt out"
    rates = ["+".join(f"{8 * nic / _BITS_PER_GBIT:g}" for nic in nics) for nics in links["nics"]]
    return f"{grid}, {rates[0] if len(set(rates)) == 1 else ' / '.join(rates)} Gbit/s"


def _share(row: Record) -> _Share:
    shares = [row["wire_limit_seconds"] / seconds for seconds in row["seconds"]]
    cuts = quantiles(shares, n=20, method="inclusive") if len(shares) > 1 else shares * 19
    marked = bool(row.get("marks"))
    middle = row["wire_limit_seconds"] / median(row["seconds"])
    return _Share(row["candidate"], row["nbytes"], middle, cuts[0], cuts[-1], marked, len(shares))


def _draw_sizes(axes: "Axes", title: str, shares: list[_Share], names: list[str]) -> None:
    colours = colour(names)
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1.2)
    for name in names:
        own = sorted((s for s in shares if s.candidate == name), key=lambda share: share.nbytes)
        if own:
            xs, ys = [share.nbytes for share in own], [share.mid for share in own]
            axes.plot(xs, ys, color=colours[name])
            _draw_points(axes, own, xs, ys, names, vertical=True)
    size_axis(axes, [share.nbytes for share in shares])
    axes.set_ylim(0, max(_TALLEST, *(share.high for share in shares)))
    axes.set_yticks(_TICKS)
    axes.set_ylabel("share of the wire limit")
    axes.set_title(title, loc="left")


def _draw_setups(axes: "Axes", setups: dict[str, list[_Share]], names: list[str]) -> None:
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1.2)
    labels, highest = [], _TALLEST
    for height, (setup, shares) in enumerate(setups.items()):
        largest = max(share.nbytes for share in shares)
        shown = [share for share in shares if share.nbytes == largest]
        labels.append(f"{setup}\n{format_size(largest)}")
        heights = _spread(height, shown)
        _draw_points(axes, shown, [s.mid for s in shown], heights, names, vertical=False)
        highest = max(highest, *(share.high for share in shown))
    axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, highest)
    axes.set_xticks(_TICKS)
    axes.set_xlabel("share of the wire limit")
    _legend(axes, names)


def _spread(height: int, shares: Sequence[_Share]) -> list[float]:
    """Return heights around `height` that keep points apart, equal candidates beside another."""
    step = 0.5 / max(1, len(shares) - 1)
    return [height - 0.25 * (len(shares) > 1) + step * index for index in range(len(shares))]


def _draw_points(
    axes: "Axes",
    shares: Sequence[_Share],
    xs: Sequence[float],
    ys: Sequence[float],
    names: list[str],
    *,
    vertical: bool,
) -> None:
    colours, markers = colour(names), marker(names)
    for share, x, y in zip(shares, xs, ys, strict=True):
        bars = ([max(0.0, share.mid - share.low)], [max(0.0, share.high - share.mid)])
        axes.errorbar(
            [x],
            [y],
            yerr=bars if vertical else None,
            xerr=None if vertical else bars,
            color=colours[share.candidate],
            marker=markers[share.candidate],
            markerfacecolor="white" if share.is_marked else colours[share.candidate],
            elinewidth=1,
            capsize=2,
            linestyle="none",
        )


def _legend(axes: "Axes", names: list[str]) -> None:
    colours, markers = colour(names), marker(names)
    for name in names:
        axes.plot([], [], color=colours[name], marker=markers[name], linestyle="none", label=name)
    legend_below_title(axes, num_columns=3)
