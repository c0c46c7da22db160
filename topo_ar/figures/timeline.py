"""When each rank was in which stage of one bucket."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.style import GREY, PALE, caption, colour, new_figure, styled
from topo_ar.telemetry.trace import Span
from topo_ar.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_HEIGHT = 0.8
_PASSAGES = ("intra: reduce-scatter", "inter", "intra: all-gather")
_MAX_RANKS = 8


@styled
def bucket_timeline(spans: Sequence[Span], ranks: Sequence[int] | None = None) -> "Figure":
    """Return the spans of each rank over time, in the order intra, inter, intra.

    Lanes of one passage share a row; where their spans overlap they are drawn above each other.
    Lanes that belong to no passage get rows of their own.

    Parameters
    ----------
    spans : sequence of Span
        As :func:`topo_ar.telemetry.trace.read_trace` returns them.
    ranks : sequence of int, optional
        The ranks to draw; the first eight when left out.

    Raises
    ------
    ConfigError
        If there is no span of these ranks.
    """
    known = sorted({span.rank for span in spans})
    ranks = list(known[:_MAX_RANKS] if ranks is None else ranks)
    shown = [span for span in spans if span.rank in ranks]
    if not shown:
        raise ConfigError(f"the timeline needs spans of ranks {ranks}; the trace has ranks {known}")
    origin = min(span.begin_seconds for span in shown)
    total = max(span.end_seconds for span in shown) - origin
    unit, factor = ("ms", 1e3) if total >= 1e-3 else ("us", 1e6)
    passages = sorted({_passage(span.lane) for span in shown}, key=_place)
    rows = [(rank, passage) for rank in ranks for passage in passages]
    figure = new_figure(9.0, 1.4 + 0.22 * len(rows))
    axes = figure.subplots()
    colours = colour(_PASSAGES) | colour([*_PASSAGES, *passages])
    for row, (rank, passage) in enumerate(rows):
        mine = [s for s in shown if s.rank == rank and _passage(s.lane) == passage]
        _draw_row(axes, row, mine, colours[passage], origin, factor)
    _label_ranks(axes, ranks, len(passages))
    handles = [_patch(colours[passage], passage) for passage in passages]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2
    )
    axes.set_xlim(0, total * factor)
    axes.set_xlabel(f"time ({unit})")
    left_out = len(known) - len(ranks)
    caption(
        figure,
        [
            f"{format_seconds(total)} from the first begin to the last end; "
            "bars above each other in a row: chunks in flight at once.",
            f"{left_out} more ranks are in the trace." if left_out > 0 else "",
        ],
    )
    return figure


def _passage(lane: str) -> str:
    """Return the passage of a lane; ``inter_exchange wire 2`` is ``inter``."""
    stage = re.sub(r" wire \d+$", "", lane)
    if stage == "intra_reduce_scatter":
        return _PASSAGES[0]
    if stage == "intra_all_gather":
        return _PASSAGES[2]
    return _PASSAGES[1] if stage.startswith("inter") else stage


def _place(passage: str) -> tuple[int, str]:
    return (_PASSAGES.index(passage) if passage in _PASSAGES else len(_PASSAGES), passage)


def _slots(spans: Sequence[Span]) -> list[int]:
    """Return the first free slot of each span, in order of begin: no two of a slot overlap."""
    ends: list[float] = []
    slots = []
    for span in spans:
        slot = next((i for i, end in enumerate(ends) if end <= span.begin_seconds), len(ends))
        ends[slot:] = [span.end_seconds, *ends[slot + 1 :]]
        slots.append(slot)
    return slots


def _draw_row(
    axes: "Axes", row: int, spans: list[Span], shade: str, origin: float, factor: float
) -> None:
    spans = sorted(spans, key=lambda span: span.begin_seconds)
    slots = _slots(spans)
    height = _ROW_HEIGHT / (max(slots, default=0) + 1)
    for span, slot in zip(spans, slots, strict=True):
        axes.barh(
            row - _ROW_HEIGHT / 2 + slot * height,
            (span.end_seconds - span.begin_seconds) * factor,
            left=(span.begin_seconds - origin) * factor,
            height=height,
            align="edge",
            color=shade,
            edgecolor="white",
            linewidth=0.3,
        )


def _label_ranks(axes: "Axes", ranks: Sequence[int], num_passages: int) -> None:
    centres = [index * num_passages + (num_passages - 1) / 2 for index in range(len(ranks))]
    axes.set_yticks(centres, [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for index in range(1, len(ranks)):
        axes.axhline(index * num_passages - 0.5, color=PALE, linewidth=0.8)
    axes.axhline(len(ranks) * num_passages - 0.5, color=GREY, linewidth=0.8)
    axes.set_ylim(len(ranks) * num_passages - 0.5, -0.5)


def _patch(shade: str, label: str) -> object:
    from matplotlib.patches import Patch

    return Patch(color=shade, label=label)
