"""How much of what is possible stock NCCL reaches: published peaks over two bounds."""

from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import GREY, Record, caption, colour, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BOUNDS = (
    ("null_ring_seconds", "of a flat ring at nominal rates"),
    ("bound_seconds", "of the exact bound of the switches"),
)
_BAR = 0.36
# What stands behind a figure at the end of a bar, so that no line runs through it.
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


@styled
def published_share(rows: list[Record]) -> "Figure":
    """Return bars by system: the share of a flat ring and of the bound that NCCL's peak reaches.

    A system is shown at its largest message. Above 100 % of a flat ring is what trees and
    reductions in switches reach on one or two nodes.

    Parameters
    ----------
    rows : list of dict
        Records of ``experiments/10_published.py``; those of kind ``time`` count.

    Raises
    ------
    ConfigError
        If there is no such record.
    """
    peaks: dict[str, Record] = {}
    for row in rows:
        if row.get("kind") == "time":
            best = peaks.get(row["system"])
            if best is None or row["nbytes"] > best["nbytes"]:
                peaks[row["system"]] = row
    if not peaks:
        raise ConfigError("the figure of published peaks needs records of kind time; none are here")
    shown = sorted(peaks.values(), key=lambda row: (-row["num_nodes"], row["system"]))
    figure = new_figure(7.0, 1.6 + 0.42 * len(shown))
    axes = figure.subplots()
    shades = list(colour(["plan", "gloo"]).values())
    for place, (key, label) in enumerate(_BOUNDS):
        shares = [100 * row[key] / row["measured_seconds"] for row in shown]
        heights = [index + (place - 0.5) * _BAR for index in range(len(shown))]
        axes.barh(heights, shares, height=_BAR, color=shades[1 - place], label=label)
        for height, share in zip(heights, shares, strict=True):
            axes.text(share + 1, height, f"{share:.0f}", va="center", fontsize=7.5, bbox=_BEHIND)
    axes.axvline(100, color=GREY, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(shown)), [_label(row) for row in shown])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("share that the measured peak reaches (%)")
    axes.set_title("Stock NCCL against what is possible", loc="left", pad=22)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)
    caption(
        figure,
        [
            "One published measurement a system, at its largest message; no spread is published.",
            "The bound lets switches add only where the system has NVLink SHARP.",
        ],
    )
    return figure


def _label(row: Record) -> str:
    nodes = row["num_nodes"]
    return f"{row['system']} ({nodes} node{'s' * (nodes > 1)})"
