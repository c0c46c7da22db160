"""Rounding to fp16 or bf16 on the wire; sums stay in fp32."""

from collections.abc import Sequence

import torch

from topo_ar.compression.two_shot import TwoShot
from topo_ar.planning.codecs import Codec

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Cast(TwoShot):
    """fp16 or bf16, rounded once by each sender and once by the owner of a part.

    fp16 ends at 65504: a larger value or sum becomes infinite, and stays so in `total`, where a
    loss scaler sees it. Whoever averages must divide before the cast, not after it. bf16 has the
    range of fp32.
    """

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec, _Rounding(_DTYPES[codec.name]))


class _Rounding:
    align = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, values: torch.Tensor, runs: Sequence[int]) -> list[torch.Tensor]:
        return [values.to(self._dtype)]

    def decode(self, message: torch.Tensor, runs: Sequence[int], out: torch.Tensor) -> None:
        out.copy_(message.view(self._dtype))
