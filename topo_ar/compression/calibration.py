"""What each codec costs on this machine: a whole step with error feedback, timed at start-up.

All ranks measure at the same time, as they will compress, so that what they share (cores, memory)
is shared here too.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean

import torch

from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.compression.registry import make
from topo_ar.planning.codec_costs import CodecCost
from topo_ar.planning.codecs import Codec

# Larger than a core's cache, as the shards of buckets are; the small one shows what is fixed.
_NUMEL = 1 << 20
_FEW = 1 << 12
_ROWS = {_NUMEL: 512, _FEW: 32}
_WINDOW_SECONDS = 0.03
_SHORT_SECONDS = 0.005
_MIN_STEPS = 2
# Parts of equal size need a power of two; on more nodes each does less of more parts.
_MEMBERS = (2, 4, 8)


class Mirror:
    """A group whose other members have what this one has; nothing is sent."""

    index = 0

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of as many equal tensors as there are members."""
        total = tensor.clone()
        for _ in range(self.size - 1):
            total += tensor
        return total

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return one tensor for each member."""
        return [tensor] * self.size

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the part for this member from each."""
        return [parts[self.index]] * self.size

    def begin_all_gather(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Return `all_gather`: codecs go through chunks as they do in a job."""
        return partial(self.all_gather, tensor)

    def begin_all_to_all(self, parts: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Return `all_to_all`."""
        return partial(self.all_to_all, parts)


def measure_costs(codecs: Iterable[Codec], num_nodes: int = 2) -> dict[str, CodecCost]:
    """Return what `codecs` cost this rank, by name; some 40 ms each where nothing else runs.

    A step of 4 MiB of fp32, and one of 16 KiB for what a step costs beside its bytes. What comes
    from other nodes is there at once.

    Parameters
    ----------
    codecs : iterable of Codec
        ``none`` costs nothing and is left out.
    num_nodes : int
        Members of a rail.
    """
    gradient = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0))
    rail = Mirror(next((size for size in _MEMBERS if size >= num_nodes), _MEMBERS[-1]))
    found = {}
    for codec in codecs:
        if not codec.lossy:
            continue
        few = min(_seconds(codec, gradient[:_FEW], rail, _SHORT_SECONDS))
        # The mean over a while, and not the fastest step: ranks may take turns on a core.
        many = fmean(_seconds(codec, gradient, rail, _WINDOW_SECONDS))
        # On a machine that is busy with something else the small step may seem the longer one.
        few = min(few, many / 2)
        slope = (many - few) / (gradient.nbytes - gradient[:_FEW].nbytes)
        found[str(codec)] = CodecCost(slope, few)
    return found


def _seconds(
    codec: Codec, gradient: torch.Tensor, rail: Mirror, window_seconds: float
) -> list[float]:
    """Return how long each step of a while takes on equal matrices, one for each node."""
    feedback, layout = ErrorFeedback(make(codec)), _layout(gradient.numel(), rail.size)
    feedback.reduce(gradient, layout, rail, Mirror(), 0)
    times = [time.perf_counter()]
    while times[-1] - times[0] < window_seconds or len(times) <= _MIN_STEPS:
        feedback.reduce(gradient, layout, rail, Mirror(), len(times))
        times.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(times)]


def _layout(numel: int, matrices: int) -> Layout:
    shape = _ROWS[numel], numel // _ROWS[numel] // matrices
    each = numel // matrices
    return Layout(0, tuple(Piece(f"m{i}", shape, 0, each, each * i) for i in range(matrices)))
