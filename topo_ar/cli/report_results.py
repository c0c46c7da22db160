"""What a folder of results holds: pictures, tables, a plan, where it was measured."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from topo_ar.errors import ConfigError
from topo_ar.telemetry.records import Record, read_records

_MOST_COLUMNS = 14
# Columns that say little beside others and come last when there are too many.
_LAST = ("settings", "iterations", "warmup", "calls_per_sample", "dtype", "redop", "collective")
_OF_A_BENCHMARK = {"candidate", "nbytes", "seconds", "median_seconds", "busbw"}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as SVG, with its title."""

    name: str
    title: str
    svg: bytes


@dataclass(frozen=True, slots=True)
class Table:
    """The scalar values of a file's records; samples are given by their number and median."""

    name: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a report shows. `not_drawn` holds a sentence for each figure left out."""

    pictures: list[Picture]
    tables: list[Table]
    timings: list[Record]
    plans: list[tuple[str, str]]
    environments: list[dict[str, Any]]
    not_drawn: list[str]


def read(folder: Path) -> Results:
    """Read a folder of results.

    Raises
    ------
    ConfigError
        If it holds no records, or a file cannot be read.
    """
    files = [path for path in sorted(folder.glob("*.jsonl")) if ".predictions." not in path.name]
    if not files:
        raise ConfigError(f"{folder} holds no records (*.jsonl)")
    tables, timings = [], []
    environments: list[dict[str, Any]] = []
    for path in files:
        rows = list(read_records(path))
        for row in rows:
            manifest = _flat(row.pop("manifest", None) or {})
            if manifest and manifest not in environments:
                environments.append(manifest)
        shown = [row for row in rows if row and row != {"kind": "manifest"}]
        if shown:
            tables.append(_table(path.name, shown))
        timings += [{"run": path.stem, **row} for row in shown if row.keys() >= _OF_A_BENCHMARK]
    pictures, not_drawn = _pictures(folder)
    return Results(pictures, tables, timings, _plans(folder), environments, not_drawn)


def _pictures(folder: Path) -> tuple[list[Picture], list[str]]:
    from topo_ar.figures.catalogue import ENTRIES
    from topo_ar.figures.style import svg

    pictures, not_drawn = [], []
    for entry in ENTRIES:
        if not entry.files(folder):
            continue
        try:
            figure = entry.figure(folder)
        except ConfigError as error:
            not_drawn.append(f"{entry.name}: {error}")
            continue
        pictures.append(Picture(entry.name, entry.title, svg(figure)))
    return pictures, not_drawn


def _plans(folder: Path) -> list[tuple[str, str]]:
    from topo_ar.errors import PlanError
    from topo_ar.planning.explain import explain
    from topo_ar.planning.plan import Plan

    plans = []
    for path in sorted(folder.glob("plan*.json")):
        try:
            plans.append((path.name, explain(Plan.from_json(path.read_bytes()))))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
    return plans


def _table(name: str, rows: list[Record]) -> Table:
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    columns.sort(key=lambda key: key in _LAST)
    columns = columns[:_MOST_COLUMNS]
    return Table(name, columns, [[row.get(column) for column in columns] for row in flat])


def _flat(row: Record) -> dict[str, Any]:
    """Return the scalars of a record; lists of numbers as how many and their median."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list) and value and all(_is_number(item) for item in value):
            flat[f"{key} (median)"] = median(value)
            flat[f"{key} (n)"] = len(value)
        elif value is None or isinstance(value, (str, int, float, bool)):
            flat[key] = value
    return flat


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
