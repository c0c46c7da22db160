"""What a reduction asks of a bucket: DDP's ``GradBucket`` is one, a group of FSDP's another."""

from typing import Protocol

import torch


class Bucket(Protocol):
    """Gradients that are reduced together."""

    def index(self) -> int:
        """Return its place among those of the step; 0 begins a step."""
        ...

    def is_last(self) -> bool:
        """Tell whether it is known to be the last of the step."""
        ...

    def parameters(self) -> list[torch.Tensor]:
        """Return whose gradients it holds, in its order and without gaps."""
        ...
