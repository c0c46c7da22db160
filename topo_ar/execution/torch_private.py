"""Every private name of torch that the package uses, in one place; a test pins them by version."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store
from torch._C._distributed_c10d import GradBucket as GradBucket
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


def in_backward() -> bool:
    """Tell whether autograd called, directly or not, on this thread."""
    return torch._C._current_graph_task_id() != -1


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


def nccl_group(name: str, rank: int, size: int, timeout_s: float) -> "dist.ProcessGroup":
    """Return an NCCL group under `name` in the default store; else as `gloo_group`.

    The ranks meet at its first collective, not here.

    Raises
    ------
    RuntimeError
        If torch was built without NCCL, or there is no CUDA device.
    """
    if not dist.is_nccl_available():
        raise RuntimeError("this build of torch has no NCCL")
    store = default_store(name)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.group_name = dist.GroupName(name)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    group: dist.ProcessGroup = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


def all_reduce_in(
    group: "dist.ProcessGroup", tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType"
) -> None:
    """Reduce `tensor` in place over a private group; on CUDA on the current stream.

    Torch's own functions are for groups in its registry: they report an error of others as theirs.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = False
    _finish(group.allreduce([tensor], options))


def reduce_scatter_in(group: "dist.ProcessGroup", shard: torch.Tensor, whole: torch.Tensor) -> None:
    """Sum `whole` over a private group into the `shard` of this rank; it may lie in `whole`."""
    options = dist.ReduceScatterOptions()
    options.asyncOp = False
    _finish(group._reduce_scatter_base(shard, whole, options))


def all_gather_in(group: "dist.ProcessGroup", whole: torch.Tensor, shard: torch.Tensor) -> None:
    """Gather the shards of a private group into `whole`; `shard` may lie in it."""
    options = AllgatherOptions()
    options.asyncOp = False
    _finish(group._allgather_base(whole, shard, options))


def _finish(work: "dist.Work | None") -> None:
    if work is not None:  # else the backend has put it on the current stream
        work.wait()


def backend_of(group: "dist.ProcessGroup | None", device_type: str) -> str:
    """Return the name of the backend that `group` has for a type of device; empty if none."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}.get(device_type, "")


def share_memory(storage: torch.UntypedStorage) -> int:
    """Move a CPU storage into shared memory, with all views of it, and return its descriptor.

    The descriptor is the storage's own and goes with it.

    Raises
    ------
    RuntimeError
        If there is no room in /dev/shm.
    """
    fd, _ = storage._share_fd_cpu_()
    return int(fd)
