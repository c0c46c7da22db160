"""How far a compressed training may drift: what is watched, its limits, and what follows.

The residual of a sound compressor stays within some multiple of the gradient; one that grows on
and on is the sign of a training that diverges (random entries of 1 % and signs at a high learning
rate did so in small experiments).
"""

import math
from dataclasses import dataclass, replace

import torch

from topo_ar.compression.protocol import Group
from topo_ar.planning.codecs import Codec

# Of the exact sum of what was to be sent: sending nothing at all is an error of 1.
_MOST_ERROR = 2.0
_MOST_RESIDUAL = {"sign": 10.0, "powersgd": 100.0}
_MOST_RESIDUAL_OF_ROUNDING = 2.0
# Sparse entries wait for some 1/density steps.
_MOST_WAITING = 2.0
_GENTLER = {"sign": "int8", "int4": "int8", "int8": "bf16", "fp16": "bf16"}
_DENSEST = 0.25


@dataclass(frozen=True, slots=True)
class Drift:
    """What was found in a step.

    Attributes
    ----------
    error : float
        ``|sent - exact| / |exact|``, 2-norms over the bucket of the nodes' sums.
    residual : float
        ``|e| / |g|``, over the residuals and gradients of all nodes.
    """

    error: float
    residual: float


def measure(
    gradient: torch.Tensor,
    own: torch.Tensor,
    lost: torch.Tensor,
    total: torch.Tensor,
    rail: Group,
    node: Group,
) -> Drift:
    """Send exactly what was sent compressed, and compare; the same figures on all ranks.

    Parameters
    ----------
    gradient : Tensor
        This rank's shard.
    own, lost : Tensor
        What of shard and residual the codec took, and what it left.
    total : Tensor
        What it made of the rail's.
    rail, node : Group
        As for `Compressor.reduce`.
    """
    exact = rail.all_reduce(own + lost)
    parts = (total - exact, exact, lost, gradient)
    squares = torch.tensor([_square(part) for part in parts], dtype=torch.float64)
    error, sent, residual, whole = rail.all_reduce(node.all_reduce(squares)).tolist()
    # Every member of a rail has counted the first two; that cancels.
    return Drift(_ratio(error, sent), _ratio(residual, whole))


def _square(values: torch.Tensor) -> float:
    return float(values.double().square().sum())


def _ratio(part: float, whole: float) -> float:
    return math.sqrt(part / whole) if whole else 0.0


def beyond(drift: Drift, codec: Codec) -> str:
    """Return what is beyond the limits of `codec`, in words; empty if nothing is."""
    most = most_residual(codec)
    found = []
    if not drift.error <= _MOST_ERROR:
        found.append(
            f"the error of what is sent is {drift.error:.3g} times that, at most {_MOST_ERROR:g}"
        )
    if not drift.residual <= most:
        found.append(f"the residual is {drift.residual:.3g} gradients long, at most {most:g}")
    return " and ".join(found)


def most_residual(codec: Codec) -> float:
    """Return how many times larger than the gradient the residual of a codec may be."""
    if codec.name in ("topk", "randomk"):
        assert codec.argument is not None
        return _MOST_WAITING / codec.argument
    return _MOST_RESIDUAL.get(codec.name, _MOST_RESIDUAL_OF_ROUNDING)


def gentler(codec: Codec) -> Codec | None:
    """Return a codec that loses less; None where there is none."""
    if codec.name in _GENTLER:
        return Codec(_GENTLER[codec.name])
    if codec.argument is None:
        return None
    twice = replace(codec, argument=2 * codec.argument)
    if codec.name != "powersgd" and 2 * codec.argument > _DENSEST:
        return None
    return twice


def warm_up_density(density: float, done: float) -> float:
    """Return the density when a part `done` of the warm-up is over: 1/4, 1/16, ... `density`.

    After Lin et al., "Deep Gradient Compression" (2018).
    """
    ladder = []
    step = _DENSEST
    while step > density:
        ladder.append(step)
        step /= 4
    place = int(done * len(ladder))
    return ladder[place] if place < len(ladder) else density
