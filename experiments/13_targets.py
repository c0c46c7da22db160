"""Which of the targets of latency, quality and cost that were set beforehand are reached?

Command: python -m experiments.13_targets experiments/results --out results/
Minutes: 0; it reads the records of the other experiments.

experiments/targets.toml holds the targets and the prices. A target names files of records, what is
measured (``speedup`` of steps or all-reduces, ``quality`` or ``below_baseline`` as mean over seeds,
``time_to_accuracy`` and ``cost_to_accuracy`` as medians over seeds, ``efficiency_ratio`` of
simulated jobs), whose it is, with whom it is compared, and the least that counts. Speed-ups have 95
% intervals, means and medians over seeds their lowest and highest.

Writes targets.jsonl, a row a target: ``experiment`` "targets", ``kind`` (latency, quality, cost),
``about``, ``measure``, ``ours``, ``theirs``, ``least``, ``value`` (null where it was not measured),
``low``, ``high``, ``num_samples``, ``verdict`` (PASS, MISS, NONE), ``manifest``. A miss is shown,
and the exit code is 0.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from experiments.jobs import write_whole
from topo_ar.cli.script import exit_code_of
from topo_ar.errors import ConfigError
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.prices import PriceList
from topo_ar.telemetry.records import Record, manifest, read_records

TARGETS = Path(__file__).parent / "targets.toml"
Found = tuple[float, float, float, int]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What shall be `least` or more."""

    kind: str
    about: str
    records: str
    measure: str
    ours: str
    least: float
    theirs: str | None = None
    where: dict[str, Any] = {}


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: prices of an hour and a gigabyte, and the targets."""

    currency: str
    target: tuple[Target, ...]
    node_hour: float = 0.0
    accelerator_hour: float = 0.0
    sent_gigabyte: float = 0.0

    @property
    def prices(self) -> PriceList:
        """The price list."""
        return PriceList(self.currency, self.node_hour, self.accelerator_hour, self.sent_gigabyte)


def read_targets(path: Path = TARGETS) -> Targets:
    """Return the targets of a file.

    Raises
    ------
    ConfigError
        If it is none, or a target's measure is unknown.
    """
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Targets)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds no targets: {error}") from None
    for target in found.target:
        if target.measure not in _MEASURES:
            raise ConfigError(
                f"{path}: {target.measure!r} is no measure; known are {', '.join(_MEASURES)}"
            )
    return found


def rows_of(folder: Path, target: Target) -> list[Record]:
    """Return the rows that a target is about; none where they were not measured."""
    rows = [
        row
        for path in sorted(folder.glob(target.records))
        if ".quick." not in path.name
        for row in read_records(path)
    ]
    return [row for row in rows if all(row.get(k) == v for k, v in target.where.items())]


def judge(target: Target, rows: Sequence[Record], prices: PriceList) -> Record:
    """Return the row of a target."""
    ours = [row for row in rows if row["candidate"] == target.ours]
    theirs = [row for row in rows if row["candidate"] == target.theirs]
    found = None
    if ours and (theirs or target.theirs is None):
        found = _MEASURES[target.measure](ours, theirs, prices)
    value, low, high, count = found or (None, None, None, 0)
    verdict = "NONE" if value is None else "PASS" if value >= target.least else "MISS"
    about = msgspec.to_builtins(target)
    return {
        "experiment": "targets",
        **{key: about[key] for key in ("kind", "about", "measure", "ours", "theirs", "least")},
        "value": value,
        "low": low,
        "high": high,
        "num_samples": count,
        "verdict": verdict,
    }


def _speedup(ours: Sequence[Record], theirs: Sequence[Record], prices: PriceList) -> Found:
    found = speedup_interval(theirs[0]["seconds"], ours[0]["seconds"])
    return found.ratio, found.low, found.high, found.num_samples


def _quality(ours: Sequence[Record], theirs: Sequence[Record], prices: PriceList) -> Found:
    return _spread(mean, [row["quality"] for row in ours])


def _below(ours: Sequence[Record], theirs: Sequence[Record], prices: PriceList) -> Found:
    return _spread(mean, [row["baseline"]["quality"] - row["quality"] for row in ours])


def _time(ours: Sequence[Record], theirs: Sequence[Record], prices: PriceList) -> Found | None:
    return _by_seed(ours, theirs, lambda row: row["reached_seconds"])


def _cost(ours: Sequence[Record], theirs: Sequence[Record], prices: PriceList) -> Found | None:
    def cost(row: Record) -> float | None:
        if row["reached_seconds"] is None:
            return None
        return prices.cost(row["reached_seconds"], row["hosts"], row["world_size"])

    return _by_seed(ours, theirs, cost)


def _efficiency(ours: Sequence[Record], theirs: Sequence[Record], prices: PriceList) -> Found:
    one, other = ours[0], theirs[0]
    return (
        one["efficiency"] / other["efficiency"],
        one["low_efficiency"] / other["high_efficiency"],
        one["high_efficiency"] / other["low_efficiency"],
        1,
    )


def _by_seed(
    ours: Sequence[Record], theirs: Sequence[Record], value: Callable[[Record], float | None]
) -> Found | None:
    """Return theirs over ours, seed by seed; None where a training did not get there."""
    other = {row["seed"]: value(row) for row in theirs}
    ratios = []
    for row in ours:
        mine, reference = value(row), other.get(row["seed"])
        if mine is None or reference is None:
            return None
        ratios.append(reference / mine)
    return _spread(median, ratios)


def _spread(middle: Callable[[list[float]], float], values: list[float]) -> Found:
    return middle(values), min(values), max(values), len(values)


_MEASURES: dict[str, Callable[[Sequence[Record], Sequence[Record], PriceList], Found | None]] = {
    "speedup": _speedup,
    "quality": _quality,
    "below_baseline": _below,
    "time_to_accuracy": _time,
    "cost_to_accuracy": _cost,
    "efficiency_ratio": _efficiency,
}


def run(folder: Path, out: Path) -> int:
    """Judge, write and print."""
    targets = read_targets()
    about = manifest()
    rows = [judge(each, rows_of(folder, each), targets.prices) for each in targets.target]
    path = out / "targets.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    write_whole(path, ({**row, "manifest": about} for row in rows))
    for row in rows:
        value = "-"
        if row["value"] is not None:
            value = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        print(f"{row['kind']:8} {row['about']:88} {row['least']:5g} {value:>24} {row['verdict']}")
    print(f"written: {path}")
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="results of the other experiments")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()
    return exit_code_of(lambda: run(options.folder, options.out))


if __name__ == "__main__":
    sys.exit(main())
