"""The report as HTML or Markdown text."""

import base64
import html
from typing import Any

from topo_ar.cli.report_results import Picture, Results, Table
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record
from topo_ar.units import format_seconds, format_size

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th { cursor: pointer; position: sticky; top: 0; background: #fff; white-space: nowrap; }
th:focus-visible { outline: 2px solid #0072B2; }
th[aria-sort="ascending"]::after { content: " \\2191"; }
th[aria-sort="descending"]::after { content: " \\2193"; }
td:first-child, th:first-child { text-align: left; } pre { overflow-x: auto; background: #f6f6f6;
  padding: 1rem; } summary { cursor: pointer; font-weight: 600; margin: .6rem 0; }
"""

_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const sort = () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.value;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const [p, q] = [Number(x), Number(y)];
        const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
"""


def page(results: Results) -> str:
    """Return the whole page; nothing in it refers to anything outside it."""
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>topo_ar results</title><style>{_STYLE}</style></head><body>",
        "<h1>topo_ar results</h1>",
    ]
    if results.pictures or results.not_drawn:
        parts += ["<h2>Figures</h2>", *map(_figure, results.pictures)]
    parts += [f"<p>Left out: {html.escape(reason)}</p>" for reason in results.not_drawn]
    if results.timings:
        parts += ["<h2>Timings</h2>", _html_table(_timing_table(results.timings))]
    if results.plans:
        parts.append("<h2>Plans</h2>")
        parts += [
            f"<details open><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre>"
            "</details>"
            for name, text in results.plans
        ]
    parts.append("<h2>Records</h2>")
    parts += [
        f"<details><summary>{html.escape(table.name)} ({len(table.rows)} records)</summary>"
        f"{_html_table(table)}</details>"
        for table in results.tables
    ]
    parts += ["<h2>Environment</h2>", _html_table(_environment(results.environments))]
    parts.append(f"<script>{_SCRIPT}</script></body></html>\n")
    return "\n".join(parts)


def markdown_table(results: Results) -> str:
    """Return a table of the timings, to paste.

    Records without timings give the header alone.
    """
    table = _timing_table(results.timings)
    lines = [table.columns, ["---"] * len(table.columns)]
    lines += [[_text(value) for value in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _timing_table(timings: list[Record]) -> Table:
    """Return a row for each timing, with its speed-up over gloo where both were measured."""
    columns = ["run", "size", "candidate", "ranks", "hosts", "median", "n", "over gloo (95 %)"]
    columns.append("wrong")
    rows = []
    gloo = {(row["run"], row["nbytes"]): row for row in timings if row["candidate"] == "gloo"}
    for row in timings:
        base = gloo.get((row["run"], row["nbytes"]))
        over: _Sorted | None = None
        if base is not None and base is not row and len(base["seconds"]) == len(row["seconds"]) > 1:
            ratio = speedup_interval(base["seconds"], row["seconds"])
            text = f"{ratio.ratio:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"
            over = _Sorted(ratio.ratio, text)
        rows.append(
            [
                row["run"],
                _Sorted(row["nbytes"], format_size(row["nbytes"])),
                row["candidate"],
                row.get("world_size"),
                row.get("hosts"),
                _Sorted(row["median_seconds"], format_seconds(row["median_seconds"])),
                len(row["seconds"]),
                over,
                row.get("wrong"),
            ]
        )
    return Table("timings", columns, rows)


class _Sorted:
    """A value that sorts as a number and reads as text."""

    def __init__(self, value: float, text: str) -> None:
        self.value, self.text = value, text


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.svg).decode()
    title = html.escape(picture.title)
    return (
        f"<figure id='{picture.name}'><figcaption>{title}</figcaption>"
        f"<img alt='{title}' src='data:image/svg+xml;base64,{data}'></figure>"
    )


def _environment(environments: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for manifest in environments for key in manifest))
    rows = [[manifest.get(column) for column in columns] for manifest in environments]
    return Table("environment", columns, rows)


def _html_table(table: Table) -> str:
    head = "".join(f"<th tabindex='0'>{html.escape(name)}</th>" for name in table.columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f"<div class='scroll'><table class='sortable'><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    key = value.value if isinstance(value, _Sorted) else "" if value is None else value
    return f"<td data-value='{html.escape(str(key))}'>{html.escape(_text(value))}</td>"


def _text(value: Any) -> str:
    if isinstance(value, _Sorted):
        return value.text
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
