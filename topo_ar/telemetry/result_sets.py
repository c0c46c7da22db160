"""Two sets of results: which rows stand in both, and how long each takes in the second."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from topo_ar.errors import ConfigError
from topo_ar.telemetry.metrics import RatioInterval, slowdown_interval
from topo_ar.telemetry.records import Record, read_records

# What tells a row from others, in the order in which it is said. All else is a result, or how it
# was taken (such as the number of samples), which may differ between the sets.
IDENTITY = (
    *("experiment", "record", "collective", "part", "case", "run", "kind", "fault", "task"),
    *("workload", "model", "system", "topology", "name", "kernel", "measure", "simulated"),
    *("candidate", "mode", "codec", "feedback", "policy", "optimizer", "nic", "nic_bytes_per_s"),
    *("nodes", "ranks_per_node", "num_nodes", "hosts", "world_size", "gpus", "num_threads"),
    *("dtype", "redop", "nbytes", "gradient_nbytes", "batch", "batch_per_gpu", "global_batch"),
    *("bucket_cap_mib", "lost_share", "crossings", "sync_every", "delay", "epochs", "width"),
    *("size", "side", "seed"),
)
_SAMPLES = ("seconds", "ours_seconds")
_LINKS = ("ranks", "nics", "uplinks", "latency", "mtu")

Identity = tuple[tuple[str, Any], ...]
Key = tuple[str, Identity]


class Verdict(StrEnum):
    """What became of a row: the 95 % interval of its ratio holds 1, or lies on one side of it."""

    SLOWER = "slower"
    FASTER = "faster"
    UNCHANGED = "unchanged"


@dataclass(slots=True)
class Row:
    """The samples of one row, in seconds; `pieces` are the records that they come from."""

    seconds: list[float]
    about: dict[str, Any]
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class ResultSet:
    """The rows of a file or folder by what identifies them; `without` have no raw samples."""

    name: str
    rows: dict[Key, Row]
    without: int


@dataclass(frozen=True, slots=True)
class Change:
    """A row that stands in both sets: medians in seconds, the second over the first."""

    key: Key
    before: float
    after: float
    samples: tuple[int, int]
    found: RatioInterval

    @property
    def verdict(self) -> Verdict:
        """What the interval says."""
        if self.found.low > 1:
            return Verdict.SLOWER
        return Verdict.FASTER if self.found.high < 1 else Verdict.UNCHANGED


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two sets say about each other.

    `not_compared` holds a reason for rows whose samples do not make a ratio; `measured` says, of
    each field of the manifests that differs between the sides, what it was on both.
    """

    changes: list[Change]
    only_a: list[Key]
    only_b: list[Key]
    not_compared: list[tuple[Key, str]]
    measured: list[str]


def is_result_set(name: str) -> bool:
    """Return whether `name` stands for results: a folder, or a name that ends in ``.jsonl``."""
    return name.endswith(".jsonl") or os.path.isdir(name)


def read_set(path: str | os.PathLike[str]) -> ResultSet:
    """Return the rows of a file, or of every ``*.jsonl`` in a folder.

    Records of one file that nothing in `IDENTITY` tells apart are pieces of one measurement: their
    samples are put together. A single file has no name in the keys, so that any two can be
    compared.

    Raises
    ------
    ConfigError
        If there are no records, or a file cannot be read.
    """
    place = Path(path)
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files:
        raise ConfigError(f"{path} holds no records (*.jsonl)")
    rows: dict[Key, Row] = {}
    without = 0
    for file in files:
        name = file.name if place.is_dir() else ""
        for record in read_records(file):
            seconds = _samples(record)
            if seconds is None:
                without += set(record) != {"kind", "manifest"}
                continue
            key = name, identity(record)
            if key in rows:
                rows[key].seconds.extend(seconds)
                rows[key].pieces += 1
            else:
                rows[key] = Row(list(seconds), _about(record))
    return ResultSet(str(path), rows, without)


def identity(record: Record) -> Identity:
    """Return what tells a record from others of its file; its settings count like its fields."""
    fields = {**(record.get("settings") or {}), **record}
    return tuple(
        (name, fields[name])
        for name in IDENTITY
        if isinstance(fields.get(name), (str, int, float, bool))
    )


def compare(a: ResultSet, b: ResultSet) -> Comparison:
    """Return the ratios of `b` over `a`, row by row, and what stands in one set only.

    Raises
    ------
    ConfigError
        If no row with raw samples stands in both.
    """
    both = [key for key in a.rows if key in b.rows]
    if not both:
        raise ConfigError(
            f"no row with raw samples stands in both {a.name} ({len(a.rows)} such rows) and "
            f"{b.name} ({len(b.rows)}); compare results of the same experiment"
        )
    changes, not_compared = [], []
    for key in both:
        before, after = a.rows[key].seconds, b.rows[key].seconds
        try:
            found = slowdown_interval(before, after)
        except ConfigError as error:
            not_compared.append((key, str(error)))
            continue
        changes.append(Change(key, *_medians(before, after), (len(before), len(after)), found))
    return Comparison(
        changes,
        [key for key in a.rows if key not in b.rows],
        [key for key in b.rows if key not in a.rows],
        not_compared,
        list(_measured_differently([(a.rows[key].about, b.rows[key].about) for key in both])),
    )


def _samples(record: Record) -> list[float] | None:
    for name in _SAMPLES:
        found = record.get(name)
        if isinstance(found, list) and found and all(isinstance(x, int | float) for x in found):
            return found
    return None


def _medians(before: list[float], after: list[float]) -> tuple[float, float]:
    from statistics import median

    return median(before), median(after)


def _about(record: Record) -> dict[str, Any]:
    """Return the manifest without what was measured of the links."""
    found = dict(record.get("manifest") or {})
    links = found.pop("links", None)
    if links is not None:
        found["links"] = {name: links.get(name) for name in _LINKS}
    return found


def _measured_differently(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[str]:
    """Yield ``torch 2.11 / 2.13``, or in how many rows a field differs where values vary."""
    for name in dict.fromkeys(name for pair in pairs for side in pair for name in side):
        found = [(a.get(name), b.get(name)) for a, b in pairs if a.get(name) != b.get(name)]
        if not found:
            continue
        same = all(pair == found[0] for pair in found)
        if same and not any(isinstance(value, dict) for value in found[0]):
            a, b = map(_short, found[0])
            text = f"{name} {a} / {b}"
        else:
            text = name
        yield text if len(found) == len(pairs) else f"{text} ({len(found)} of {len(pairs)} rows)"


def _short(value: object) -> str:
    """Return a value as text, a commit shortened as git does."""
    text = "none" if value is None else str(value)
    is_hash = len(text) == 40 and set(text) <= set("0123456789abcdef")
    return text[:7] if is_hash else text
