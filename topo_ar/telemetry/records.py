"""Result records: one JSON object a line, appended whole, with a manifest of how it was measured.

A record never holds NaN or infinity: a figure that is not known is null. It names roles, versions
and the measuring commit, never a host, a user or an absolute path.
"""

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec

from topo_ar._version import __version__
from topo_ar.errors import ConfigError

SCHEMA_VERSION = 1

Record = dict[str, Any]


class RecordWriter:
    """Appends records to a file, each as one whole line at once.

    A line that an earlier run left unfinished (it was killed, or the disk was full) is cut off.

    Parameters
    ----------
    path : path-like
        A ``.jsonl`` file; it and its folder are made when missing.

    Raises
    ------
    ConfigError
        If the file cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write records to {path}: {error.strerror}") from error
        _mend(self._fd)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`; it is in the file, whole, when this returns.

        Raises
        ------
        ConfigError
            If the record holds NaN, infinity or something that JSON has no form for.
        """
        data = encode(record) + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def encode(record: Mapping[str, Any]) -> bytes:
    """Return `record` as one line of JSON, without the line's end.

    Raises
    ------
    ConfigError
        If the record holds NaN, infinity or something that JSON has no form for.
    """
    try:
        plain = msgspec.to_builtins(record, str_keys=True)
    except TypeError as error:
        raise ConfigError(f"a record cannot hold this: {error}") from error
    for place, number in _floats(plain, "record"):
        if not math.isfinite(number):
            raise ConfigError(f"{place} is {number}; write null for a figure that is not known")
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records of a file, in its order; empty lines are passed over.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a line is not a JSON object of a schema known here; the
        message names file and line.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read records from {path}: {error.strerror}") from error
    return [_decode(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def manifest(emulation: str | None = None) -> Record:
    """Return how and on what is being measured, to be kept in every record.

    Parameters
    ----------
    emulation : str, optional
        What stands for the network, such as ``namespaces`` or ``loopback``; None on real hosts.
    """
    return {
        "schema": SCHEMA_VERSION,
        "package_version": __version__,
        **_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "numpy": _version_of("numpy"),
        "cpu_count": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "tcp_congestion_control": _congestion_control(),
        "emulation": emulation,
    }


def _mend(fd: int) -> None:
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    if content and not content.endswith(b"\n"):
        os.ftruncate(fd, content.rfind(b"\n") + 1)


def _floats(value: object, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _floats(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _floats(item, f"{place}[{index}]")


def _decode(line: bytes, place: str) -> Record:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        record = json.loads(line, parse_constant=refuse)
    except ValueError as error:
        raise ConfigError(f"{place}: not a record: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{place}: not a record: {type(record).__name__}, must be an object")
    block = record.get("manifest")
    schema = block.get("schema") if isinstance(block, dict) else None
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise ConfigError(
            f"{place}: schema {schema} is newer than {SCHEMA_VERSION}; read it with the version "
            "of topo-ar that wrote it"
        )
    return record


def _commit(directory: Path) -> Record:
    """Return the commit of the tree the package is run from; None for an installed package."""
    tracked = _git(directory, "ls-files", "--error-unmatch", Path(__file__).name)
    commit = _git(directory, "rev-parse", "HEAD") if tracked else None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _congestion_control() -> str | None:
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return None
