"""What a running job writes about itself: one JSON line for the job, then one for each window.

A window is some seconds of training; `topo-ar top` shows the last one. Times are seconds, sizes
bytes, rates bytes per second.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from topo_ar.errors import ConfigError

SCHEMA_VERSION = 1
RECORDS_NAME = "telemetry.jsonl"
METRICS_NAME = "topo_ar.prom"
# More than the longest line has.
_TAIL_NBYTES = 2 << 20


class Cause(msgspec.Struct, frozen=True):
    """What makes steps longer than they need be.

    Attributes
    ----------
    about : str
        ``late rank``, ``slow NIC`` or ``slow network``.
    text : str
        In a sentence.
    ranks : tuple of int
        Those that are late, or behind the slow NIC; empty where none can be named.
    """

    about: str
    text: str
    ranks: tuple[int, ...] = ()


class BucketFigures(msgspec.Struct, frozen=True):
    """A bucket over a window: medians over its steps of means over the ranks.

    Attributes
    ----------
    index, nbytes, dtype
        As DDP has it.
    path : str
        The family of its plan, or ``plain``; ``codec`` where it may be compressed.
    plan_hash : str
        Of its plan.
    queue_seconds, wait_seconds, transfer_seconds : float
        See `Arrivals`.
    predicted_seconds : float or None
        What the plan says of the transfer; None where none was made for what ran.
    algbw, busbw : float
        Of the transfer, see `metrics`.
    last_rank : int or None
        Which rank was waited for most often; None if none was.
    last_share : float
        In which share of the steps.
    """

    index: int
    nbytes: int
    dtype: str
    path: str
    plan_hash: str
    queue_seconds: float
    wait_seconds: float
    transfer_seconds: float
    predicted_seconds: float | None
    algbw: float
    busbw: float
    last_rank: int | None
    last_share: float


class Ranks(msgspec.Struct, frozen=True):
    """Figures of each rank, by rank; seconds are means per step.

    Attributes
    ----------
    compute_seconds : tuple of float
        The step without what was exposed of communication.
    wait_seconds : tuple of float
        Spent waiting for the last rank, over all buckets.
    late_seconds : tuple of float
        How much later than half of the ranks it came, over all buckets.
    last_share : tuple of float
        In which share of the steps it was the one that was waited for longest.
    """

    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    late_seconds: tuple[float, ...]
    last_share: tuple[float, ...]


class Window(msgspec.Struct, frozen=True, tag_field="kind", tag="window"):
    """Some seconds of training.

    Attributes
    ----------
    unix_seconds : float
        When it ended, by rank 0's clock.
    first_step, last_step : int
        Synchronised steps since `attach`, counted from 0.
    sampled_steps : int
        Of how many the figures are; the last ones.
    path, reason : str
        How steps are reduced and why, see `PathChoice`.
    replans, fallbacks : int
        See `PathChoice` and `Communicator`.
    compression : str
        What is said of it; empty where nothing is compressed.
    device : str
        The type of the buckets' device. On ``cuda`` times are those at which work was enqueued.
    step_seconds, step_seconds_max : float
        The median and the longest step, on the average of the ranks.
    exposed_seconds : float
        From a rank's last call to its last result; median over steps of the mean over ranks.
    nbytes_inside, nbytes_between : int
        Bytes of a step that cross links inside nodes and between them, all ranks together, by the
        schedule of what ran.
    nbytes_sent_between : int or None
        Bytes per step that flows between nodes were counted to carry; None on the plain path.
    ranks : Ranks
        By rank.
    buckets : tuple of BucketFigures
        In the order of their reduction.
    steps : tuple of (int, float, float)
        Number, seconds and exposed seconds of the sampled steps, means over ranks.
    spans : tuple
        The last step, by rank and bucket: call, begin of the transfer, and result, in seconds since
        the step's first call anywhere; empty in jobs too large for it.
    causes : tuple of Cause
        What was found wrong.
    clock_uncertainty_seconds : float
        How well the clocks of different nodes are known to agree.
    own_seconds_per_step, own_share : float
        Spent in telemetry itself by the rank that spent most, and its share of the step.
    own_seconds_per_bucket : float
        The same for a call and its result.
    incidents : int
        How many were written so far.
    """

    unix_seconds: float
    first_step: int
    last_step: int
    sampled_steps: int
    path: str
    reason: str
    replans: int
    fallbacks: int
    compression: str
    device: str
    step_seconds: float
    step_seconds_max: float
    exposed_seconds: float
    nbytes_inside: int
    nbytes_between: int
    nbytes_sent_between: int | None
    ranks: Ranks
    buckets: tuple[BucketFigures, ...]
    steps: tuple[tuple[int, float, float], ...]
    spans: tuple[tuple[tuple[float, float, float], ...], ...]
    causes: tuple[Cause, ...]
    clock_uncertainty_seconds: float
    own_seconds_per_step: float
    own_share: float
    own_seconds_per_bucket: float
    incidents: int = 0

    @property
    def exposed_share(self) -> float:
        """The share of a step that waits for communication."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else 0.0


class JobStart(msgspec.Struct, frozen=True, tag_field="kind", tag="job"):
    """The first line: the ranks of each node, and how records are made, see `records.manifest`."""

    nodes: tuple[tuple[int, ...], ...]
    manifest: dict[str, Any]
    schema: int = SCHEMA_VERSION


_decoder = msgspec.json.Decoder(JobStart | Window)


class RecordFile:
    """A file of bounded size: when it is full, it becomes the one before, and is begun anew.

    Parameters
    ----------
    path : Path
        Such as ``telemetry.jsonl``; the one before is ``telemetry.1.jsonl``.
    start : JobStart
        The first line of every file.
    max_nbytes : int
        When a file is full; both together take about twice as much.

    Raises
    ------
    ConfigError
        If it cannot be written.
    """

    def __init__(self, path: Path, start: JobStart, max_nbytes: int) -> None:
        self.path = path
        self._start = start
        self._max_nbytes = max_nbytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rotate()
        except OSError as error:
            raise ConfigError(f"cannot write telemetry to {path}: {error.strerror}") from error

    def write(self, window: Window) -> None:
        """Append a window, as one whole line at once; raises OSError where that fails."""
        with self.path.open("ab", buffering=0) as file:
            file.write(_line(window))
            full = file.tell() >= self._max_nbytes
        if full:
            self._rotate()

    def _rotate(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_suffix(f".1{self.path.suffix}"))
        self.path.write_bytes(_line(self._start))


def _line(record: JobStart | Window) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def decode_lines(lines: Iterable[bytes], place: str) -> list[JobStart | Window]:
    """Return the records of lines; a last one that is not whole yet is left out.

    Raises
    ------
    ConfigError
        If a line is no record of this schema; the message names it.
    """
    found: list[JobStart | Window] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n") or not line.strip():
            continue
        try:
            record = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{place}:{number}: not telemetry: {error}; expected what "
                "topo_ar.attach(ddp, telemetry=...) writes"
            ) from None
        if isinstance(record, JobStart) and record.schema != SCHEMA_VERSION:
            raise ConfigError(
                f"{place}:{number}: telemetry of schema {record.schema}; this version reads "
                f"{SCHEMA_VERSION}"
            )
        found.append(record)
    return found


def records_in(path: str | os.PathLike[str]) -> Path:
    """Return the file of records that a path names: itself, or the one in a directory.

    Raises
    ------
    ConfigError
        If there is none.
    """
    given = Path(path)
    found = given / RECORDS_NAME if given.is_dir() else given
    if not found.is_file():
        raise ConfigError(
            f"no telemetry at {found}: start the job with topo_ar.attach(ddp, "
            f'telemetry="{given}"), and wait for its first window'
        )
    return found


def read_windows(path: str | os.PathLike[str]) -> tuple[JobStart | None, list[Window]]:
    """Return a job's first record and its windows, from a file or directory.

    Raises
    ------
    ConfigError
        If nothing is there, or it is no telemetry.
    """
    found = records_in(path)
    try:
        with found.open("rb") as file:
            records = decode_lines(file, str(found))
    except OSError as error:
        raise ConfigError(f"cannot read {found}: {error.strerror}") from None
    starts = [each for each in records if isinstance(each, JobStart)]
    return (starts[-1] if starts else None), [e for e in records if isinstance(e, Window)]


def read_last(path: str | os.PathLike[str]) -> tuple[JobStart | None, Window | None]:
    """Return a job's first record and its last window, without reading all in between.

    Raises
    ------
    ConfigError
        As `read_windows`.
    """
    found = records_in(path)
    try:
        with found.open("rb") as file:
            first = file.readline()
            size = os.fstat(file.fileno()).st_size
            if size - len(first) > _TAIL_NBYTES:
                file.seek(size - _TAIL_NBYTES)
                file.readline()  # the rest of a line
            records = decode_lines([first, *file], str(found))
    except OSError as error:
        raise ConfigError(f"cannot read {found}: {error.strerror}") from None
    start = next((each for each in records if isinstance(each, JobStart)), None)
    windows = [each for each in records if isinstance(each, Window)]
    return start, windows[-1] if windows else None


def shares_of(counts: Mapping[int, int], total: int) -> tuple[int | None, float]:
    """Return who was counted most often, and in which share of `total`; None if nobody was."""
    if not counts or not total:
        return None, 0.0
    most = max(counts, key=lambda rank: (counts[rank], -rank))
    return most, counts[most] / total
