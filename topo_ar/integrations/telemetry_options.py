"""Where a job writes what it says about itself, and how much: ``attach(ddp, telemetry=...)``."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from topo_ar.errors import ConfigError
from topo_ar.telemetry.job_windows import METRICS_NAME, RECORDS_NAME

_LEAST_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Records of a running job, written by rank 0.

    Parameters
    ----------
    path : path-like
        A directory, for records (``telemetry.jsonl``), a file of OpenMetrics text
        (``topo_ar.prom``) and incidents; or a ``.jsonl`` file for records alone.
    tensorboard : bool
        Write TensorBoard's event files to the directory as well.
    window_s : float
        About how many seconds of training make a record.
    max_nbytes : int
        Of the file of records; what came before is kept in ``telemetry.1.jsonl``, once.

    Raises
    ------
    ConfigError
        If a value cannot be meant.
    """

    path: str | os.PathLike[str]
    tensorboard: bool = False
    window_s: float = 2.0
    max_nbytes: int = 32 << 20

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not 0 < self.window_s < math.inf:
            raise ConfigError(f"window_s={self.window_s!r} is not a positive number of seconds")
        if self.max_nbytes < _LEAST_NBYTES:
            raise ConfigError(f"max_nbytes={self.max_nbytes!r} must be {_LEAST_NBYTES} or more")
        if self.tensorboard and self.directory is None:
            raise ConfigError("tensorboard=True needs a directory as path, not a .jsonl file")

    @property
    def directory(self) -> Path | None:
        """The directory, if it is one."""
        path = Path(self.path)
        return None if path.suffix == ".jsonl" else path

    @property
    def records_path(self) -> Path:
        """The file of records."""
        return Path(self.path) if self.directory is None else self.directory / RECORDS_NAME

    @property
    def metrics_path(self) -> Path | None:
        """The file of OpenMetrics text, if there is one."""
        return None if self.directory is None else self.directory / METRICS_NAME


def telemetry_of(asked: "str | os.PathLike[str] | Telemetry | None") -> Telemetry | None:
    """Return what ``telemetry=`` asks for; None for nothing."""
    return asked if asked is None or isinstance(asked, Telemetry) else Telemetry(asked)
