"""How requests that all ranks have made are carried out."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from topo_ar.integrations.horovod.negotiation import Due
from topo_ar.integrations.horovod.requests import Fence, Request

_OPS = {
    "Average": dist.ReduceOp.AVG,
    "Sum": dist.ReduceOp.SUM,
    "Min": dist.ReduceOp.MIN,
    "Max": dist.ReduceOp.MAX,
    "Product": dist.ReduceOp.PRODUCT,
}
_TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
# Bytes of an element by name of the dtype.
DTYPES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in _TYPES}

_streams: dict[torch.device, Any] = {}


def perform(
    batch: Sequence[Due],
    requests: Sequence[Request | None],
    group: dist.ProcessGroup,
    index: int,
    on_complete: Callable[[], None],
) -> None:
    """Do a batch; its requests' handles are launched, and `on_complete` is called at its end.

    Parameters
    ----------
    batch : sequence of Due
        Of one kind.
    requests : sequence of Request or None
        What this rank asked for; None where it has joined.
    group : ProcessGroup
        The ranks.
    index : int
        This rank's place among them.
    on_complete : callable
        May be called on another thread.
    """
    cuda = [tensor for each in requests if each for tensor in each.tensors if tensor.is_cuda]
    if cuda:
        device = cuda[0].device
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(_streams[device]):
            _perform(batch, requests, group, index, on_complete)
    else:
        _perform(batch, requests, group, index, on_complete)


def _perform(
    batch: Sequence[Due],
    requests: Sequence[Request | None],
    group: dist.ProcessGroup,
    index: int,
    on_complete: Callable[[], None],
) -> None:
    for request in requests:
        if request is not None:
            request.fence.wait()
    kind = batch[0].first.kind
    if kind == "allreduce":
        _all_reduce(batch, requests, group, on_complete)
        return
    if kind == "broadcast":
        _broadcast(batch, requests, group)
    else:
        (due,), (request,) = batch, requests
        if request is not None and request.work is not None:
            future = request.work(group)
            request.handle.launch(partial(_given, request, future), future.done)
            future.add_done_callback(lambda _: on_complete())
            return
        output = _SINGLE[kind](due, request, group, index)
        if request is not None:
            _launch(request, output)
    on_complete()


def _given(request: Request, future: "torch.futures.Future[torch.Tensor]") -> Any:
    return request.give(future.wait())


def _launch(request: Request, output: Any = None) -> None:
    """Launch the handle of what is done, or enqueued on this stream."""
    tensors = request.tensors if output is None else _tensors(output)
    fence = Fence(tensors)

    def finish() -> Any:
        fence.wait()
        return request.give(output)

    request.handle.launch(finish, lambda: True)


def _tensors(output: Any) -> list[torch.Tensor]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _all_reduce(
    batch: Sequence[Due],
    requests: Sequence[Request | None],
    group: dist.ProcessGroup,
    on_complete: Callable[[], None],
) -> None:
    op = batch[0].first.op
    parts: list[torch.Tensor] = []
    for due, request in zip(batch, requests, strict=True):
        if request is None:
            parts += _zeros(due)
            continue
        before, _ = due.first.factors
        for tensor in request.tensors:
            parts.append(tensor if before == 1 else _scaled(tensor, before))
    own = [tensor for request in requests if request for tensor in request.tensors]
    in_place = len(parts) == 1 and parts[0].is_contiguous()
    flat = parts[0] if in_place else torch.cat([part.reshape(-1) for part in parts])
    average_here = op == "Average" and not (flat.is_floating_point() or flat.is_complex())
    reduce_op = dist.ReduceOp.SUM if average_here else _OPS[op]
    work = dist.all_reduce(flat, reduce_op, group=group, async_op=True)
    assert work is not None
    lock, unpacked = threading.Lock(), False
    size = group.size()

    def finish() -> None:
        """Write the results back, for the first who asks for one of them."""
        nonlocal unpacked
        work.wait()
        with lock, torch.no_grad():
            if unpacked:
                return
            unpacked = True
            if average_here:
                flat.copy_(torch.div(flat, size, rounding_mode="floor"))
            offset = 0
            for due, request in zip(batch, requests, strict=True):
                _, after = due.first.factors
                for number, shape in enumerate(due.first.shapes):
                    part = flat.view(-1)[offset : offset + prod(shape)].view(shape)
                    offset += prod(shape)
                    if request is None:
                        continue
                    result = part if after == 1 else _scaled(part, after)
                    tensor = request.tensors[number]
                    if result.data_ptr() != tensor.data_ptr():
                        tensor.copy_(result)

    fence = Fence(own)  # NCCL enqueues on this stream

    def give(request: Request) -> Any:
        fence.wait()
        finish()
        return request.give()

    for request in requests:
        if request is not None:
            request.handle.launch(partial(give, request), work.is_completed)
    work.get_future().add_done_callback(lambda _: on_complete())


def _zeros(due: Due) -> list[torch.Tensor]:
    """Return what a joined rank has for the others: nothing of what they have."""
    dtype = getattr(torch, due.first.dtype)
    return [torch.zeros(shape, dtype=dtype, device=due.first.device) for shape in due.first.shapes]


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def _sparse(
    due: Due, request: Request | None, group: dist.ProcessGroup, index: int
) -> torch.Tensor:
    if request is None:
        (shape,), dtype = due.first.shapes, getattr(torch, due.first.dtype)
        total = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *shape[1:], dtype=dtype), shape
        )
    else:
        (tensor,) = request.tensors
        total = tensor.coalesce().clone()
    dist.all_reduce(total, group=group)
    return total / group.size() if due.first.op == "Average" else total


def _all_gather(
    due: Due, request: Request | None, group: dist.ProcessGroup, index: int
) -> torch.Tensor:
    assert request is not None
    (tensor,) = request.tensors
    num_rows = [due.signatures[rank].shapes[0][0] for rank in range(group.size())]
    most = max(num_rows)
    mine = tensor.new_zeros((most, *tensor.shape[1:]))
    mine[: len(tensor)] = tensor
    whole = tensor.new_empty((group.size() * most, *tensor.shape[1:]))
    if whole.numel():
        dist.all_gather(list(_as_bytes(whole).chunk(group.size())), _as_bytes(mine), group=group)
    if len(set(num_rows)) == 1:
        return whole
    return torch.cat([whole[rank * most :][:rows] for rank, rows in enumerate(num_rows)])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that every backend can send, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def _all_to_all(
    due: Due, request: Request | None, group: dist.ProcessGroup, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    assert request is not None
    (tensor,) = request.tensors
    sent = list(due.signatures[index].splits)
    received = [due.signatures[rank].splits[index] for rank in range(group.size())]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    dist.all_to_all_single(output, tensor.contiguous(), received, sent, group=group)
    return output, torch.tensor(received, dtype=torch.int32)


def _barrier(
    due: Due, request: Request | None, group: dist.ProcessGroup, index: int
) -> torch.Tensor:
    # That all ranks have asked for it is all there is to it.
    return torch.empty(0)


def _broadcast(
    batch: Sequence[Due], requests: Sequence[Request | None], group: dist.ProcessGroup
) -> None:
    own = [tensor for request in requests if request for tensor in request.tensors]
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in own])
    if flat.numel():
        dist.broadcast(_as_bytes(flat), int(batch[0].first.op), group=group)
    parts = torch.split(flat, [tensor.numel() for tensor in own])
    with torch.no_grad():
        for tensor, part in zip(own, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
    for request in requests:
        if request is not None:
            _launch(request)


_SINGLE: dict[str, Callable[[Due, Request | None, dist.ProcessGroup, int], Any]] = {
    "allgather": _all_gather,
    "alltoall": _all_to_all,
    "barrier": _barrier,
    "sparse": _sparse,
}
