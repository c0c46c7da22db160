"""The process-group backend ``topo``: all-reduce by plan, everything else as it was.

::

    dist.init_process_group("topo")
    group = dist.new_group(ranks, backend="topo")
    mesh = init_device_mesh("cpu", (2, 4), backend_override={0: "topo"})

A group holds the plain group that torch would have made of its ranks, of gloo for tensors on CPU
and NCCL, where there is one, for those on CUDA. Only all-reduce does not go there.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.execution.arguments import is_plain_memory, takes
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.network import local_address
from topo_ar.execution.torch_private import (
    BackendRequest,
    TorchOptions,
    adopt_backends,
    debugs_in_detail,
    factor_of,
    plain_group,
    uncompiled,
)
from topo_ar.integrations.lazy_communicator import LazyCommunicator
from topo_ar.planning.plan import Plan
from topo_ar.torch_backend import NAME

Tensors = list[torch.Tensor]
_NO_TIMEOUT = timedelta(0)
_SMALL_WORKS = 16


class BackendOptions(TorchOptions):
    """What ``pg_options=`` of `init_process_group` and `new_group` may ask of a group.

    Parameters
    ----------
    plan, reproducible
        As for `Communicator`.
    """

    def __init__(self, *, plan: str | Plan = "auto", reproducible: bool = False) -> None:
        super().__init__(NAME)
        self.plan = plan
        self.reproducible = reproducible


class ReduceWork(dist.Work):
    """What an all-reduce returns: a Work with its future, whose value is the list of tensors."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors
        self._error: BaseException | None = None
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._future: torch.futures.Future[Tensors] = torch.futures.Future(devices=list(devices))

    def complete(self) -> None:
        """Say that the tensors are reduced; on CUDA, that it is enqueued on this stream."""
        self._future.set_result(self._tensors)

    def fail(self, error: BaseException) -> None:
        """Say why they are not."""
        self._error = error
        self._future.set_exception(error)  # type: ignore[arg-type]

    @uncompiled
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the tensors are reduced.

        Raises
        ------
        ExecutionError
            If that failed, or took longer than `timeout`, if positive; the all-reduce goes on then.
        """
        if timeout > _NO_TIMEOUT and not self._future.done():
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout.total_seconds()):
                raise ExecutionError(
                    f"the all-reduce is not complete after {timeout.total_seconds():g} s"
                )
        self._future.wait()
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether the tensors are reduced, or will not be."""
        return self._future.done()

    def is_success(self) -> bool:
        """Tell whether the tensors are reduced."""
        return self._future.done() and self._error is None

    def exception(self) -> BaseException | None:
        """Return why they are not; None while that is open."""
        return self._error

    def result(self) -> Tensors:
        """Return the tensors."""
        self.wait()
        return self._tensors

    @uncompiled
    def get_future(self) -> "torch.futures.Future[Tensors]":
        """Return a future of the tensors."""
        # Torch's C++ side reads a Python exception as a result, and crashes; a callback's it knows.
        return self._future.then(_value)


class TopoGroup(dist.ProcessGroup):
    """A process group that all-reduces by plan.

    The communicator is made when the first tensor is reduced, and closed with the group. What it
    does not take (sparse tensors, operations on bits, other dtypes, CUDA graphs) the group's other
    backend does, or refuses.

    Parameters
    ----------
    request : BackendRequest
        Ranks, store and timeout, as torch.distributed hands them over.
    options : BackendOptions, optional
        What was given as ``pg_options=``.

    Raises
    ------
    ConfigError
        If `options` are another backend's, or ``GLOO_SOCKET_IFNAME`` is not usable.
    """

    def __init__(self, request: BackendRequest, options: Any = None) -> None:
        if options is not None and not isinstance(options, BackendOptions):
            raise ConfigError(
                f"pg_options of backend {NAME!r} are topo_ar.BackendOptions, "
                f"not {type(options).__name__}"
            )
        local_address(request.group_rank)  # gloo would say less of a name that is no interface's
        super().__init__(request.group_rank, request.group_size)  # type: ignore[call-arg]
        self._options = options or BackendOptions()
        self._timeout_s = request.timeout.total_seconds()
        self._plain, self._backends = plain_group(request)
        adopt_backends(self, self._backends)
        self._lazy = LazyCommunicator(self._make)
        # Torch's C++ side, given a Work that Python made, keeps none of its Python side. Only the
        # counting of ranks in DDP's join does that, by works of single numbers.
        self._small_works: deque[ReduceWork] = deque(maxlen=_SMALL_WORKS)

    def _make(self) -> Communicator:
        return Communicator(
            self,
            plan=self._options.plan,
            reproducible=self._options.reproducible,
            timeout_s=self._timeout_s,
            debug=True if debugs_in_detail() else None,
        )

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return ``topo``."""
        return NAME

    @property
    def backend_names(self) -> dict[str, str]:
        """The backend that does what is not planned, by type of device."""
        return {device: backend.name() for device, backend in self._backends.items()}

    @property
    def communicator_scope(self) -> str:
        """What tells the communicators of this group from those of groups of the same ranks."""
        return f"{NAME}/{self.group_name}/"

    @property
    def communicator(self) -> Communicator | None:
        """What reduces; None before the first all-reduce."""
        return self._lazy.ready

    @uncompiled
    def allreduce(  # type: ignore[override]
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """Reduce a tensor in place over the ranks of the group; see `Communicator.all_reduce`.

        Parameters
        ----------
        tensors : Tensor or sequence of one Tensor
            Any strides; one that is not contiguous is reduced by way of a copy.
        opts, op, timeout
            As torch's own groups take them. The timeout of the group holds, not that of a call.
        """
        if opts is None or not hasattr(opts, "reduceOp"):
            given, opts = (op if opts is None else opts), dist.AllreduceOptions()
            opts.reduceOp = dist.ReduceOp.SUM if given is None else given
        return self._reduce([tensors] if isinstance(tensors, torch.Tensor) else tensors, opts)

    @uncompiled
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce each of several tensors in place; else as `allreduce`."""
        return self._reduce(tensors, opts or dist.AllreduceCoalescedOptions(), coalesced=True)

    def _reduce(
        self, tensors: Sequence[torch.Tensor], opts: Any, *, coalesced: bool = False
    ) -> dist.Work:
        op, factor = opts.reduceOp.op, None
        if op == dist.ReduceOp.PREMUL_SUM and not tensors[0].is_cuda:
            op, factor = dist.ReduceOp.SUM, factor_of(opts.reduceOp)
        planned = self.size() > 1 and all(takes(tensor, op) for tensor in tensors)
        if not planned or not (coalesced or len(tensors) == 1):
            plainly = self._plain.allreduce_coalesced if coalesced else self._plain.allreduce
            return plainly(list(tensors), opts)
        if factor is not None:
            for tensor in tensors:
                tensor.detach().mul_(factor)
        work = ReduceWork(list(tensors))
        if tensors[0].numel() == 1:
            self._small_works.append(work)
        if not opts.asyncOp and len(tensors) == 1 and is_plain_memory(tensors[0]):
            self._lazy.wait().all_reduce_sync(tensors[0].detach(), op)
            work.complete()
        elif tensors[0].is_cuda:
            # What is enqueued follows the stream of this thread: it cannot wait for another one.
            _reduce_all(work, tensors, op, self._lazy.wait())
        else:
            self._lazy.call(partial(_reduce_all, work, tensors, op), work.fail)
        return work

    def split_group(self, *args: Any, **named: Any) -> "dist.ProcessGroup":
        """Refuse: what torch splits off a group knows of no plan.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError(
            'split_group would make a group of NCCL; use new_group(ranks, backend="topo")'
        )

    def shutdown(self) -> None:
        """Close the communicator and the backends; torch calls it when a group is destroyed."""
        self._lazy.close()
        super().shutdown()

    def abort(self) -> None:
        """End what is in flight."""
        self._lazy.close(timeout_s=0.0)
        super().abort()


_DELEGATED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


def _delegate(name: str) -> None:
    """Let the plain group do what a method asks for.

    Inherited, it would do the same, but with the interpreter locked: gloo's threads, which drop
    tensors of Python's under a lock that the method needs, then wait for it, and it for them.
    """
    method = getattr(dist.ProcessGroup, name)

    @wraps(method)
    @uncompiled
    def delegated(self: TopoGroup, *args: Any, **named: Any) -> Any:
        return method(self._plain, *args, **named)

    setattr(TopoGroup, name, delegated)


for _name in _DELEGATED:
    if hasattr(dist.ProcessGroup, _name):  # some came with later versions of torch
        _delegate(_name)


def _value(future: "torch.futures.Future[Tensors]") -> Tensors:
    tensors: Tensors = future.value()
    return tensors


def _reduce_all(
    work: ReduceWork,
    tensors: Sequence[torch.Tensor],
    op: dist.ReduceOp.RedOpType,
    communicator: Communicator,
) -> None:
    """Hand tensors to a communicator; the last of them to be reduced completes `work`."""
    futures: list[torch.futures.Future[torch.Tensor]] = []
    stores: list[Callable[[], object]] = []

    def finish(_: object) -> None:
        try:
            for future in futures:
                future.value()
            for store in stores:
                store()
            work.complete()
        except BaseException as error:
            work.fail(error)

    try:
        for tensor in map(torch.Tensor.detach, tensors):
            plain = tensor.contiguous().resolve_conj().resolve_neg()
            if plain is not tensor:
                stores.append(partial(tensor.copy_, plain))
            futures.append(communicator.all_reduce(plain, op))
        torch.futures.collect_all(futures).add_done_callback(finish)
    except BaseException as error:
        work.fail(error)
