"""Summation kernels: one fixed order, 16-bit types accumulated in fp32 and rounded once.

Buffers travel as flat numpy arrays of a *storage* dtype; bfloat16, which numpy does not know, is
stored as its 16 bits and summed by torch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.generic]

_STORAGE: dict[torch.dtype, np.dtype[np.generic]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.int16),
    torch.bfloat16: np.dtype(np.int16),
}


def supported(dtype: torch.dtype) -> bool:
    """Tell whether the fast path can sum tensors of `dtype`."""
    return dtype in _STORAGE


class Kernel:
    """Sums equally long storage arrays of one torch dtype.

    Attributes
    ----------
    dtype : torch.dtype
        What is summed.
    storage : numpy.dtype
        The dtype of the arrays; of the same item size.
    rounds : bool
        Whether sums are accumulated in fp32 and rounded to 16 bits at the end of a stage.
    """

    __slots__ = ("dtype", "itemsize", "rounds", "storage")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.storage = _STORAGE[dtype]
        self.itemsize = dtype.itemsize
        self.rounds = dtype.itemsize == 2

    def view(self, tensor: torch.Tensor) -> Array:
        """Return the flat storage array that shares memory with a contiguous CPU `tensor`."""
        flat = tensor.detach().view(-1)
        if self.rounds:
            flat = flat.view(torch.int16)
        array: Array = flat.numpy()
        return array

    def sum_into(self, out: Array, sources: Sequence[Array], divisor: int = 1) -> None:
        """Write ``sum(sources) / divisor`` to `out`, added from left to right.

        The same sources in the same order give the same bits on every rank. `divisor` other than
        1 is for floating point only.
        """
        if self.rounds:
            self._sum_rounded(out, sources, divisor)
            return
        if len(sources) == 1:
            np.copyto(out, sources[0])
        else:
            np.add(sources[0], sources[1], out=out)
            for source in sources[2:]:
                np.add(out, source, out=out)
        if divisor != 1:
            np.divide(out, divisor, out=out)

    def _sum_rounded(self, out: Array, sources: Sequence[Array], divisor: int) -> None:
        tensors = [torch.from_numpy(source).view(self.dtype) for source in sources]
        total = tensors[0].float()
        for tensor in tensors[1:]:
            total.add_(tensor)
        if divisor != 1:
            total.div_(divisor)
        torch.from_numpy(out).view(self.dtype).copy_(total)
