"""Reductions of equally long arrays: one fixed order, 16-bit types in fp32 and rounded once.

Buffers travel as flat numpy arrays of a *storage* dtype; 16-bit floats are stored as their bits and
reduced by torch, since numpy does not know bfloat16.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Array = NDArray[np.generic]

_STORAGE: dict[torch.dtype, np.dtype[np.generic]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.int16),
    torch.bfloat16: np.dtype(np.int16),
}
_OPS: "dict[dist.ReduceOp.RedOpType, np.ufunc]" = {
    dist.ReduceOp.SUM: np.add,
    dist.ReduceOp.AVG: np.add,
    dist.ReduceOp.PRODUCT: np.multiply,
    dist.ReduceOp.MIN: np.minimum,
    dist.ReduceOp.MAX: np.maximum,
}
_WIDENED: dict[np.ufunc, Callable[..., torch.Tensor]] = {
    np.add: torch.add,
    np.multiply: torch.mul,
    np.minimum: torch.minimum,
    np.maximum: torch.maximum,
}
CODES = {op: code for code, op in enumerate(_OPS)}
"""The operations that have a kernel, each with a number to tell it apart."""


class Kernel:
    """Reduces equally long storage arrays of one torch dtype by one operation.

    The same sources in the same order give the same bits on every rank. Integers wrap around; a sum
    of bools is their OR, a product their AND. MIN and MAX are NaN where any source is, as in
    `torch.minimum`; of zeros of both signs they return the positive one, and all NaNs are one.

    What the ranks of a node have reduced and not yet the nodes is a *partial*: an array that only
    the kernel looks into.

    Parameters
    ----------
    dtype : torch.dtype
        Of the tensors; a real one.
    op : ReduceOp
        One of `CODES`.
    world_size : int
        What an average is divided by.

    Attributes
    ----------
    storage : numpy.dtype
        Of the arrays; of the item size of `dtype`.
    partial : numpy.dtype
        Of partials.
    """

    __slots__ = ("_divisor", "_exact", "_op", "_rounds", "dtype", "itemsize", "partial", "storage")

    def __init__(
        self,
        dtype: torch.dtype,
        op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM,
        world_size: int = 1,
    ) -> None:
        self.dtype = dtype
        self.storage = self.partial = _STORAGE[dtype]
        self.itemsize = dtype.itemsize
        self._op = _OPS[op]
        self._divisor = world_size if op == dist.ReduceOp.AVG else 1
        self._rounds = dtype.itemsize == 2
        self._exact = dtype.is_floating_point and self._op in (np.minimum, np.maximum)

    def view(self, tensor: torch.Tensor) -> Array:
        """Return the flat storage array that shares memory with a contiguous CPU `tensor`."""
        flat = tensor.detach().view(-1)
        if self._rounds:
            flat = flat.view(torch.int16)
        array: Array = flat.numpy()
        return array

    def partial_nbytes(self, rank: int) -> int:
        """Return how many bytes an element of a partial has that the node of `rank` made."""
        return self.itemsize

    def piece(self, partial: Array, begin: int, end: int) -> Array:
        """Return elements of one's own node's partial, contiguous."""
        return partial[begin:end]

    def reduce_all(self, out: Array, sources: Sequence[Array]) -> None:
        """Reduce the input of all ranks, from left to right."""
        self._reduce(out, sources, self._divisor, last=True)

    def reduce_in_node(self, out: Array, sources: Sequence[Array]) -> None:
        """Reduce the input of the ranks of a node, in their order, to a partial."""
        # A 16-bit sum may overflow between the stages, so the average is taken in the first.
        self._reduce(out, sources, self._divisor if self._rounds else 1, last=False)

    def reduce_between(self, out: Array, sources: Sequence[Array], rail: Sequence[int]) -> None:
        """Reduce the partials of all nodes, each that of a rank in `rail`, in this order."""
        self._reduce(out, sources, 1 if self._rounds else self._divisor, last=True)

    def reduce_partials(self, own: Array, sources: Sequence[Array]) -> None:
        """Reduce partials of several nodes, in their order, to one in place of `own`, one of them.

        All of them are used up.
        """
        # No source may be written over before it is read.
        out = own if any(own is source for source in sources[:2]) else sources[0]
        self._reduce(out, sources, 1, last=False)
        if out is not own:
            np.copyto(own, out)

    def _reduce(self, out: Array, sources: Sequence[Array], divisor: int, *, last: bool) -> None:
        if self._rounds:
            self._reduce_rounded(out, sources, divisor, last=last)
            return
        if len(sources) == 1:
            np.copyto(out, sources[0])
        else:
            self._op(sources[0], sources[1], out=out)
            for source in sources[2:]:
                self._op(out, source, out=out)
        if divisor != 1:
            np.divide(out, divisor, out=out)
        if last and self._exact:
            _unify(out)

    def _reduce_rounded(
        self, out: Array, sources: Sequence[Array], divisor: int, *, last: bool
    ) -> None:
        tensors = [torch.from_numpy(source).view(self.dtype) for source in sources]
        total = tensors[0].float()
        for tensor in tensors[1:]:
            _WIDENED[self._op](total, tensor, out=total)
        if divisor != 1:
            total.div_(divisor)
        if last and self._exact:
            _unify(total.numpy())
        torch.from_numpy(out).view(self.dtype).copy_(total)


def _unify(values: Array) -> None:
    """Leave nothing that tells in which order floats were compared."""
    np.add(values, 0, out=values)  # a negative zero becomes positive
    unify_nans(values)


def unify_nans(values: Array) -> None:
    """Give all NaNs the same bits."""
    nan = np.isnan(values)
    if nan.any():
        values[nan] = np.nan
