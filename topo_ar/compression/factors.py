"""Thin factors of matrices, transposed (r x a): drawn, multiplied, packed and decoded."""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

Factors = dict[str, torch.Tensor]


def draw(seed: int, name: str, rank: int, length: int) -> torch.Tensor:
    """Return rank x length numbers from N(0, 1), the same for the same seed and name everywhere.

    Counter-based (Philox), keyed by seed and name: whoever asks, in whatever order, gets the same.
    """
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return torch.from_numpy(generator.standard_normal((rank, length), dtype=np.float32))


def multiply(factors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> Factors:
    """Return ``factors[name] @ others[name]`` for each name of `others`.

    On CUDA those of one shape are one batch, to save launches; on CPU stacking would cost a copy.
    """
    pairs = {name: (factors[name], other) for name, other in others.items()}
    if any(other.is_cuda for other in others.values()):
        return multiply_batches(pairs)
    return {name: factor @ other for name, (factor, other) in pairs.items()}


def multiply_batches(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Factors:
    """Return the product of each pair; pairs of equal shapes are multiplied together."""
    batches: dict[tuple[torch.Size, torch.Size], list[str]] = {}
    for name, (factor, other) in pairs.items():
        batches.setdefault((factor.shape, other.shape), []).append(name)
    products: Factors = {}
    for names in batches.values():
        factors, others = zip(*(pairs[name] for name in names), strict=True)
        batch = torch.bmm(torch.stack(factors), torch.stack(others))
        products.update(zip(names, batch.unbind(), strict=True))
    return products


def decode(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``left' right`` into `out` (a x b), given left (r x a) and right (r x b)."""
    if left.is_cuda or len(left) > _outer_rank():
        torch.mm(left.T, right, out=out)
        return
    torch.outer(left[0], right[0], out=out)
    for column, row in zip(left[1:], right[1:], strict=True):
        out.addr_(column, row)


def subtract(left: torch.Tensor, right: torch.Tensor, target: torch.Tensor) -> None:
    """Subtract ``left' right`` from `target` (a x b) in place; see `decode`."""
    if left.is_cuda or len(left) > _outer_rank():
        target.addmm_(left.T, right, alpha=-1)
        return
    for column, row in zip(left, right, strict=True):
        target.addr_(column, row, alpha=-1)


@functools.cache
def _outer_rank() -> int:
    """Return up to which rank adding outer products beats a matrix product on this CPU.

    MKL multiplies thin matrices slowly on AMD's: 4096 x 1024 of rank 4 took 2.8 ms, outer products
    1.0 ms. On Intel's the product takes no longer than writing its result, whatever the rank.
    """
    try:
        return 4 if "AuthenticAMD" in Path("/proc/cpuinfo").read_text() else 0
    except OSError:
        return 0


def flat(tensors: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the tensors one after the other, as a flat tensor like `like`."""
    return torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])


def unflat(
    message: torch.Tensor, shapes: Mapping[str, tuple[int, int]]
) -> tuple[Factors, torch.Tensor]:
    """Return the factors at the beginning of a flat `message`, and what is left of it."""
    factors = {}
    for name, (rank, length) in shapes.items():
        factors[name] = message[: rank * length].view(rank, length)
        message = message[rank * length :]
    return factors, message


def add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, added in order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
