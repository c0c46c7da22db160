"""The norm of a step's averaged gradients, each rank having looked at its part of every bucket."""

import math
from dataclasses import dataclass

import torch

from topo_ar.errors import ConfigError
from topo_ar.execution.agreement import DisagreementError
from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.observer import Observer

# Small enough for torch to work on the calling thread alone, and to stay in its core's cache.
_BLOCK_NUMEL = 1 << 14


@dataclass(frozen=True, slots=True)
class GradNorm:
    """The averaged gradients of a step as a whole; the same bits on all ranks.

    Attributes
    ----------
    norm : float
        Their L2 norm; inf or nan where an element is. Of scaled gradients under a GradScaler.
    non_finite : int
        How many elements are inf or nan.
    step : int
        The synchronised backward pass, counted from 0 since `attach`.
    """

    norm: float
    non_finite: int
    step: int


class NormMeter(Observer):
    """Adds up squares and counts non-finite elements in this rank's part of every bucket.

    All ranks hold the same results, so each looks at an n-th of every bucket, when it is done.

    Parameters
    ----------
    communicator : Communicator
        Of the gradients.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._step = -1
        self._parts: list[torch.Tensor] = []

    def begin(self, step: int) -> None:
        """Forget the step before."""
        self._step = step
        self._parts = []

    def done(self, reduced: torch.Tensor) -> None:
        """Take in a bucket that is reduced."""
        self._parts.append(partial_sums(reduced, self._communicator.rank, self._world_size))

    def agree(self) -> GradNorm:
        """Return the norm over all ranks. Collective, after the step's backward.

        Raises
        ------
        ConfigError
            If there was no step yet.
        ExecutionError
            If a rank failed, or asks for another step.
        """
        if not self._parts:
            raise ConfigError("there is no gradient yet; train a step before asking for its norm")
        mine = torch.stack(self._parts).sum(0).cpu()
        row = torch.cat([mine, torch.tensor([self._step], dtype=torch.float64)])
        rows = self._communicator.gather_rows(row).wait()
        steps = rows[:, 2].tolist()
        if len(set(steps)) > 1:
            raise DisagreementError(
                f"ranks ask for the norm of different steps, {[int(step) for step in steps]}; call "
                "grad_norm() on all ranks after the same backward"
            )
        squares, non_finite = rows[:, :2].sum(0).tolist()
        return GradNorm(math.sqrt(squares), int(non_finite), self._step)

    @property
    def _world_size(self) -> int:
        return self._communicator.world_size


def partial_sums(tensor: torch.Tensor, part: int, num_parts: int) -> torch.Tensor:
    """Return sum of squares and number of non-finite elements in one of equal parts of a tensor.

    Parameters
    ----------
    tensor : Tensor
        Floating point or complex, dense or sparse, any shape.
    part, num_parts : int
        Which part.

    Returns
    -------
    Tensor
        Two float64 on the tensor's device; of fp64 elements beyond 1e154 the sum overflows.
    """
    with torch.no_grad():
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        flat = tensor.detach().reshape(-1)
        mine = flat[flat.numel() * part // num_parts : flat.numel() * (part + 1) // num_parts]
        if mine.device.type != "cpu":  # nothing here may wait for the device
            wide = mine.double()
            return torch.stack([wide.dot(wide), (~wide.isfinite()).sum().double()])
        squares = non_finite = 0.0
        for begin in range(0, mine.numel(), _BLOCK_NUMEL):
            wide = mine[begin : begin + _BLOCK_NUMEL].double()
            found = float(wide.dot(wide))
            squares += found
            if not math.isfinite(found):
                non_finite += float((~wide.isfinite()).sum())
        return torch.tensor([squares, non_finite], dtype=torch.float64)
