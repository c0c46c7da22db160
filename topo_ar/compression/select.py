"""The k entries of largest magnitude, exactly, ties by lowest index."""

import numpy as np
import torch
from numpy.typing import NDArray

# A threshold is guessed from one entry in 61, so that a quarter more than k should pass it.
_STRIDE = 61
_SURPLUS = 1.25
_MAGNITUDE = np.int32(0x7FFFFFFF)
# Entries looked at together: 256 KiB, which stay in a core's cache.
_CHUNK = 1 << 16


def top_k_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return where the `k` largest magnitudes are: the first k of a stable sort by ``-|x|``.

    Parameters
    ----------
    values : Tensor
        fp32, flat, finite, contiguous.
    k : int
        From 0 to the number of elements.

    Returns
    -------
    Tensor
        int64, ascending.

    Notes
    -----
    `torch.topk` passes over everything with a heap or radix selection and leaves ties undefined.
    Here a sample gives a threshold, one pass keeps what reaches it, and only that is selected
    from; too few or too many kept, and everything is selected from. Magnitudes are compared as
    integers: the bits of a finite float without its sign are in its order, subnormals included.
    """
    if k >= values.numel():
        return torch.arange(values.numel(), device=values.device)
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if values.device.type != "cpu":
        return _on_device(values, k)
    bits = values.numpy().view(np.int32)
    candidates = _candidates(bits, k)
    if candidates is None:
        return torch.from_numpy(_select(bits & _MAGNITUDE, k))
    return torch.from_numpy(candidates[_select(bits[candidates] & _MAGNITUDE, k)])


def _candidates(bits: NDArray[np.int32], k: int) -> NDArray[np.int64] | None:
    """Return the entries above a guessed threshold; None if it was guessed badly."""
    sample = bits[::_STRIDE] & _MAGNITUDE
    above = int(_SURPLUS * k * len(sample) / len(bits)) + 4
    if above >= len(sample) // 2:
        return None
    place = len(sample) - above
    threshold = np.partition(sample, place)[place]
    work = np.empty(min(_CHUNK, len(bits)), np.int32)
    found, count = [], 0
    for begin in range(0, len(bits), _CHUNK):
        chunk = bits[begin : begin + _CHUNK]
        magnitudes = np.bitwise_and(chunk, _MAGNITUDE, out=work[: len(chunk)])
        found.append(np.flatnonzero(magnitudes >= threshold) + begin)
        count += len(found[-1])
        # Where much is equal, such as zeros, all of it passes.
        if count > len(bits) // 4:
            return None
    return np.concatenate(found) if count >= k else None


def _select(magnitudes: NDArray[np.int32], k: int) -> NDArray[np.int64]:
    place = len(magnitudes) - k
    smallest = np.partition(magnitudes, place)[place]
    chosen = np.flatnonzero(magnitudes >= smallest)
    surplus = len(chosen) - k
    if surplus:
        ties = np.flatnonzero(magnitudes[chosen] == smallest)
        chosen = np.delete(chosen, ties[len(ties) - surplus :])
    return chosen


def _on_device(values: torch.Tensor, k: int) -> torch.Tensor:
    """Select by keys that are all different, magnitude before index; nothing waits for the host."""
    magnitudes = values.view(torch.int32).bitwise_and(int(_MAGNITUDE)).long()
    last = int(_MAGNITUDE)
    order = torch.arange(last, last - values.numel(), -1, device=values.device)
    keys = (magnitudes << 32) | order
    return torch.topk(keys, k, sorted=False).indices.sort().values
