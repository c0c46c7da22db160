"""The k entries of largest magnitude, exactly, ties by lowest index."""

import numpy as np
import torch
from numpy.typing import NDArray

# A threshold is guessed from one entry in 61, so that a quarter more than k should pass it.
_STRIDE = 61
_SURPLUS = 1.25
_MAGNITUDE = 0x7FFFFFFF


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
    magnitudes = values.numpy().view(np.int32) & np.int32(_MAGNITUDE)
    candidates = _candidates(magnitudes, k)
    if candidates is None:
        return torch.from_numpy(_select(magnitudes, k))
    return torch.from_numpy(candidates[_select(magnitudes[candidates], k)])


def _candidates(magnitudes: NDArray[np.int32], k: int) -> NDArray[np.int64] | None:
    """Return the entries above a guessed threshold; None if it was guessed badly."""
    sample = magnitudes[::_STRIDE]
    above = int(_SURPLUS * k * len(sample) / len(magnitudes)) + 4
    if above >= len(sample) // 2:
        return None
    place = len(sample) - above
    threshold = np.partition(sample, place)[place]
    found = np.flatnonzero(magnitudes >= threshold)
    # Where much is equal, such as zeros, all of it passes.
    return found if k <= len(found) <= len(magnitudes) // 4 else None


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
    magnitudes = values.view(torch.int32).bitwise_and(_MAGNITUDE).long()
    order = torch.arange(_MAGNITUDE, _MAGNITUDE - values.numel(), -1, device=values.device)
    keys = (magnitudes << 32) | order
    return torch.topk(keys, k, sorted=False).indices.sort().values
