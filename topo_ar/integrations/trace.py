"""The bucket trace of a DDP training: which bucket was ready when, and when it was reduced.

Planner and simulator read it back as JSON. All times are seconds after the end of the step's last
forward pass, which is when backward starts.
"""

import time
from collections import deque
from pathlib import Path

import msgspec
import torch

from topo_ar.execution.torch_private import GradBucket

SCHEMA_VERSION = 1


class BucketCall(msgspec.Struct):
    """One call of the hook: `done_seconds` is None until the reduction has completed."""

    index: int
    numel: int
    dtype: str
    parameters: tuple[str, ...]
    call_seconds: float
    done_seconds: float | None = None


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


class Recorder:
    """Keeps the trace of the last `num_steps` steps.

    Parameters
    ----------
    names : dict
        Parameter names by ``id`` of the parameter.
    num_steps : int
        How many steps to keep.
    """

    def __init__(self, names: dict[int, str], num_steps: int = 64) -> None:
        self._names = names
        self._steps: deque[StepTrace] = deque(maxlen=num_steps)
        self._num_started = 0
        self._backward_begin = time.monotonic()
        self._last_index: int | None = None

    def forward_done(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        """Note the end of a forward pass; a forward hook of the DDP."""
        self._backward_begin = time.monotonic()
        self._last_index = None

    def called(self, bucket: GradBucket, tensor: torch.Tensor) -> BucketCall:
        """Note a call of the hook and return its row, to be completed by `done`."""
        index = bucket.index()
        # Without a forward pass in between (accumulation by hand) a restarted index is a new step.
        if self._last_index is None or index <= self._last_index or not self._steps:
            self._steps.append(StepTrace(self._num_started, []))
            self._num_started += 1
        self._last_index = index
        call = BucketCall(
            index=index,
            numel=tensor.numel(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            parameters=tuple(self._names.get(id(p), "?") for p in bucket.parameters()),
            call_seconds=time.monotonic() - self._backward_begin,
        )
        self._steps[-1].buckets.append(call)
        return call

    def done(self, call: BucketCall) -> None:
        """Note that the reduction of `call` has completed."""
        call.done_seconds = time.monotonic() - self._backward_begin

    def snapshot(self, world_size: int) -> BucketTrace:
        """Return what was recorded so far."""
        return BucketTrace(world_size, tuple(self._steps))
