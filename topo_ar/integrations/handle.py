"""What the handles of all models have in common."""

from typing import Any, Self

from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.compression_buckets import CompressionReport
from topo_ar.integrations.hook import DDPHook
from topo_ar.integrations.path_choice import PathChoice
from topo_ar.integrations.trace import Recorder
from topo_ar.telemetry.bucket_trace import BucketTrace


class BaseHandle:
    """A reduction that was attached to a model.

    Parameters
    ----------
    hook : DDPHook
        What reduces the buckets.
    communicator : Communicator
        Of the gradients.
    recorder : Recorder
        Keeps the bucket trace.
    """

    def __init__(self, hook: DDPHook, communicator: Communicator, recorder: Recorder) -> None:
        self.hook = hook
        self.communicator = communicator
        self._recorder = recorder

    @property
    def error(self) -> BaseException | None:
        """The exception behind a failed step, with its class; DDP only reports the text."""
        return self.communicator.error or self.hook.error

    @property
    def fallbacks(self) -> int:
        """How often a failure made all ranks leave the fast path; see `Communicator`."""
        return self.communicator.fallbacks

    @property
    def choice(self) -> PathChoice:
        """Whether steps go as planned or by plain all-reduce, and why; see `PathChoice`."""
        assert self.hook.path is not None
        return self.hook.path.choice

    @property
    def compression(self) -> CompressionReport:
        """What is compressed how, and the bytes that this rank sends for it."""
        compression = self.hook.compression
        return CompressionReport("not asked for") if compression is None else compression.report()

    def trace(self) -> BucketTrace:
        """Return the bucket trace of the last steps."""
        return self._recorder.snapshot(self.communicator.world_size)

    def set_loss_scale(self, scale: Any) -> None:
        """Say what the loss is multiplied by, for what was not sent to stay right when it changes.

        A hook cannot see that. Without it a scale that changes makes what is outstanding from the
        step before too large or too small by as much, once; steps that overflow are skipped as
        they should be in either case.

        Parameters
        ----------
        scale : GradScaler, callable or float
            A scaler is asked in each step.
        """
        ask = getattr(scale, "get_scale", scale)
        if self.hook.compression is not None:
            self.hook.compression.loss_scale = ask if callable(ask) else lambda: float(ask)

    def close(self) -> None:
        """Close the communicator."""
        self.communicator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
