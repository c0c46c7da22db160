"""Kernels of compression against the same in torch's own operations, on one thread."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from topo_ar.compression.parts import join_bytes
from topo_ar.compression.quantize import BlockInteger
from topo_ar.compression.select import top_k_indices
from topo_ar.compression.sign import SignBits
from topo_ar.planning.codecs import BLOCK

_WARMUP = 2
Run = Callable[[], object]


def pairs(values: torch.Tensor) -> dict[str, tuple[Run, Run]]:
    """Return what is compared on `values` by name: torch's operations and ours."""
    numel = values.numel()
    found: dict[str, tuple[Run, Run]] = {}
    for density in (0.01, 0.001):
        k = round(density * numel)
        found[f"topk:{density:g}"] = (
            partial(_torch_topk, values, k),
            partial(top_k_indices, values, k),
        )
    out = torch.empty_like(values)
    integers, signs = BlockInteger(8), SignBits()
    packed = join_bytes(integers.encode(values))
    scales, rows = _torch_int8(values)
    found["int8 encode"] = (lambda: _torch_int8(values), lambda: integers.encode(values))
    found["int8 decode"] = (
        lambda: (rows.float() * scales).view(-1)[:numel],
        lambda: integers.decode(packed, (), out),
    )
    found["sign encode"] = (lambda: _torch_sign(values), lambda: signs.encode(values, [numel]))
    found["finite check"] = (
        lambda: bool(torch.isfinite(values).all()),
        lambda: bool(values.sum().isfinite()),
    )
    return found


def measure(nbytes: int, samples: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel: interleaved raw samples in seconds of both sides."""
    values = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0))
    for name, (theirs, ours) in pairs(values).items():
        times: tuple[list[float], list[float]] = ([], [])
        for sample in range(_WARMUP + samples):
            for side, run in enumerate((theirs, ours)):
                begin = time.perf_counter()
                run()
                if sample >= _WARMUP:
                    times[side].append(time.perf_counter() - begin)
        yield {
            "experiment": "compression_kernels",
            "kernel": name,
            "nbytes": nbytes,
            "num_threads": torch.get_num_threads(),
            "torch_seconds": times[0],
            "ours_seconds": times[1],
        }


def _torch_topk(values: torch.Tensor, k: int) -> torch.Tensor:
    return torch.topk(values.abs(), k, sorted=False).indices


def _torch_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = (padded.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-38)
    return scales, (padded / scales).round().to(torch.int8)


def _torch_sign(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = torch.nn.functional.pad(values >= 0, (0, -values.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=values.device)
    return values.abs().mean(), (bits * weights).sum(dim=1, dtype=torch.uint8)
