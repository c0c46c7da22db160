"""Every private name of torch that the package uses, in one place; a test pins them by version."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    Backend,
    DebugLevel,
    PrefixStore,
    Store,
    _DistributedBackendOptions,
    get_debug_level,
)
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.distributed.device_mesh import _normalize_backend_override
from torch.distributed.distributed_c10d import (
    _create_process_group_wrapper,
    _get_default_store,
    _world,
)
from torch.nn.parallel import DistributedDataParallel

_F = TypeVar("_F", bound=Callable[..., Any])

TorchOptions = Backend.Options
BackendRequest = _DistributedBackendOptions


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


def watch_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` with `parameter` whenever its gradient has been accumulated."""
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def in_backward() -> bool:
    """Tell whether autograd called, directly or not, on this thread."""
    return torch._C._current_graph_task_id() != -1


def hooks_each_parameter(ddp: DistributedDataParallel) -> bool:
    """Tell whether `ddp` calls hooks for single gradients (dynamo's ``python_reducer``)."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def default_store(prefix: str) -> Store:
    """Return the store of the default group under `prefix`."""
    return PrefixStore(prefix, _get_default_store())


def gloo_group(
    name: str, rank: int, size: int, timeout_s: float, *, own_connection: bool = False
) -> "dist.ProcessGroup":
    """Return a gloo group under `name` in the default store, unknown to torch's registry.

    It lives as long as it is referenced, whatever groups are destroyed meanwhile, and needs no
    rank but its own. Torch's functions that look a group up do not take it; its methods work.
    Threads that make groups at the same time need connections of their own to the store: it
    serves one call after the other, and one that waits for other ranks holds up the next.

    Raises
    ------
    RuntimeError
        If the ranks do not meet within `timeout_s` seconds.
    """
    store = default_store(name)
    if own_connection:
        store = store.clone()  # type: ignore[attr-defined]
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


def plain_group(request: BackendRequest) -> tuple["dist.ProcessGroup", dict[str, Any]]:
    """Return the group that torch would have made for `request`, and its backends by device type.

    They are gloo, and for CUDA tensors NCCL where torch has it. With ``TORCH_DISTRIBUTED_DEBUG``
    at ``DETAIL`` they compare their calls between ranks, as in torch's own groups.
    """
    place = request.group_rank, request.group_size
    # Not under the group's own names, which are another backend's where one follows.
    store = PrefixStore("topo", request.store)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), *place, request.timeout)
    gloo.options.global_ranks_in_group = request.global_ranks_in_group
    gloo.options.group_name = dist.GroupName(request.group_id)
    gloo._set_sequence_number_for_group()
    made: dict[str, Any] = {"cpu": gloo}
    if torch.cuda.is_available():
        made["cuda"] = gloo
        if dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = request.timeout
            options.global_ranks_in_group = request.global_ranks_in_group
            options.group_name = dist.GroupName(request.group_id)
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), *place, options)
            nccl._set_sequence_number_for_group()
            made["cuda"] = nccl
    if debugs_in_detail():
        for device, backend in made.items():
            made[device] = _create_process_group_wrapper(
                wrapped_pg=backend,
                store_prefix=f"{request.group_id}/{device}",
                store=store,
                rank=request.group_rank,
                world_size=request.group_size,
                timeout=request.timeout,
            )
    group: dist.ProcessGroup = dist.ProcessGroup(store, *place)
    adopt_backends(group, made)
    group._set_group_name(dist.GroupName(request.group_id))
    return group, made


def adopt_backends(group: "dist.ProcessGroup", backends: Mapping[str, Any]) -> None:
    """Let torch find backends in `group`, whose defaults they are, by type of device."""
    types = dist.ProcessGroup.BackendType
    group._set_default_backend(types.GLOO)
    for device, backend in backends.items():
        kind = types.NCCL if backend.name() == "nccl" else types.GLOO
        group._register_backend(torch.device(device), kind, backend)


def debugs_in_detail() -> bool:
    """Tell whether ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``."""
    return get_debug_level() == DebugLevel.DETAIL


def uncompiled(function: _F) -> _F:
    """Keep torch.compile out of a function that torch's C++ side calls, and of what it calls.

    The compiler looks at every frame that begins while a compiled function runs, those included.
    ``torch.compiler.disable`` does the same, and imports the compiler for it.
    """
    set_code_exec_strategy(
        function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    )
    return function


def mark_hooked(step: Callable[..., Any]) -> None:
    """Let optimizers not put their hooks around a ``step`` that calls another, which has them."""
    step.hooked = True  # type: ignore[attr-defined]


def factor_of(op: "dist.ReduceOp") -> Any:
    """Return the number or tensor that PREMUL_SUM multiplies by."""
    state: Any = op.__getstate__()
    return state[1]


def backend_of(group: "dist.ProcessGroup | None", device_type: str) -> str:
    """Return the name of the backend that `group` has for a type of device; empty if none."""
    inner: Mapping[str, str] | None = getattr(group or dist.group.WORLD, "backend_names", None)
    if inner is not None:  # a group of ours, whose configuration knows one name
        return inner.get(device_type, "")
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


def parameter_groups(module: torch.nn.Module) -> list[Any]:
    """Return the parameter groups of all that is wrapped by ``fully_shard``, the module's first."""
    found: dict[int, Any] = {}
    for part in _fsdp_modules(module):
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 there is one, or none
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        found |= {id(group): group for group in groups}
    return list(found.values())


def reshard(module: torch.nn.Module) -> None:
    """Free the parameters that FSDP has gathered, anywhere in `module`."""
    for part in _fsdp_modules(module):
        part.reshard()


def _fsdp_modules(module: torch.nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule  # late: it imports much

    return (part for part in module.modules() if isinstance(part, FSDPModule))


def replicate_group(parameters: Any) -> "dist.ProcessGroup | None":
    """Return over which group gradients of a parameter group are all-reduced; None for none."""
    return getattr(parameters.mesh_info, "replicate_process_group", None)


def set_replicate_group(parameters: Any, group: "dist.ProcessGroup") -> None:
    """Let a parameter group's gradients be all-reduced by another group of the same ranks."""
    parameters.mesh_info = copy(parameters.mesh_info)  # others may have the same
    parameters.mesh_info.replicate_process_group = group


def shards_of(parameters: Any) -> list[tuple[torch.nn.Parameter, torch.Size]]:
    """Return the parameters of a parameter group and the shapes of their padded shards."""
    return [(each.sharded_param, each.padded_sharded_param_size) for each in parameters.fsdp_params]


def reduce_device(parameters: Any) -> torch.device:
    """Return where the gradients of a parameter group are reduced."""
    device: torch.device = parameters.device
    return device


def lend_name(group: "dist.ProcessGroup", to: "dist.ProcessGroup") -> None:
    """Let torch's functions know `to`, which is in no registry, as they know `group`.

    They do until the job's groups are destroyed, or `take_name` is called.
    """
    _world.pg_map[to] = _world.pg_map[group]
    _world.pg_group_ranks[to] = _world.pg_group_ranks[group]


def take_name(group: "dist.ProcessGroup") -> None:
    """Undo `lend_name`."""
    _world.pg_map.pop(group, None)
    _world.pg_group_ranks.pop(group, None)


def mesh_backends(override: Mapping[int | str, Any], names: tuple[str, ...]) -> Any:
    """Return ``backend_override=`` of ``init_device_mesh`` as the mesh itself takes it."""
    return tuple(_normalize_backend_override(dict(override), len(names), names))
