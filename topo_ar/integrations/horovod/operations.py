"""Collective operations on tensors, by Horovod's names."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from topo_ar.integrations.horovod.compression import Compression, Compressor
from topo_ar.integrations.horovod.job import ProcessSet, global_process_set
from topo_ar.integrations.horovod.negotiation import Signature
from topo_ar.integrations.horovod.requests import Handle
from topo_ar.integrations.horovod.work import DTYPES

Tensors = Sequence[torch.Tensor]


class ReduceOp(StrEnum):
    """What is made of the ranks' tensors."""

    Average = "Average"
    Sum = "Sum"
    Adasum = "Adasum"
    Min = "Min"
    Max = "Max"
    Product = "Product"


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def chosen_op(op: ReduceOp | None, average: bool | None = None) -> ReduceOp:
    """Return the operation that ``op=`` and the older ``average=`` ask for.

    Raises
    ------
    ValueError
        If both are given.
    NotImplementedError
        For Adasum.
    """
    if op is not None and average is not None:
        raise ValueError("give op= or average=, which it has replaced, not both")
    if op is None:
        return Sum if average is False else Average
    if op == Adasum:
        raise NotImplementedError(
            "hvd.Adasum is not supported: it needs sums of its own at every level; use hvd.Average"
        )
    return ReduceOp(op)


def submit(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    *,
    op: str = "",
    factors: tuple[float, float] = (1.0, 1.0),
    splits: Sequence[int] = (),
    result: Callable[[Any], Any] | None = None,
    repeats: bool = False,
    work: "Callable[[dist.ProcessGroup], torch.futures.Future[torch.Tensor]] | None" = None,
) -> Handle:
    """Ask for something; see `Signature` and `Request`."""
    engine = process_set.engine
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise ValueError(f"tensors of a grouped {kind} must have one dtype and be on one device")
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if dtype not in DTYPES or (kind == "allreduce" and dtype == "int16"):
        raise ValueError(f"{kind} does not take tensors of {tensors[0].dtype}")
    signature = Signature(
        kind,
        engine.name_for(kind, name),
        dtype,
        tensors[0].device.type,
        tuple(tuple(tensor.shape) for tensor in tensors),
        op,
        factors,
        tuple(splits),
        repeats,
    )
    return engine.submit(signature, [tensor.detach() for tensor in tensors], result, work)


def synchronize(handle: Handle | Sequence[Handle]) -> Any:
    """Return the result of an asynchronous operation when it is there.

    Raises
    ------
    ValueError
        If the ranks asked for different things.
    ExecutionError
        If a rank failed.
    """
    if isinstance(handle, Handle):
        return handle.wait()
    return [each.wait() for each in handle]


def poll(handle: Handle | Sequence[Handle]) -> bool:
    """Tell whether `synchronize` would return, or raise, at once."""
    return handle.done() if isinstance(handle, Handle) else all(each.done() for each in handle)


# All-reduce.


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    repeats: bool = False,
) -> Handle:
    """Begin to reduce several tensors in place, at once; see `allreduce`."""
    originals = list(tensors)
    return submit(
        "allreduce",
        originals,
        name,
        process_set,
        op=chosen_op(op, average),
        factors=(float(prescale_factor), float(postscale_factor)),
        result=lambda _: originals,
        repeats=repeats,
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce several tensors into new ones, at once; see `allreduce`."""
    copies = [_copy(tensor) for tensor in tensors]
    return grouped_allreduce_async_(
        copies, average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce a tensor in place; see `allreduce`."""
    return submit(
        "allreduce",
        [tensor],
        name,
        process_set,
        op=chosen_op(op, average),
        factors=(float(prescale_factor), float(postscale_factor)),
        result=lambda _: tensor,
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce a tensor into a new one; see `allreduce`."""
    if tensor.is_sparse:
        return sparse_allreduce_async(tensor, name, chosen_op(op, average), process_set)
    return allreduce_async_(
        _copy(tensor), average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place and return it; see `allreduce`."""
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    reduced: torch.Tensor = synchronize(handle)
    return reduced


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place, at once, and return them; see `allreduce`."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    reduced: list[torch.Tensor] = synchronize(handle)
    return reduced


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        name, *ctx.rest = options
        handle = grouped_allreduce_async(tensors, None, name, *ctx.rest)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        handle = grouped_allreduce_async(gradients, None, None, *ctx.rest)
        return None, *synchronize(handle)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the ranks' tensors reduced, the same bits on all of them; differentiable.

    Parameters
    ----------
    tensor : Tensor
        Of one shape and dtype on all ranks. Sparse ones are summed or averaged.
    average : bool, optional
        The older way to say ``op=Average`` or ``op=Sum``.
    name : str, optional
        By which the ranks' calls find each other; else they do by their order.
    compression : Compressor
        What travels; `Compression.fp16`, for instance.
    op : ReduceOp
        Average when left out. Of integers it is rounded down.
    prescale_factor, postscale_factor : float
        By which tensors are multiplied before and after.
    process_set : ProcessSet
        The ranks.

    Raises
    ------
    ValueError
        If ranks ask for different things, or the dtype is not one that can be reduced.
    NotImplementedError
        For Adasum.
    ExecutionError
        If a rank failed.
    """
    chosen = chosen_op(op, average)
    if tensor.is_sparse:
        summed: torch.Tensor = synchronize(
            sparse_allreduce_async(tensor, name, chosen, process_set)
        )
        return summed
    small, ctx = compression.compress(tensor)
    options = (name, chosen, prescale_factor, postscale_factor, process_set)
    (reduced,) = _AllReduce.apply(options, small)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return several tensors reduced at once; else as `allreduce`."""
    small, ctxs = zip(*map(compression.compress, tensors), strict=True)
    options = (name, chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    reduced = _AllReduce.apply(options, *small)  # type: ignore[no-untyped-call]
    return [compression.decompress(each, ctx) for each, ctx in zip(reduced, ctxs, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    *,
    repeats: bool = False,
) -> Handle:
    """Begin to sum or average a sparse COO tensor; its result is a new one."""
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors can be summed and averaged, not reduced by {op}")
    return submit("sparse", [tensor], name, process_set, op=op, repeats=repeats)


# Reduce-scatter.


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce a tensor and keep this rank's rows of it; see `reducescatter`."""
    if tensor.dim() == 0:
        raise ValueError("a tensor without dimensions has no rows to scatter")
    size, place = process_set.size(), process_set.rank()
    rows, more = divmod(len(tensor), size)
    begin = rows * place + min(place, more)
    end = begin + rows + (place < more)
    copy = _copy(tensor)
    return submit(
        "allreduce",
        [copy],
        None if name is None else f"reducescatter.{name}",
        process_set,
        op=chosen_op(op),
        factors=(float(prescale_factor), float(postscale_factor)),
        result=lambda _: copy[begin:end].clone(),
    )


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *rest: Any) -> Any:
        ctx.rest = rest
        return synchronize(reducescatter_async(tensor, name, *rest))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        op, process_set, before, after = ctx.rest
        whole = synchronize(allgather_async(gradient.contiguous(), None, process_set))
        factor = before * after * (process_set.size() if op == Sum else 1)
        return whole * factor, None, None, None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor; differentiable for sums and averages.

    Rows are dealt out in rank order; the first ranks have one more where they do not go round.
    """
    small, ctx = compression.compress(tensor)
    rest = (chosen_op(op), process_set, prescale_factor, postscale_factor)
    rows = _ReduceScatter.apply(small, name, *rest)  # type: ignore[no-untyped-call]
    return compression.decompress(rows, ctx)


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, *rest: Any, **named: Any
) -> list[Handle]:
    """Begin a `reducescatter_async` of each tensor; else as that."""
    return [
        reducescatter_async(tensor, each, *rest, **named)
        for tensor, each in zip(tensors, _names(name, len(tensors)), strict=True)
    ]


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, *rest: Any, **named: Any
) -> list[torch.Tensor]:
    """Return a `reducescatter` of each tensor; else as that."""
    return [
        reducescatter(tensor, each, *rest, **named)
        for tensor, each in zip(tensors, _names(name, len(tensors)), strict=True)
    ]


# All-gather, broadcast, all-to-all.


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to gather the rows of all ranks; see `allgather`."""
    rows = _copy(tensor) if tensor.dim() else _copy(tensor).reshape(1)
    return submit("allgather", [rows], name, process_set)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Any:
        ctx.shape, ctx.process_set = tensor.shape, process_set
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows = ctx.shape[0] if ctx.shape else 1
        counts = synchronize(allgather_async(torch.tensor([rows]), None, ctx.process_set))
        handle = allreduce_async(gradient, None, None, Average, process_set=ctx.process_set)
        begin = int(counts[: ctx.process_set.rank()].sum())
        return synchronize(handle)[begin : begin + rows].reshape(ctx.shape), None, None


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the rows of all ranks, in rank order; differentiable.

    Parameters
    ----------
    tensor : Tensor
        The first dimension may differ from rank to rank.
    name, process_set
        As for `allreduce`.
    """
    rows: torch.Tensor = _AllGather.apply(  # type: ignore[no-untyped-call]
        tensor, name, process_set
    )
    return rows


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Handle]:
    """Begin an `allgather_async` of each tensor."""
    names = _names(name, len(tensors))
    return [allgather_async(*each, process_set) for each in zip(tensors, names, strict=True)]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return an `allgather` of each tensor."""
    names = _names(name, len(tensors))
    return [allgather(*each, process_set) for each in zip(tensors, names, strict=True)]


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to write the tensor of rank `root_rank` into that of every rank."""
    process_set.engine  # noqa: B018 - raises where it is not known
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank={root_rank} is not in {process_set}")
    op = str(root_rank)
    return submit("broadcast", [tensor], name, process_set, op=op, result=lambda _: tensor)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to write the tensor of rank `root_rank` into a new one on every rank."""
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Write the tensor of rank `root_rank` into that of every rank, and return it."""
    written: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return written


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, *rest: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, rest[1]
        return synchronize(broadcast_async(tensor, root_rank, *rest))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        handle = allreduce_async(gradient, None, None, Average, process_set=ctx.process_set)
        mean = synchronize(handle)
        at_root = ctx.process_set.ranks[ctx.process_set.rank()] == ctx.root_rank
        return mean if at_root else mean * 0, None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of rank `root_rank`; differentiable."""
    sent: torch.Tensor = _Broadcast.apply(  # type: ignore[no-untyped-call]
        tensor, root_rank, name, process_set
    )
    return sent


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to send rows to all ranks; see `alltoall`."""
    size = process_set.size()
    rows = len(tensor)
    if splits is None:
        if rows % size:
            raise ValueError(f"{rows} rows cannot be dealt out evenly to {size} ranks; give splits")
        counts = [rows // size] * size
    else:
        counts = [int(each) for each in splits]
        if len(counts) != size or sum(counts) != rows or min(counts) < 0:
            raise ValueError(f"splits {counts} do not deal out {rows} rows to {size} ranks")
    keeps_splits = splits is not None
    return submit(
        "alltoall",
        [_copy(tensor)],
        name,
        process_set,
        splits=counts,
        result=lambda both: both if keeps_splits else both[0],
    )


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, *rest: Any) -> Any:
        ctx.process_set = rest[1]
        if splits is None:
            splits = [len(tensor) // ctx.process_set.size()] * ctx.process_set.size()
            if sum(splits) != len(tensor):
                splits = None  # refused there
        output, ctx.received = synchronize(alltoall_async(tensor, splits, *rest))
        ctx.mark_non_differentiable(ctx.received)
        return output, ctx.received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        handle = alltoall_async(gradient, ctx.received, None, ctx.process_set)
        return synchronize(handle)[0], None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that all ranks have for this one, in rank order; differentiable.

    Parameters
    ----------
    tensor : Tensor
        Rows for all ranks, in rank order.
    splits : Tensor or sequence of int, optional
        How many rows are for each rank; equally many when left out.
    name, process_set
        As for `allreduce`.

    Returns
    -------
    Tensor, or tuple of Tensor
        With `splits` also how many rows came from each rank.
    """
    output, received = _AllToAll.apply(  # type: ignore[no-untyped-call]
        tensor, splits, name, process_set
    )
    return output if splits is None else (output, received)


# Waiting for each other.


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have come here."""
    synchronize(submit("barrier", [torch.empty(0)], None, process_set))


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and return the rank that was the last to join.

    Until all have joined, this one takes part in the others' sums and averages with zeros; an
    average is over all ranks nevertheless.

    Parameters
    ----------
    device : int
        Of no meaning here: zeros are made where the others' tensors are.
    """
    return global_process_set.ranks[global_process_set.engine.join()]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _names(name: str | None, count: int) -> list[str | None]:
    return [None if name is None else f"{name}_{number}" for number in range(count)]
