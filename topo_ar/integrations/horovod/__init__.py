"""Horovod's interface for PyTorch on planned all-reduces: scripts keep all but one line.

::

    import topo_ar.integrations.horovod as hvd  # was: import horovod.torch as hvd

Ranks are those of torchrun, mpirun or srun, or of a default process group that exists. Gradients
and other tensors are matched by name, whatever their order on each rank; what is ready on all ranks
travels together. What is not here raises an error that names it.
"""

from typing import Any

from topo_ar.errors import ExecutionError as HorovodInternalError
from topo_ar.integrations.horovod.compression import Compression, Compressor
from topo_ar.integrations.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from topo_ar.integrations.horovod.job import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    process_set_ids,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from topo_ar.integrations.horovod.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from topo_ar.integrations.horovod.optimizer import DistributedOptimizer

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_ids",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

_UNSUPPORTED = {
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm over the default process group",
    "elastic": "start the script by torchrun with --max-restarts and resume from a checkpoint",
    "run": "start the script by torchrun, mpirun or srun",
    "start_timeline": "topo_ar.Communicator.record_spans and TOPO_AR_LOG=info tell what happens",
    "stop_timeline": "there is none to stop",
}


def __getattr__(name: str) -> Any:
    if name in _UNSUPPORTED:
        raise AttributeError(f"hvd.{name} is not supported; {_UNSUPPORTED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _no() -> bool:
    """Return False: this is not in use here."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = ccl_built = ddl_built = rocm_built = _no


def gloo_built() -> bool:
    """Return True: what is not planned goes by gloo on CPU."""
    return True


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return the version of NCCL that torch has, as a number; 0 without."""
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return 0
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = (*version, 0)[:3]
    return int(major * 10_000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Tell whether torch was built with CUDA."""
    import torch

    return torch.version.cuda is not None
