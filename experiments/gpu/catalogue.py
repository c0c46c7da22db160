"""Which checks there are, in order of value, and what each needs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.gpu.context import Context, Figures


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes
    ----------
    name, question : str
        For people.
    deadline_s : float
        After which its processes are ended.
    backend : str
        What reduces CUDA tensors, ``gloo`` or ``nccl``; empty for one process without a group.
    run : callable
        Called on each rank with its context and a folder for files; raises if it fails.
    needs_cuda : bool
        Whether there is nothing to rehearse on CPU.
    """

    name: str
    question: str
    deadline_s: float
    backend: str
    run: "Callable[[Context, Path], Figures]"
    needs_cuda: bool = False


def _of(module: str, function: str) -> "Callable[[Context, Path], Figures]":
    """Import a check when it runs: the parent of its processes needs no torch."""

    def run(context: "Context", folder: Path) -> "Figures":
        from importlib import import_module

        made = getattr(import_module(f"experiments.gpu.{module}"), function)
        found: Figures = made(context, folder) if module == "machine" else made(context)
        return found

    return run


CHECKS = (
    Check(
        "gloo sums",
        "are sums of tensors on a device that several ranks share right over gloo?",
        60,
        "gloo",
        _of("sums", "sums"),
    ),
    Check(
        "gloo ddp",
        "does DDP with the hook end with the weights of plain DDP?",
        60,
        "gloo",
        _of("sums", "ddp"),
    ),
    Check(
        "gloo order",
        "do streams wait as they must, and is no buffer used too early?",
        60,
        "gloo",
        _of("order", "stress"),
    ),
    Check(
        "nccl alone",
        "do the streams of NCCL's stages wait for each other, on one rank?",
        45,
        "nccl one",
        _of("stages", "alone"),
    ),
    Check(
        "nccl sums",
        "do NCCL's stages give right sums?",
        75,
        "nccl",
        _of("stages", "together"),
    ),
    Check(
        "nccl order",
        "do streams wait as they must with NCCL?",
        75,
        "nccl",
        _of("order", "stress_short"),
    ),
    Check(
        "nccl ddp", "does DDP with the hook train right by NCCL?", 60, "nccl", _of("sums", "ddp")
    ),
    Check(
        "graph capture",
        "is capture refused, and does all work afterwards?",
        45,
        "gloo",
        _of("order", "capture"),
        needs_cuda=True,
    ),
    Check(
        "codec equality",
        "do codecs say on the device what they say on CPU?",
        45,
        "",
        _of("codecs", "as_on_cpu"),
    ),
    Check(
        "codec speed",
        "how fast are the codecs' kernels, and does none wait?",
        60,
        "",
        _of("codecs", "throughput"),
    ),
    Check(
        "infinite step",
        "does error feedback forget a step with an inf?",
        45,
        "",
        _of("codecs", "infinite_step"),
    ),
    Check("nvml", "is NVML recorded, and the machine described?", 45, "", _of("machine", "nvml")),
    Check(
        "fixed order",
        "is reproducible=True on the device bit by bit what it is on CPU?",
        45,
        "gloo",
        _of("sums", "fixed_order"),
    ),
    Check(
        "gloo bandwidth",
        "how fast is it through host memory, by size?",
        60,
        "gloo",
        _of("bandwidth", "bandwidth"),
    ),
    Check(
        "nccl bandwidth",
        "how fast are the stages against NCCL's own all-reduce, by size?",
        75,
        "nccl",
        _of("bandwidth", "bandwidth"),
    ),
)
