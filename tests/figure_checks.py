"""What a rendered figure shows: its texts, where they are, its lines, and the scripts that draw."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def texts(figure):
    from matplotlib.text import Text

    found = (artist for artist in figure.findobj(Text) if artist.get_visible())
    return [artist for artist in found if artist.get_text().strip()]


def boxes(figure):
    """Return each visible text with its box in pixels, as rendered."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    shown = []
    for axes in figure.axes:
        if axes.axison:
            ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
            inside = axes.get_tightbbox(renderer)
            shown += [t for t in ticks if inside.overlaps(t.get_window_extent(renderer))]
    ticks = {t for axes in figure.axes for t in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    shown += [text for text in texts(figure) if text not in ticks]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in shown if t.get_text().strip()]


def assert_readable(figure):
    """Check that no text is cut off at the edge and none lies over another."""
    found = boxes(figure)
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in found:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, f"{text!r} is cut off: {box} in {width} x {height}"
    for (one, a), (other, b) in itertools.combinations(found, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or along <= 1, f"{one!r} lies over {other!r}"


def lines(axes):
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def said(figure):
    return "\n".join(text.get_text() for text in texts(figure))


def script(name, *arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "plots" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
