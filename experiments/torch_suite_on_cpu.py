"""Let cases of torch's suite that ask for GPUs run on CPU: a part of torch_suite.py.

Most of its DDP cases name a GPU for each rank, and would mean the same on CPU. Here every device
that they name is the CPU; what then passes with plain gloo says something about us as well.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
)
_NUM_DEVICES = 8


def lift_limits() -> None:
    """Take away what asks for GPUs, 8 ranks or more time; before the suite is imported."""
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: _same
    common_distributed.skip_if_no_gpu = _same
    common_distributed.skip_if_small_worldsize = _same
    common_distributed.nccl_skip_if_lt_x_gpu = lambda *_: _same
    common_distributed.require_n_gpus_for_nccl_backend = lambda *_: _same


def name_cpu_for_gpus() -> None:
    """Let whatever names a GPU in this process mean the CPU."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = _on_cpu(owner.to)  # type: ignore[method-assign]
        owner.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: _NUM_DEVICES
    real = DistributedDataParallel.__init__

    @wraps(real)
    def init(self: Any, module: Any, *_: Any, **named: Any) -> None:
        real(self, module, **{**named, "device_ids": None, "output_device": None})

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _same(thing: Any) -> Any:
    return thing


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    moves = function.__name__ == "to"

    @wraps(function)
    def wrapped(*args: Any, **named: Any) -> Any:
        if named.get("device") is not None:
            named["device"] = "cpu"
        if moves and len(args) > 1:
            target = args[1]
            names = isinstance(target, (int, str, torch.device))
            args = (args[0], "cpu" if names else target, *args[2:])
        return function(*args, **named)

    return wrapped
