"""The one style of all figures, and how they are saved: the same records give the same bytes."""

import functools
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from topo_ar.errors import ConfigError
from topo_ar.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]
P = ParamSpec("P")

# Okabe and Ito's colours, told apart by colour-blind readers too.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
_KNOWN = {"plan": 0, "hook": 0, "gloo": 1, "plain": 1, "openmpi": 2, "openmpi-han": 3}
_MARKERS = "osD^vPX"
GREY = "#606060"
PALE = "#e8e8e8"

_STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "svg.hashsalt": "topo-ar",
}


def styled(draw: "Callable[P, Figure]") -> "Callable[P, Figure]":
    """Return `draw` such that it runs under the style, or says which extra is missing.

    Raises
    ------
    ConfigError
        On a call, if matplotlib is not installed.
    """

    @functools.wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> "Figure":
        with _style():
            return draw(*args, **kwargs)

    return inside


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of that many inches; nothing opens a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: str | os.PathLike[str]) -> tuple[Path, Path, Path]:
    """Write `figure` as PNG, SVG and PDF beside each other and return their paths.

    The suffix of `path` does not matter. No file holds a date or a version.

    Raises
    ------
    ConfigError
        If the files cannot be written.
    """
    png, svg, pdf = (Path(path).with_suffix(suffix) for suffix in (".png", ".svg", ".pdf"))
    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        with _style():
            figure.savefig(png, metadata={"Software": None})
            figure.savefig(svg, metadata={"Date": None, "Creator": None})
            figure.savefig(pdf, metadata={"CreationDate": None, "Creator": None, "Producer": None})
    except OSError as error:
        raise ConfigError(f"cannot write a figure to {path}: {error.strerror}") from error
    return png, svg, pdf


def save_as(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write `figure` in the one format that the suffix of `path` names, ``.svg`` or ``.png``.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    blank = {"Date": None, "Creator": None} if Path(path).suffix == ".svg" else {"Software": None}
    try:
        with _style():
            figure.savefig(path, metadata=blank)
    except OSError as error:
        raise ConfigError(f"cannot write a figure to {path}: {error.strerror}") from error


def svg(figure: "Figure") -> bytes:
    """Return `figure` as SVG, the same bytes for the same records."""
    buffer = io.BytesIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def colour(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name; well-known candidates have theirs in every figure."""
    return {name: _PALETTE[index] for name, index in _indices(names).items()}


def marker(names: Iterable[str]) -> dict[str, str]:
    """Return a marker for each name, in step with its colour."""
    return {name: _MARKERS[index] for name, index in _indices(names).items()}


def caption(figure: "Figure", sentences: Iterable[str]) -> None:
    """Put what a reader must know under the axes, one sentence a line."""
    text = "\n".join(filter(None, sentences))
    figure.supxlabel(text, fontsize=7.5, color=GREY, x=0.01, ha="left")


def count_range(counts: Iterable[int]) -> str:
    """Return ``20``, or ``10-20`` where the least and the greatest differ."""
    counts = sorted(counts)
    return "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def one_of(rows: Iterable[Record], keys: Iterable[str], figure: str) -> tuple[Any, ...]:
    """Return the values of `keys`, which all rows must share.

    Raises
    ------
    ConfigError
        If there are no rows, one lacks a key, or the values differ.
    """
    rows, keys = list(rows), list(keys)
    if not rows:
        raise ConfigError(f"the {figure} figure needs records, and there are none that fit")
    for key in keys:
        values = sorted({str(row[key]) for row in rows if key in row})
        if len(values) != 1 or any(key not in row for row in rows):
            found = f"has {', '.join(values)}" if values else "lacks it"
            raise ConfigError(
                f"the {figure} figure shows one {key}, and the file {found}; pass rows of one"
            )
    return tuple(rows[0][key] for key in keys)


def legend_below_title(axes: "Axes", num_columns: int = 4) -> None:
    """Place the legend over the axes, where no line can run into it."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=num_columns, borderaxespad=0.2)


def size_axis(axes: "Axes", sizes: list[int]) -> None:
    """Label a logarithmic axis at powers of two, at most seven of them."""
    smallest = max(1, min(sizes))
    first, last = smallest.bit_length() - 1, max(1, *sizes).bit_length()
    step = max(2, 2 * -(-(last - first) // 12))
    first -= first % 2
    ticks = [1 << power for power in range(first, last + 1, step)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks], fontsize=7.5)
    axes.minorticks_off()
    axes.set_xlabel("message size")


def _indices(names: Iterable[str]) -> dict[str, int]:
    names = list(dict.fromkeys(names))
    taken = {name: _KNOWN[name] for name in names if name in _KNOWN}
    free = [i for i in range(len(_PALETTE)) if i not in taken.values()] or [len(_PALETTE) - 1]
    others = [name for name in names if name not in taken]
    return taken | {name: free[i % len(free)] for i, name in enumerate(others)}


def _style() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "figures need matplotlib, which is not installed: pip install 'topo-ar[plots]'"
        ) from error
    return matplotlib.rc_context(_STYLE)
