"""Inputs of all-reduces whose results are known, and those results."""

import torch
import torch.distributed as dist

R = dist.ReduceOp
SUM, AVG, PRODUCT, MIN, MAX = R.SUM, R.AVG, R.PRODUCT, R.MIN, R.MAX


def whole_numbers(
    rank: int, world_size: int, numel: int, dtype: torch.dtype, op: object
) -> torch.Tensor:
    """Values whose reduction over eight ranks is exact in every dtype, but that integers wrap."""
    place = torch.arange(numel) * 7 + rank * 3
    if dtype is torch.bool:
        return place % 3 == 0
    if op == PRODUCT:
        values = torch.tensor([1, -1, 2, 1])[place % 4]
        return (values * 99 if not dtype.is_floating_point else values).to(dtype)
    # Averages of multiples of the world size are whole.
    scale = world_size if op == AVG else 1 if dtype.is_floating_point else 50
    return (place % 11 * scale).to(dtype)


def reference(parts: list[torch.Tensor], op: object) -> torch.Tensor:
    dtype = parts[0].dtype
    if dtype is torch.bool:
        return torch.stack(parts).all(0) if op in (PRODUCT, MIN) else torch.stack(parts).any(0)
    stacked = torch.stack([p.double() if dtype.is_floating_point else p.long() for p in parts])
    if op == PRODUCT:
        return stacked.prod(0).to(dtype)
    if op in (MIN, MAX):
        return (stacked.amin(0) if op == MIN else stacked.amax(0)).to(dtype)
    return (stacked.sum(0) / (len(parts) if op == AVG else 1)).to(dtype)


def in_fixed_order(parts: list[torch.Tensor], op: object) -> torch.Tensor:
    """Add or multiply up a binary tree over the rank numbers; 16-bit types in fp32."""
    dtype = parts[0].dtype
    row = [part.float() if dtype.itemsize == 2 else part for part in parts]
    while len(row) > 1:
        pairs = [row[at : at + 2] for at in range(0, len(row), 2)]
        row = [
            pair[0] if len(pair) == 1 else pair[0] * pair[1] if op == PRODUCT else pair[0] + pair[1]
            for pair in pairs
        ]
    total = row[0] / len(parts) if op == AVG else row[0]
    return total.to(dtype)
