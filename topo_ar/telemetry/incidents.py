"""What was wrong, what was done about it, and what every rank was doing then: one file each."""

from pathlib import Path
from typing import Any

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.telemetry.bucket_trace import BucketTrace

SCHEMA_VERSION = 1


class RankAccount(msgspec.Struct, frozen=True):
    """What one rank says: the steps of the breach, and the trace of its last ones.

    `seconds` and `compute_seconds` are of the breached steps, in order, by its own clock.
    """

    rank: int
    seconds: tuple[float, ...]
    compute_seconds: tuple[float, ...]
    trace: BucketTrace


class Incident(msgspec.Struct, frozen=True):
    """A breach of targets.

    Attributes
    ----------
    first_missed_step, breach_step : int
        From the first step that missed a target to the one that made it a breach.
    acted_step : int
        The first step that went as `action` says, on all ranks.
    limits, values : dict of str to float
        Of the targets that were missed, and what the step of the breach had.
    action : str
        What was done: ``warned`` or in a sentence.
    cause : str
        Why, as far as the steps of all ranks tell.
    path_before, path_after : str
        How steps were reduced.
    plans_before, plans_after : tuple of str
        The hash of each bucket's plan.
    nodes : tuple of tuple of int
        The ranks of each node.
    ranks : tuple of RankAccount
        In rank order.
    """

    unix_seconds: float
    first_missed_step: int
    breach_step: int
    acted_step: int
    limits: dict[str, float]
    values: dict[str, float]
    action: str
    cause: str
    path_before: str
    path_after: str
    plans_before: tuple[str, ...]
    plans_after: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    ranks: tuple[RankAccount, ...]
    manifest: dict[str, Any]
    schema: int = SCHEMA_VERSION

    @property
    def complete(self) -> bool:
        """Whether every rank of the job has its account, with a trace that holds something."""
        everybody = sorted(rank for node in self.nodes for rank in node)
        return [account.rank for account in self.ranks] == everybody and all(
            any(step.buckets for step in account.trace.steps) for account in self.ranks
        )

    def write(self, directory: Path) -> Path:
        """Write it as JSON into `directory` and return the file; raises OSError."""
        path = directory / f"incident-{self.acted_step:08d}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        return path


def read_incident(path: Path) -> Incident:
    """Return the incident in a file.

    Raises
    ------
    ConfigError
        If it cannot be read or is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Incident)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no incident record: {error}") from None
