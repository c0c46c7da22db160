"""What a DistributedDataParallel must not be for the hook to serve it."""

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

from topo_ar.errors import ConfigError
from topo_ar.execution.torch_private import (
    hooks_each_parameter,
    is_static_graph,
    registered_hooks,
    skips_unused,
)
from topo_ar.integrations.hook import EACH_PARAMETER

logger = logging.getLogger("topo_ar")


_HAS_HOOK = (
    "this DistributedDataParallel already has a communication hook (mixed_precision= adds "
    "one of its own), and torch allows only one; build it without"
)
_SKIPS = (
    "skip_all_reduce_unused_params=True makes ranks call the hook for different buckets; "
    "build the DistributedDataParallel without it"
)


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what can be told from the arguments of a DDP that is yet to be built.

    Raises
    ------
    ConfigError
        As `refuse_unsupported` would.
    """
    if arguments.get("mixed_precision") is not None:
        raise ConfigError(_HAS_HOOK)
    if arguments.get("skip_all_reduce_unused_params"):
        raise ConfigError(_SKIPS)


def refuse_unsupported(ddp: object) -> None:
    """Refuse what the hook cannot serve.

    Raises
    ------
    ConfigError
        If `ddp` is no DDP, has a hook, or an option that bypasses hooks.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            "attach takes a DistributedDataParallel or what fully_shard returned, not a "
            f"{type(ddp).__name__}"
        )
    if registered_hooks(ddp):
        raise ConfigError(_HAS_HOOK)
    if skips_unused(ddp):
        raise ConfigError(_SKIPS)
    if hooks_each_parameter(ddp):
        raise ConfigError(EACH_PARAMETER)
    if is_static_graph(ddp):
        logger.warning("static_graph=True: torch fails in no_sync() then, with or without a hook")


def refuse_fsdp1(strategy: str) -> NoReturn:
    """Refuse a FullyShardedDataParallel, and say how to get its all-reduces planned.

    Raises
    ------
    ConfigError
        Always.
    """
    if strategy == "NO_SHARD":
        how = 'give it process_group=dist.new_group(backend="topo"), or use DistributedDataParallel'
    elif strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        how = (
            "give it process_group=(SHARDS, REPLICAS), REPLICAS being made by "
            'dist.new_group(..., backend="topo"); or use fully_shard'
        )
    else:
        how = "it all-reduces no gradients; use fully_shard over topo_ar.init_mesh(device_type)"
    raise ConfigError(
        f"attach does not take a FullyShardedDataParallel, here {strategy}, whose hooks are not "
        f"told whose gradients they get: {how}"
    )


def same_group(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Return what refuses to go on once `ddp` has been given another process group."""
    reference, group = weakref.ref(ddp), ddp.process_group

    def require() -> None:
        now = reference()
        if now is not None and now.process_group is not group:
            raise ConfigError(
                "this DistributedDataParallel was given another process group "
                "(_update_process_group), and its hook reduces over the ranks of the one before; "
                "build a new DistributedDataParallel over the new group, and attach to that"
            )

    return require
