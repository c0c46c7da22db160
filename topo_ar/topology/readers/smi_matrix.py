"""The matrices that nvidia-smi prints: devices by devices, with a few columns behind them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from topo_ar.errors import TopologyError

AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")

_MOST_DEVICES = 256
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Some drivers print names without anything between them.
_NAME = re.compile(
    r"CPU Affinity|NUMA Affinity|GPU NUMA ID|GPU\d+|NIC\d+|mlx\d+_\d+"
    r"|\S+?(?=CPU Affinity|NUMA Affinity|GPU NUMA ID|GPU\d|NIC\d|mlx\d+_\d|\s|$)"
)
_NO_CELL = re.compile(r"(?!NV\d+$)[A-Za-z]\w*\d\w*|.* .*")


@dataclass(slots=True)
class Row:
    """A device's cells in the order of the columns, and its affinity by column name."""

    cells: list[str]
    affinity: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Matrix:
    """A matrix: its devices in the order of its columns, the rows that are there, and notes."""

    devices: list[str]
    rows: dict[str, Row]
    notes: list[str]

    def grid(self) -> list[list[str]]:
        """Return the cells as a square; empty where the output says nothing."""
        rows = [self.rows[d].cells if d in self.rows else [] for d in self.devices]
        return [[*row, *[""] * (len(self.devices) - len(row))] for row in rows]


def plain_lines(text: str) -> list[str]:
    """Return the lines of `text` without terminal escapes and line ends."""
    return [_ANSI.sub("", line).rstrip("\r") for line in text.removeprefix("\ufeff").split("\n")]


def is_header(line: str) -> bool:
    """Return whether a line names columns: a GPU, then another device or an affinity."""
    if not re.match(r"\s*GPU\d", line):
        return False
    names = _NAME.findall(line[:200])
    if len(names) == 1:
        return line[:1].isspace()
    return re.fullmatch(r"GPU\d+", names[0]) is not None and bool(_NO_CELL.fullmatch(names[1]))


def find_header(lines: Sequence[str]) -> int | None:
    """Return the index of the line that names the columns, None where there is none."""
    return next((i for i, line in enumerate(lines) if is_header(line)), None)


def read_matrix(lines: Sequence[str], start: int, name: str) -> Matrix:
    """Return the matrix whose header is ``lines[start]``; `name` is the file.

    Raises
    ------
    TopologyError
        If the header names a device twice or too many, or no row follows it; the message names
        file and line.
    """
    columns = _NAME.findall(lines[start])
    devices = [column for column in columns if column not in AFFINITY]
    behind = [column for column in columns if column in AFFINITY]
    place = f"{name}:{start + 1}"
    if len(devices) > _MOST_DEVICES:
        raise TopologyError(
            f"{place}: {len(devices)} columns; a matrix of one machine has at most {_MOST_DEVICES}"
        )
    if double := next((d for d in devices if devices.count(d) > 1), None):
        raise TopologyError(f"{place}: column {double} is there twice; each device has one")
    matrix = Matrix(devices, {}, [])
    for number, line in enumerate(lines[start + 1 :], start + 2):
        label = next(iter(line.split(maxsplit=1)), "")
        if is_header(line):
            matrix.notes.append(f"line {number}: a second matrix starts here; it is left out")
            break
        if label in matrix.rows:
            matrix.notes.append(f"line {number}: a second row of {label}; it is left out")
        elif label in devices:
            matrix.rows[label] = _row(line, number, devices, behind, matrix.notes)
        elif re.fullmatch(r"(?:GPU|NIC)\d+", label):
            matrix.notes.append(f"line {number}: row {label} has no column; it is left out")
    if not matrix.rows:
        raise TopologyError(
            f"{place}: holds no matrix: no row follows the line of columns; copy the whole output"
        )
    missing = [device for device in devices if device not in matrix.rows]
    if missing:
        matrix.notes.append(
            f"rows missing: {', '.join(missing)}; what the other rows do not say of them is unknown"
        )
    return matrix


def _row(
    line: str, number: int, devices: Sequence[str], behind: Sequence[str], notes: list[str]
) -> Row:
    cells = [cell.strip() for cell in line.strip(" ").split("\t")][1:]
    tabbed = len(cells) >= len(devices)
    if not tabbed:
        cells = line.split()[1:]
    if len(cells) < len(devices):
        notes.append(
            f"line {number}: the row has {len(cells)} of {len(devices)} cells; it may be cut off"
        )
    row = Row(cells[: len(devices)])
    rest = cells[len(devices) :]
    if len(rest) == len(behind) + 1 > 1 and not rest[-2]:
        # nvidia-smi writes two tabs before its last column.
        del rest[-2]
    while rest and not rest[-1]:
        rest.pop()
    if len(rest) > len(behind) or (not tabbed and rest and len(rest) < len(behind)):
        notes.append(f"line {number}: the affinity columns cannot be told apart; they are unknown")
    else:
        row.affinity = {column: cell for column, cell in zip(behind, rest, strict=False) if cell}
    return row
