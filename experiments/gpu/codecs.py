"""The kernels of compression on the device: how fast, as right as on CPU, and without waiting."""

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch

from experiments.compression_kernels import pairs
from experiments.gpu.context import Context, Figures, require
from experiments.simulated_ranks import RankGroup, SimulatedJob
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.factors import decode, multiply
from topo_ar.compression.orthogonal import orthogonalize
from topo_ar.compression.parts import join_bytes
from topo_ar.compression.protocol import Layout, Piece, Reduced
from topo_ar.compression.quantize import BlockInteger
from topo_ar.compression.registry import make
from topo_ar.compression.select import top_k_indices
from topo_ar.compression.sign import SignBits
from topo_ar.planning.codecs import parse_codec

_NBYTES = 100_000_000
_SHAPES = [(1024, 1024)] * 8 + [(4096, 1024)] * 4
_RANK = 4
_CODECS = ("fp16", "bf16", "int8", "int4", "sign", "topk:0.01", "randomk:0.01", "powersgd:4")

Kernel = tuple[Callable[[], object], Callable[[], object]]


def throughput(context: Context) -> Figures:
    """Time ours against torch's own; GB/s of the fp32 input, and ours must not make the host wait.

    A kernel that waits fails the check after all were timed.
    """
    numel = (_NBYTES if context.on_cuda else _NBYTES >> 2) // 4
    if context.quick:
        numel >>= 4
    random = torch.Generator(context.device).manual_seed(0)
    values = torch.randn(numel, generator=random, device=context.device)
    kernels: dict[str, tuple[Kernel, int]] = {
        name: (kernel, values.nbytes)
        for name, kernel in pairs(values).items()
        if name != "finite check"  # its answer is for the host
    }
    kernels |= _factors(context, random)
    figures: Figures = {}
    waits = []
    for name, ((theirs, ours), nbytes) in kernels.items():
        rates = []
        for run in (theirs, ours):
            seconds = statistics.median(context.seconds(run, 3 if context.quick else 20))
            rates.append(f"{nbytes / seconds / 1e9:.3g}")
        figures[name] = f"{rates[1]} GB/s (torch {rates[0]})"
        try:
            with context.without_waits():
                ours()
        except RuntimeError as error:
            waits.append(f"{name} ({str(error).splitlines()[0]})")
    require(not waits, f"the host waits for: {'; '.join(waits)}; rates were {figures}")
    return figures


def _factors(context: Context, random: torch.Generator) -> dict[str, tuple[Kernel, int]]:
    """Return PowerSGD's parts by name, with the bytes of the matrices."""
    shapes = _SHAPES[:1] if context.quick else _SHAPES

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=context.device)

    matrices = {f"m{i}": draw(*shape) for i, shape in enumerate(shapes)}
    right = {name: draw(_RANK, m.shape[1]) for name, m in matrices.items()}
    turned = {name: m.T for name, m in matrices.items()}
    left = multiply(right, turned)
    out = {name: torch.empty_like(m) for name, m in matrices.items()}
    nbytes = sum(m.nbytes for m in matrices.values())
    bases = list(left.values())

    def all_decoded(multiplied: Callable[..., object]) -> None:
        for name in matrices:
            multiplied(left[name], right[name], out[name])

    def torchs(p: torch.Tensor, q: torch.Tensor, target: torch.Tensor) -> None:
        torch.matmul(p.T, q, out=target)

    return {
        "powersgd P = M Q": (
            (
                lambda: [m @ right[name].T for name, m in matrices.items()],
                partial(multiply, right, turned),
            ),
            nbytes,
        ),
        "powersgd P Q'": ((partial(all_decoded, torchs), partial(all_decoded, decode)), nbytes),
        "orthogonal": (
            (lambda: [torch.linalg.qr(b.T) for b in bases], partial(orthogonalize, bases)),
            sum(b.nbytes for b in bases),
        ),
    }


def as_on_cpu(context: Context) -> Figures:
    """Encode and decode on the device and on CPU, and compare."""
    numel = 100_003
    host = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    host[::7] = host[1]  # ties
    values = host.to(context.device)
    figures: Figures = {}
    for k in (1, 1000, 30_000):
        chosen = top_k_indices(values, k).cpu()
        require(torch.equal(chosen, top_k_indices(host, k)), f"top {k} is another choice")
    for bits in (8, 4):
        figures[f"int{bits} scales off by"] = _same_integers(values, host, bits)
    _same_signs(values, host)
    matrix = torch.randn(_RANK, 3000, generator=torch.Generator().manual_seed(4))
    matrix[3] = matrix[2]  # of deficient rank
    (basis,) = orthogonalize([matrix.to(context.device)])
    gram = (basis @ basis.T).cpu()
    off = float((gram[:3, :3] - torch.eye(3)).abs().max())
    require(off < 1e-5, f"a basis is off orthogonal by {off:.2g}")
    require(bool(basis.isfinite().all()), "the basis of a deficient matrix is not finite")
    figures["basis off orthogonal by"] = off
    return figures


def _same_integers(values: torch.Tensor, host: torch.Tensor, bits: int) -> float:
    """Compare encodings, which may round differently, and decodings, which may not."""
    encoding = BlockInteger(bits)
    scales, integers = encoding.encode(values)
    host_scales, host_integers = encoding.encode(host)
    off = float((scales.cpu() / host_scales - 1).abs().max())
    require(off < 2e-7, f"scales of int{bits} differ by {off:.2g}")
    others = float((integers.cpu() != host_integers).float().mean())
    require(others < 1e-3, f"{others:.2%} of the integers of int{bits} differ")
    message, out, host_out = join_bytes([scales, integers]), values.clone(), host.clone()
    encoding.decode(message, (), out)
    encoding.decode(message.cpu(), (), host_out)
    require(torch.equal(out.cpu(), host_out), f"int{bits} decodes to other values")
    return off


def _same_signs(values: torch.Tensor, host: torch.Tensor) -> None:
    runs = [1000, values.numel() - 1000]
    scales, bits = SignBits().encode(values, runs)
    host_scales, host_bits = SignBits().encode(host, runs)
    require(torch.equal(bits.cpu(), host_bits), "the packed signs differ")
    require(torch.allclose(scales.cpu(), host_scales, rtol=1e-5), "the scales of signs differ")
    out, host_out = values.clone(), host.clone()
    message = join_bytes([scales, bits])
    SignBits().decode(message, runs, out)
    SignBits().decode(message.cpu(), runs, host_out)
    require(torch.equal(out.cpu(), host_out), "signs decode to other values")


def infinite_step(context: Context) -> Figures:
    """Take an inf through every codec with error feedback: NaN for all, then as if it had not been.

    Two simulated nodes on one device; what both runs do afterwards must agree bit by bit.
    """
    layout = Layout(0, (Piece("w", (64, 128), 0, 8192, 0), Piece("b", (128,), 0, 128, 8192)))
    for name in _CODECS:
        with SimulatedJob(2, 1) as job:
            through = job.run(partial(_trained, context, layout, name, [0, 1, 2, 3], 2))
            without = job.run(partial(_trained, context, layout, name, [0, 1, 3], None))
        for one, other in zip(through, without, strict=True):
            require(bool(one[2].isnan().all()), f"{name}: an inf did not reach everyone")
            require(torch.equal(one[1], other[1]), f"{name}: not reproducible")
            require(torch.equal(one[3], other[2]), f"{name}: an inf left a trace")
            require(bool(one[3].isfinite().all()), f"{name}: not finite after an inf")
    return {"codecs": ", ".join(_CODECS)}


def _trained(
    context: Context,
    layout: Layout,
    name: str,
    steps: list[int],
    infinite: int | None,
    node: int,
    local: int,
    rail: RankGroup,
    group: RankGroup,
) -> list[torch.Tensor]:
    """Reduce a gradient in each of `steps`, on one rank; return the totals."""
    feedback = ErrorFeedback(make(parse_codec(name)))
    totals = []
    for step in steps:
        random = torch.Generator().manual_seed(100 * step + node)
        gradient = torch.randn(layout.numel, generator=random)
        if step == infinite and node == 1:
            gradient[17] = math.inf
        reduced: Reduced = feedback.reduce(gradient.to(context.device), layout, rail, group, step)
        totals.append(reduced.total.clone())
    return totals
