"""``Compression``: what tensors are made into before they are reduced, and back."""

from typing import Any

import torch

from topo_ar.planning.codecs import parse_codec


class Compressor:
    """Two functions; a class with others of its own may be given as ``compression=``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is reduced for a tensor, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return what was reduced as the tensor was."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Nothing is done."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor."""
        return tensor


def _cast(dtype: torch.dtype, name: str) -> type[Compressor]:
    class Cast(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            before = tensor.dtype
            return (tensor.to(dtype), before) if before.is_floating_point else (tensor, before)

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.to(ctx)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Floats travel as {dtype}."
    return Cast


class Codec(NoneCompressor):
    """Gradients compressed between nodes only, with error feedback; for `DistributedOptimizer`."""

    codec = ""


class Compression:
    """The choices for ``compression=``.

    ``fp16`` and ``bf16`` round before anything is added, on all ways.
    """

    none = NoneCompressor
    fp16 = _cast(torch.float16, "FP16Compressor")
    bf16 = _cast(torch.bfloat16, "BF16Compressor")

    @staticmethod
    def codec(text: str) -> type[Codec]:
        """Return a codec of topo_ar, such as ``int8``, ``topk:0.01`` or ``powersgd:4``.

        What it loses goes into later steps. That is not part of a checkpoint.

        Raises
        ------
        ConfigError
            If there is no such codec.
        """
        parse_codec(text)
        return type("Codec", (Codec,), {"codec": text})


def codec_of(compression: object) -> str:
    """Return the codec that a choice stands for; empty for those that change tensors."""
    return str(getattr(compression, "codec", ""))
