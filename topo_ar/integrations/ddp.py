"""DistributedDataParallel with the planned all-reduce: ``topo_ar.attach(ddp)`` and ``ddp(...)``.

No ``from __future__ import annotations`` here: torch compares the hook's annotations as objects.
"""

import logging
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.execution.communicator import DEFAULT_TIMEOUT_S, Communicator
from topo_ar.execution.torch_private import (
    GradBucket,
    hooks_each_parameter,
    is_static_graph,
    registered_hooks,
    skips_unused,
)
from topo_ar.integrations.trace import Recorder
from topo_ar.planning.plan import Plan
from topo_ar.telemetry.bucket_trace import BucketTrace
from topo_ar.topology.model import Topology

logger = logging.getLogger("topo_ar")

_EACH_PARAMETER = (
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
    """

    def __init__(self, communicator: Communicator, recorder: Recorder | None = None) -> None:
        self.communicator: Communicator | None = communicator
        self.recorder = recorder
        self.error: BaseException | None = None

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket's gradients over all ranks.

        Never raises into torch's reducer and never returns None: an error is kept in `error` and
        fails the future, so that the reducer finishes its step and reports the text.
        """
        if isinstance(bucket, tuple):  # no reducer that would wait, and nobody reads the future
            raise ConfigError(_EACH_PARAMETER)
        try:
            if self.communicator is None:
                raise ExecutionError(
                    "this hook was loaded from a file and has no communicator; call "
                    "topo_ar.attach on a new DistributedDataParallel"
                )
            tensor = bucket.buffer()
            on_done = None
            if self.recorder is not None:
                on_done = partial(self.recorder.done, self.recorder.called(bucket, tensor))
            return self.communicator.all_reduce(tensor, dist.ReduceOp.AVG, on_done)
        except BaseException as error:
            self.error = error
            logger.exception("the hook failed")
            failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            failed.set_exception(error)  # type: ignore[arg-type]
            return failed

    def __getstate__(self) -> dict[str, Any]:
        return {"communicator": None, "recorder": None, "error": None}


class Handle:
    """What `attach` returns: the communicator, the bucket trace, and `close`."""

    def __init__(self, hook: DDPHook, communicator: Communicator, recorder: Recorder) -> None:
        self.hook = hook
        self.communicator = communicator
        self._recorder = recorder

    @property
    def error(self) -> BaseException | None:
        """The exception behind a failed step, with its class; DDP only reports the text."""
        return self.communicator.error or self.hook.error

    def trace(self) -> BucketTrace:
        """Return the bucket trace of the last steps."""
        return self._recorder.snapshot(self.communicator.world_size)

    def close(self) -> None:
        """Close the communicator; the DDP cannot run backward afterwards."""
        self.communicator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def attach(
    ddp: DistributedDataParallel,
    *,
    plan: str | Plan = "auto",
    topology: Topology | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Handle:
    """Let `ddp` average its gradients by the planned all-reduce. Collective over its ranks.

    The average is exact: the same as plain DDP up to the order of summation, and bit-identical on
    all ranks.

    Parameters
    ----------
    ddp : DistributedDataParallel
        Without a communication hook.
    plan, topology, timeout_s
        As for `Communicator`.

    Raises
    ------
    ConfigError
        If `ddp` is not a DDP, already has a hook, or uses an option that bypasses hooks.

    Examples
    --------
    ::

        model = DistributedDataParallel(module)
        handle = topo_ar.attach(model)
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(f"attach takes a DistributedDataParallel, not a {type(ddp).__name__}")
    if registered_hooks(ddp):
        raise ConfigError(
            "this DistributedDataParallel already has a communication hook (mixed_precision= adds "
            "one of its own), and torch allows only one; build it without"
        )
    if skips_unused(ddp):
        raise ConfigError(
            "skip_all_reduce_unused_params=True makes ranks call the hook for different buckets; "
            "build the DistributedDataParallel without it"
        )
    if hooks_each_parameter(ddp):
        raise ConfigError(_EACH_PARAMETER)
    if is_static_graph(ddp):
        logger.warning("static_graph=True: torch fails in no_sync() then, with or without a hook")
    communicator = Communicator(
        ddp.process_group, topology=topology, plan=plan, timeout_s=timeout_s
    )
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    recorder = Recorder(names)
    hook = DDPHook(communicator, recorder)
    ddp.register_comm_hook(None, hook.hook)
    ddp.register_forward_hook(recorder.forward_done)
    return Handle(hook, communicator, recorder)


def ddp(
    module: nn.Module,
    *,
    plan: str | Plan = "auto",
    topology: Topology | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **options: Any,
) -> DistributedDataParallel:
    """Return `module` wrapped in DDP with the planned all-reduce attached.

    Parameters
    ----------
    module : Module
        The model.
    plan, topology, timeout_s
        As for `Communicator`.
    **options
        Passed to DistributedDataParallel.

    Raises
    ------
    ConfigError
        As for `attach`.
    """
    model = DistributedDataParallel(module, **options)
    attach(model, plan=plan, topology=topology, timeout_s=timeout_s)
    return model
