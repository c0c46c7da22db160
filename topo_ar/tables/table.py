"""A table as data, as Markdown and as CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from topo_ar.telemetry.metrics import RatioInterval


@dataclass(frozen=True, slots=True)
class Cell:
    """A value that sorts by `value` and reads as `text`."""

    value: float | str
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns; a row holds numbers, text, `Cell`, and None for what does not apply.

    `notes` are sentences under the table: units, and which records are missing.
    """

    name: str
    columns: list[str]
    rows: list[list[Any]]
    title: str = ""
    notes: list[str] = field(default_factory=list)


def text_of(value: Any) -> str:
    """Return how a cell reads; four digits of a number that is not whole."""
    if isinstance(value, Cell):
        return value.text
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(table: Table) -> str:
    """Return `table` in Markdown, its title above and its notes below."""
    lines = [table.columns, ["---"] * len(table.columns)]
    lines += [[_escaped(text_of(value)) for value in row] for row in table.rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    head = f"### {table.title}\n\n" if table.title else ""
    return head + body + "".join(f"\n\n{note}" for note in table.notes)


def csv_text(table: Table) -> str:
    """Return the columns and rows of `table` as CSV, texts as they read."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([text_of(value) for value in row] for row in table.rows)
    return buffer.getvalue()


def unknown(reason: str) -> Cell:
    """Return the cell of a value that nothing gives, with the reason."""
    return Cell("", f"- ({reason})")


def ratio_cell(found: RatioInterval) -> Cell:
    """Return a ratio with its 95 % interval."""
    return Cell(found.ratio, f"{found.ratio:.2f} ({found.low:.2f} - {found.high:.2f})")


def share_cell(value: float) -> Cell:
    """Return a share in percent."""
    return Cell(value, f"{100 * value:.1f} %")


def joined(items: Sequence[object]) -> str:
    """Return ``1, 2 and 3``."""
    words = list(map(str, items))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
