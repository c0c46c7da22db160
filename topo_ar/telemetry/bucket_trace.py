"""The bucket trace of a DDP training as a file: which bucket was ready when, and when reduced.

All times are seconds after the end of the step's last forward pass, which is when backward starts.
"""

from pathlib import Path

import msgspec

from topo_ar.errors import ConfigError

SCHEMA_VERSION = 1


class BucketCall(msgspec.Struct):
    """One call of the hook.

    `shapes` are those of `parameters`, in order; traces of early versions lack them.
    `done_seconds` is None until the reduction has completed.
    """

    index: int
    numel: int
    dtype: str
    parameters: tuple[str, ...]
    call_seconds: float
    done_seconds: float | None = None
    shapes: tuple[tuple[int, ...], ...] = ()


class StepTrace(msgspec.Struct):
    """The buckets of one synchronised backward pass, in call order."""

    step: int
    buckets: list[BucketCall]


class BucketTrace(msgspec.Struct, frozen=True):
    """The last steps of a training on one rank."""

    world_size: int
    steps: tuple[StepTrace, ...]
    schema: int = SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Write the trace as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def read(path: Path) -> BucketTrace:
    """Return the trace in the file `path`.

    Raises
    ------
    ConfigError
        If the file cannot be read, is no bucket trace of a known schema, or holds no bucket.
    """
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=BucketTrace)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a bucket trace: {error}; write one with handle.trace().write(path)"
        ) from None
    if trace.schema != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} is a bucket trace of schema {trace.schema}; this version reads "
            f"{SCHEMA_VERSION}"
        )
    if not any(step.buckets for step in trace.steps):
        raise ConfigError(f"{path} holds no bucket; train at least one step before writing it")
    return trace
