"""One bit an element and one scale for each piece of a parameter in a part.

``x ~ mean|x| * sign(x)``: the scale keeps the 1-norm, which is what error feedback needs
(Karimireddy et al., "Error Feedback Fixes SignSGD", 2019). A bit cannot say zero: zeros of a piece
that is not all zero decode to plus the scale.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from topo_ar.compression.two_shot import TwoShot
from topo_ar.planning.codecs import Codec


class ScaledSign(TwoShot):
    """1-bit signs in two shots; a piece that is cut by the border of a part has two scales."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec, SignBits())


class SignBits:
    """The encoding: one fp32 scale a run, then the signs, eight in a byte, lowest bit first."""

    align = 8

    def encode(self, values: torch.Tensor, runs: Sequence[int]) -> list[torch.Tensor]:
        """Return the scales and the packed signs."""
        scales = torch.empty(len(runs), device=values.device)
        for i, run in enumerate(_slices(runs)):
            # A 1-norm is accumulated one by one; a sum is not, and so is more exact.
            scales[i] = values[run].abs().sum() / (run.stop - run.start)
        return [scales, _pack(values)]

    def decode(self, message: torch.Tensor, runs: Sequence[int], out: torch.Tensor) -> None:
        """Write plus or minus the scale of its run to each element of `out`."""
        scales = message[: 4 * len(runs)].view(torch.float32)
        octets = _signs(out.device).index_select(0, message[4 * len(runs) :].int())
        out.copy_(octets.view(-1)[: out.numel()])
        for scale, run in zip(scales, _slices(runs), strict=True):
            out[run].mul_(scale)


def _slices(lengths: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(accumulate(lengths, initial=0))]


def _pack(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        return torch.from_numpy(np.packbits(values.numpy() >= 0, bitorder="little"))
    padded = torch.zeros(-(-values.numel() // 8) * 8, dtype=torch.uint8, device=values.device)
    padded[: values.numel()] = values >= 0
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)
    return (padded.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


@functools.cache
def _signs(device: torch.device) -> torch.Tensor:
    """Return the eight signs of each byte, 256 x 8; kept: to copy them makes the host wait."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1).to(device)
