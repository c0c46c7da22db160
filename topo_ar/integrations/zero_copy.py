"""Gradient buckets that co-located ranks read where they lie, once DDP has settled on them."""

from collections import Counter

import torch

from topo_ar.execution.communicator import Communicator


class BucketSharing:
    """Shares every bucket that comes again: DDP replaces those of the first steps.

    Parameters
    ----------
    communicator : Communicator
        That reduces the buckets.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._seen: Counter[tuple[int, int, torch.dtype]] = Counter()

    def see(self, index: int, tensor: torch.Tensor) -> None:
        """Note a bucket that is about to be reduced; all ranks see the same ones in one order."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        key = (index, tensor.numel(), tensor.dtype)
        self._seen[key] += 1
        if self._seen[key] == 2:
            self._communicator.share(tensor)
