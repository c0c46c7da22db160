"""What a DistributedDataParallel must not be for the hook to serve it."""

import logging

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


def refuse_unsupported(ddp: object) -> None:
    """Refuse what the hook cannot serve.

    Raises
    ------
    ConfigError
        If `ddp` is no DDP, has a hook, or an option that bypasses hooks.
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
        raise ConfigError(EACH_PARAMETER)
    if is_static_graph(ddp):
        logger.warning("static_graph=True: torch fails in no_sync() then, with or without a hook")
