"""What the ranks compute in a training step, and how long each of them takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log1p, sqrt
from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of a step without communication.

    Attributes
    ----------
    forward, backward, optimizer : float
        Of a rank of normal speed.
    copy_seconds_per_byte : float
        What it takes to copy a byte of gradient into its bucket, or to the host, and again back.
    slowdowns : mapping
        Stragglers: by rank, how many times longer it computes.
    jitter : float
        Standard deviation over mean of a rank's seconds from step to step; log-normal.
    seed : int
        Equal seeds draw equal steps.
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    copy_seconds_per_byte: float = 0.0
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def check(self, world_size: int) -> None:
        """Refuse what makes no sense.

        Raises
        ------
        ConfigError
            If a time is negative, a slowdown not positive, or its rank does not exist.
        """
        for name in ("forward", "backward", "optimizer", "copy_seconds_per_byte", "jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for rank, factor in self.slowdowns.items():
            if not 0 <= rank < world_size:
                raise ConfigError(
                    f"straggler {rank} is no rank; they go from 0 to {world_size - 1}"
                )
            if not 0 < factor < float("inf"):
                raise ConfigError(
                    f"straggler {rank} computes {factor} times as long; give a positive factor"
                )

    def labels(self, world_size: int) -> list[float]:
        """Return the slowdown of every rank."""
        return [self.slowdowns.get(rank, 1.0) for rank in range(world_size)]

    def factors(self, world_size: int, step: int) -> "NDArray[np.float64]":
        """Return how many times longer each rank computes in this step than one of normal speed."""
        import numpy as np

        factors = np.array(self.labels(world_size))
        if self.jitter:
            sigma = sqrt(log1p(self.jitter**2))
            generator = np.random.default_rng([self.seed, step])
            factors *= generator.lognormal(-sigma * sigma / 2, sigma, world_size)
        return factors


def slowest_of_each(
    factors: "NDArray[np.float64]", classes: Sequence[int]
) -> "NDArray[np.float64]":
    """Return the largest factor of each class of ranks."""
    import numpy as np

    found = np.zeros(max(classes) + 1)
    np.maximum.at(found, np.array(classes), factors)
    return found
