"""Records the bucket trace of a DDP training from its hooks."""

import time
from collections import deque

import torch

from topo_ar.integrations.bucket import Bucket
from topo_ar.telemetry.bucket_trace import BucketCall, BucketTrace, StepTrace


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

    @property
    def num_steps(self) -> int:
        """How many steps were begun, also those no longer kept."""
        return self._num_started

    def forward_done(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        """Note the end of a forward pass; a forward hook of the DDP."""
        self._backward_begin = time.monotonic()
        self._last_index = None

    def called(self, bucket: Bucket, tensor: torch.Tensor) -> BucketCall:
        """Note a call of the hook and return its row, to be completed by `done`."""
        index = bucket.index()
        # Without a forward pass in between (accumulation by hand) a restarted index is a new step.
        if self._last_index is None or index <= self._last_index or not self._steps:
            self._steps.append(StepTrace(self._num_started, []))
            self._num_started += 1
        self._last_index = index
        parameters = bucket.parameters()
        call = BucketCall(
            index=index,
            numel=tensor.numel(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            parameters=tuple(self._names.get(id(p), "?") for p in parameters),
            call_seconds=time.monotonic() - self._backward_begin,
            shapes=tuple(tuple(p.shape) for p in parameters),
        )
        self._steps[-1].buckets.append(call)
        return call

    def done(self, call: BucketCall) -> None:
        """Note that the reduction of `call` has completed."""
        call.done_seconds = time.monotonic() - self._backward_begin

    def snapshot(self, world_size: int) -> BucketTrace:
        """Return what was recorded so far."""
        return BucketTrace(world_size, tuple(self._steps))
