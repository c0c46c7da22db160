"""The communication hook of DDP: it never raises into torch's reducer.

No ``from __future__ import annotations`` here: torch compares the hook's annotations as objects.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.torch_private import GradBucket
from topo_ar.integrations.bucket import Bucket
from topo_ar.integrations.compressed import CompressedReduction
from topo_ar.integrations.observer import Observers
from topo_ar.integrations.path_choice import PathChooser
from topo_ar.integrations.trace import Recorder
from topo_ar.integrations.zero_copy import BucketSharing
from topo_ar.telemetry.bucket_trace import BucketCall

logger = logging.getLogger("topo_ar")

# Steps after which the log says what another bucket cap would gain.
_ADVICE_AFTER_STEPS = 20

EACH_PARAMETER = (
    "torch._dynamo.config.optimize_ddp='python_reducer' hands hooks single gradients, not buckets; "
    "build the DistributedDataParallel under another setting, such as True"
)


class DDPHook:
    """The communication hook; register it by hand with ``ddp.register_comm_hook(None, hook.hook)``.

    Saving a DDP pickles its hooks, so a hook pickles without its communicator. Torch does not
    register the hooks of a loaded DDP again; call `attach` on it.

    Parameters
    ----------
    communicator : Communicator
        Over the ranks of the DDP's process group.
    recorder : Recorder, optional
        Keeps the bucket trace.

    Attributes
    ----------
    compression : CompressedReduction or None
        What reduces the buckets in place of the communicator.
    sharing : BucketSharing or None
        What keeps exact buckets in shared memory.
    observers : Observers
        Who watches the steps.
    path : PathChooser or None
        What says whether a step goes as planned or the plain way; one of the observers.
    advise : callable or None
        Called once, before the first bucket after 20 steps.
    require_group : callable or None
        Called before every bucket; raises where the DDP has been given another process group.
    error : BaseException or None
        Why the hook failed.
    """

    def __init__(self, communicator: Communicator, recorder: Recorder | None = None) -> None:
        self.communicator: Communicator | None = communicator
        self.recorder = recorder
        self.compression: CompressedReduction | None = None
        self.sharing: BucketSharing | None = None
        self.observers = Observers()
        self.path: PathChooser | None = None
        self.advise: Callable[[], None] | None = None
        self.require_group: Callable[[], None] | None = None
        self.error: BaseException | None = None

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket's gradients over all ranks.

        Never raises into torch's reducer and never returns None: an error is kept in `error` and
        fails the future, so that the reducer finishes its step and reports the text.
        """
        if isinstance(bucket, tuple):  # no reducer that would wait, and nobody reads the future
            raise ConfigError(EACH_PARAMETER)
        try:
            if self.require_group is not None:
                self.require_group()
            return self.reduce(bucket, bucket.buffer())
        except BaseException as error:
            self.error = error
            logger.exception("the hook failed")
            failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            failed.set_exception(error)  # type: ignore[arg-type]
            return failed

    def reduce(
        self,
        bucket: Bucket,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.AVG,
    ) -> torch.futures.Future[torch.Tensor]:
        """Reduce what is in a bucket in place; else as `Communicator.all_reduce`."""
        if self.communicator is None:
            raise ExecutionError(
                "this hook was loaded from a file and has no communicator; call "
                "topo_ar.attach on a new DistributedDataParallel"
            )
        self.observers.called(bucket, tensor)
        if self.compression is not None:
            self.compression.begin(bucket)
        call = None
        if self.recorder is not None:
            if self.advise is not None and bucket.index() == 0:
                self._advise_once(self.advise, self.recorder.num_steps)
            call = self.recorder.called(bucket, tensor)
        if tensor.is_cpu:
            return self._reduced(bucket, tensor, partial(self._done, call, tensor), op)
        # What is enqueued on a device is not there yet; a callback has streams that wait.
        future = self._reduced(bucket, tensor, partial(self._note, call), op)
        return future.then(self._observe) if self.observers.members else future

    def _reduced(
        self,
        bucket: Bucket,
        tensor: torch.Tensor,
        on_done: Callable[[], None],
        op: "dist.ReduceOp.RedOpType",
    ) -> torch.futures.Future[torch.Tensor]:
        assert self.communicator is not None
        plain = self.path is not None and self.path.plain
        if self.compression is not None and not plain and op == dist.ReduceOp.AVG:
            return self.compression.reduce(bucket, tensor, on_done)
        if self.sharing is not None and not plain:
            self.sharing.see(bucket.index(), tensor)
        name = f"bucket {bucket.index()}"
        return self.communicator.all_reduce(tensor, op, on_done, plain=plain, name=name)

    def _note(self, call: BucketCall | None) -> None:
        if self.recorder is not None and call is not None:
            self.recorder.done(call)

    def _done(self, call: BucketCall | None, tensor: torch.Tensor) -> None:
        self.observers.done(tensor)
        self._note(call)

    def _observe(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        tensor = future.value()
        self.observers.done(tensor)
        return tensor

    def _advise_once(self, advise: Callable[[], None], num_steps: int) -> None:
        """Give advice before the first bucket of a step, when all steps in the trace are whole."""
        if num_steps >= _ADVICE_AFTER_STEPS:
            self.advise = None
            advise()

    def __getstate__(self) -> dict[str, Any]:
        return {**dict.fromkeys(self.__dict__), "observers": Observers()}
