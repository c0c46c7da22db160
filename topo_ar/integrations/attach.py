"""``topo_ar.attach(model)``, whatever wraps the model."""

import sys
from typing import TYPE_CHECKING, Any, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from topo_ar.errors import ConfigError
from topo_ar.integrations import ddp, fsdp
from topo_ar.integrations.unsupported import refuse_fsdp1

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@overload
def attach(model: DistributedDataParallel, **options: Any) -> ddp.Handle: ...
@overload
def attach(model: "FSDPModule", **options: Any) -> fsdp.FSDPHandle: ...
def attach(model: Any, **options: Any) -> ddp.Handle | fsdp.FSDPHandle:
    """Let a model average its gradients by the planned all-reduce. Collective over its ranks.

    Parameters
    ----------
    model : DistributedDataParallel or FSDPModule
        What `DistributedDataParallel` or ``fully_shard`` returned.
    **options
        ``plan``, ``topology``, ``timeout_s``, ``reproducible``, ``compression`` and what belongs to
        it; for DDP also ``zero_copy``, ``grad_norm``, ``check_replicas_every``. See
        `topo_ar.integrations.ddp.attach` and `topo_ar.integrations.fsdp.attach`.

    Raises
    ------
    ConfigError
        If `model` is neither, or cannot be served; the message says why.

    Examples
    --------
    ::

        model = DistributedDataParallel(module)
        handle = topo_ar.attach(model)
    """
    theirs = sys.modules.get("torch.distributed.fsdp")  # where it is not loaded, nothing is one
    if theirs is not None and isinstance(model, theirs.FSDPModule):
        return fsdp.attach(model, **options)
    if theirs is not None and isinstance(model, theirs.FullyShardedDataParallel):
        refuse_fsdp1(model.sharding_strategy.name)
    return ddp.attach(model, **options)


def handle_of(model: nn.Module) -> Any:
    """Return the handle of a model that `attach` was called on or `ddp` made.

    Raises
    ------
    ConfigError
        If there is none.
    """
    handle = ddp.handle_of(model) or fsdp.handle_of(model)
    if handle is None:
        raise ConfigError(f"this {type(model).__name__} has no hook of topo_ar; call attach on it")
    return handle
