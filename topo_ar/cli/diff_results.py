"""``topo-ar diff A B`` of two sets of results: what takes longer now, and what less."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_ar.cli.table import counted, print_folded, print_item, print_table
from topo_ar.errors import ConfigError
from topo_ar.units import format_seconds, format_size

if TYPE_CHECKING:
    from topo_ar.telemetry.result_sets import Change, Comparison, Key, ResultSet

_SLOWER = 1
_MAX_OF_A_KIND = 12
_SIZES = ("nbytes", "gradient_nbytes")


def diff_results(names: Sequence[str], *, as_json: bool) -> int:
    """Compare two sets of results, print what is found and return the exit code.

    Raises
    ------
    ConfigError
        If there are not two, one is a folder and the other a file, one cannot be read, or nothing
        stands in both.
    """
    from topo_ar.telemetry.result_sets import Verdict, compare, read_set

    if len(names) != 2:
        raise ConfigError(
            f"{names[0]} is a set of results; diff compares two: topo-ar diff BEFORE AFTER"
        )
    if Path(names[0]).is_dir() != Path(names[1]).is_dir():
        folder, file = sorted(names, key=lambda name: not Path(name).is_dir())
        raise ConfigError(
            f"{folder} is a folder of results and {file} one file; pass two folders or two files"
        )
    a, b = map(read_set, names)
    found = compare(a, b)
    if as_json:
        _print_json(a, b, found)
    else:
        _print(a, b, found)
    return _SLOWER * any(change.verdict is Verdict.SLOWER for change in found.changes)


def _print_json(a: "ResultSet", b: "ResultSet", found: "Comparison") -> None:
    from topo_ar.telemetry.records import encode

    def write(**record: Any) -> None:
        print(encode(record).decode())

    write(what="sets", a=a.name, b=b.name, measured_differently=found.measured)
    for change in found.changes:
        write(
            what=change.verdict,
            **_named(change.key),
            ratio=change.found.ratio,
            low=change.found.low,
            high=change.found.high,
            a_median_seconds=change.before,
            b_median_seconds=change.after,
            a_samples=change.samples[0],
            b_samples=change.samples[1],
        )
    for key, reason in found.not_compared:
        write(what="not compared", **_named(key), reason=reason)
    for what, keys in (("only in a", found.only_a), ("only in b", found.only_b)):
        for key in keys:
            write(what=what, **_named(key))


def _named(key: "Key") -> dict[str, Any]:
    return {"file": key[0] or None, "row": dict(key[1])}


def _print(a: "ResultSet", b: "ResultSet", found: "Comparison") -> None:
    from topo_ar.telemetry.result_sets import Verdict

    short = _Labels([*a.rows, *b.rows])
    numbers = {kind: [c for c in found.changes if c.verdict is kind] for kind in Verdict}
    said = ", ".join(f"{len(rows)} {kind}" for kind, rows in numbers.items())
    print_folded(f"{b.name} against {a.name}: {said}", 0)
    if found.measured:
        print_folded(f"Measured differently: {', '.join(found.measured)}.", 0)
    table: list[tuple[str, ...]] = []
    for kind, rows in numbers.items():
        rows.sort(key=lambda change: change.found.ratio, reverse=kind is not Verdict.FASTER)
        shown = rows[:_MAX_OF_A_KIND] if kind is Verdict.UNCHANGED else rows
        table += [_line(change, short) for change in shown]
    if table:
        head = ("", "B / A (95 %)", "A", "B", "n", "row")
        print_table([head, *table])
    left = len(numbers[Verdict.UNCHANGED]) - _MAX_OF_A_KIND
    if left > 0:
        print(f"  {left} more unchanged; --json lists all")
    for name, keys in ((a.name, found.only_a), (b.name, found.only_b)):
        if keys:
            print_folded(f"only in {name}: {counted(len(keys), 'row')}", 0)
            _print_some(short(key) for key in keys)
    if found.not_compared:
        print_folded(f"not compared: {counted(len(found.not_compared), 'row')}", 0)
        _print_some(f"{short(key)}: {reason}" for key, reason in found.not_compared)
    for one in (a, b):
        pooled = sum(row.pieces > 1 for row in one.rows.values())
        if pooled:
            print_folded(
                f"{one.name}: {counted(pooled, 'row')} put together from records that nothing "
                "tells apart",
                0,
            )
    if a.without or b.without:
        print_folded(
            f"records without raw samples, which are not compared: {a.without} in {a.name}, "
            f"{b.without} in {b.name}",
            0,
        )


def _line(change: "Change", short: "_Labels") -> tuple[str, ...]:
    found, (before, after) = change.found, change.samples
    return (
        str(change.verdict),
        f"{found.ratio:.3f} ({found.low:.3f} - {found.high:.3f})",
        format_seconds(change.before),
        format_seconds(change.after),
        f"{before}" if before == after else f"{before}, {after}",
        short(change.key),
    )


def _print_some(texts: Iterable[str]) -> None:
    every = list(texts)
    for text in every[:_MAX_OF_A_KIND]:
        print_item(text)
    if len(every) > _MAX_OF_A_KIND:
        print(f"    {len(every) - _MAX_OF_A_KIND} more; --json lists all")


class _Labels:
    """Names rows by what tells them apart from others of their file."""

    def __init__(self, keys: Sequence["Key"]) -> None:
        self._values: dict[tuple[str, str], set[object]] = {}
        for file, identity in keys:
            for name, value in identity:
                self._values.setdefault((file, name), set()).add(value)

    def __call__(self, key: "Key") -> str:
        file, identity = key
        parts = [
            _text(name, value)
            for name, value in identity
            if name == "candidate" or len(self._values[file, name]) > 1
        ]
        where = [f"{file}:"] if file else []
        return " ".join([*where, ", ".join(parts or [_text(*pair) for pair in identity])])


def _text(name: str, value: Any) -> str:
    if name in _SIZES:
        return format_size(value)
    return str(value) if name in ("candidate", "kernel") else f"{name} {value}"
