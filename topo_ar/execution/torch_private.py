"""Every private name of torch that the package uses, in one place; a test pins them by version."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel


def registered_hooks(ddp: DistributedDataParallel) -> int:
    """Return how many communication hooks `ddp` already has."""
    return len(ddp._comm_hooks)


def is_static_graph(ddp: DistributedDataParallel) -> bool:
    """Tell whether `ddp` was built with ``static_graph=True``."""
    return bool(ddp.static_graph)


def bucket_cap_mib(ddp: DistributedDataParallel) -> float | None:
    """Return the bucket cap of `ddp` in MiB, None for torch's default with its small first one."""
    return None if ddp.bucket_bytes_cap_default else float(ddp.bucket_bytes_cap / (1 << 20))


def skips_unused(ddp: DistributedDataParallel) -> bool:
    """Tell whether `ddp` leaves out the reduction of unused parameters."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))


def hooks_each_parameter(ddp: DistributedDataParallel) -> bool:
    """Tell whether `ddp` calls hooks for single gradients (dynamo's ``python_reducer``)."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def default_store(prefix: str) -> Store:
    """Return the store of the default group under `prefix`."""
    return PrefixStore(prefix, _get_default_store())


def gloo_group(name: str, rank: int, size: int, timeout_s: float) -> "dist.ProcessGroup":
    """Return a gloo group under `name` in the default store, unknown to torch's registry.

    It lives as long as it is referenced, whatever groups are destroyed meanwhile, and needs no
    rank but its own. Torch's functions that look a group up do not take it; its methods work.

    Raises
    ------
    RuntimeError
        If the ranks do not meet within `timeout_s` seconds.
    """
    store = default_store(name)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    group: dist.ProcessGroup = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
