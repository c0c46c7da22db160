"""Integers of 8 or 4 bits with one fp32 scale for each block of 128 elements.

``x ~ scale * q`` with ``scale = max|x| / qmax`` over the block and q rounded to nearest, so an
element is off by at most half a scale; zero stays zero and no element changes its sign. An outlier
coarsens its own block only. The form is that of block-wise quantised optimizer states and
gradients (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).
"""

from collections.abc import Iterator, Sequence

import torch

from topo_ar.compression.two_shot import TwoShot
from topo_ar.planning.codecs import BLOCK, Codec

# Elements handled at once: temporaries of 512 KiB stay in a core's cache.
_CHUNK = 1024 * BLOCK
# Below this a scale would be subnormal and its inverse infinite.
_SMALLEST = torch.finfo(torch.float32).tiny


class Quantized(TwoShot):
    """int8 or int4, in two shots."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec, BlockInteger(8 if codec.name == "int8" else 4))


class BlockInteger:
    """The encoding: scales of all blocks, then the integers, for int4 two in a byte."""

    align = BLOCK

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._max = 2 ** (bits - 1) - 1

    def encode(self, values: torch.Tensor, runs: Sequence[int] = ()) -> list[torch.Tensor]:
        """Return fp32 scales, one a block, and the integers as int8 or packed uint8."""
        numel, device = values.numel(), values.device
        scales = torch.empty(-(-numel // BLOCK), device=device)
        integers = torch.empty(scales.numel() * BLOCK, dtype=torch.int8, device=device)
        chunks = list(_chunks(integers.numel(), device))
        work = torch.empty(chunks[0][1] if chunks else 0, device=device)
        for begin, length in chunks:
            block = values[begin : begin + length]
            scratch = work[:length]
            if block.numel() < length:
                block = torch.nn.functional.pad(block, (0, length - block.numel()))
            rows, out = block.view(-1, BLOCK), scratch.view(-1, BLOCK)
            scale = scales[begin // BLOCK : (begin + length) // BLOCK]
            # Two passes, and many times faster than the one of a norm or of aminmax.
            torch.amax(torch.abs(rows, out=out), dim=1, out=scale)
            scale.div_(self._max).clamp_(min=_SMALLEST)
            torch.mul(rows, scale.reciprocal().unsqueeze(1), out=out)
            integers[begin : begin + length].copy_(scratch.round_())
        if self.bits == 8:
            return [scales, integers[:numel]]
        pairs = integers.view(torch.uint8).view(-1, 2)
        packed = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
        return [scales, packed[: -(-numel // 2)]]

    def decode(self, message: torch.Tensor, runs: Sequence[int], out: torch.Tensor) -> None:
        """Write ``scale * integer`` to `out`, whose size says how many there are."""
        numel, device = out.numel(), out.device
        blocks = -(-numel // BLOCK)
        scales = message[: 4 * blocks].view(torch.float32)
        integers = message[4 * blocks :].view(torch.int8)
        if self.bits == 4:
            low, high = (integers << 4) >> 4, integers >> 4
            integers = torch.stack((low, high), dim=1).view(-1)[:numel]
        whole = numel // BLOCK * BLOCK
        for begin, length in _chunks(whole, device):
            rows = integers[begin : begin + length].view(-1, BLOCK)
            scale = scales[begin // BLOCK : (begin + length) // BLOCK].unsqueeze(1)
            target = out[begin : begin + length].view(-1, BLOCK)
            target.copy_(rows).mul_(scale)
        if whole < numel:
            torch.mul(integers[whole:], scales[-1], out=out[whole:])


def _chunks(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield begin and length; all at once on accelerators, where launches cost more than passes."""
    step = _CHUNK if device.type == "cpu" else max(numel, 1)
    for begin in range(0, numel, step):
        yield begin, min(step, numel - begin)
