"""Tensors as messages of bytes, and what the members of a group must agree on for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from topo_ar.execution.errand import Errand
from topo_ar.execution.fingerprint import fingerprint

Bytes = NDArray[np.uint8]
Attend = Callable[[Errand], None]


@dataclass(slots=True)
class Call:
    """Which work a group is at, and how many operations of it it has begun."""

    fingerprint: int = 0
    number: int = 0

    def mark(self, op: str, dtype: torch.dtype, shape: Sequence[int] = ()) -> int:
        """Return what all members must agree on for the next operation, as 64 bits, signed."""
        self.number += 1
        text = f"{self.fingerprint} {self.number} {op} {dtype} {shape}"
        return fingerprint(text.encode())


def octets(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous tensor on the CPU; of another, that of a copy."""
    memory: Bytes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memory


def typed(message: Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return a message as a flat tensor that shares its memory."""
    if not message.nbytes:  # numpy gives it a stride that torch does not view as another dtype
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(message).view(dtype)


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return it in the shape of `like`, but for the length of its first dimension."""
    if flat.numel() == like.numel():
        return flat.view(like.shape)
    return flat.view(-1, *like.shape[1:])


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum, added from left to right in at least fp32, in the dtype of the parts.

    With `out` it is written there, in the dtype of `out`.
    """
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.empty(parts[0].numel(), dtype=wide) if out is None else out
    if len(parts) == 1:
        total.copy_(parts[0])
    else:
        torch.add(parts[0].to(wide), parts[1].to(wide), out=total)
    for part in parts[2:]:
        total += part.to(wide)
    return total.to(dtype) if out is None else total
