"""Trainings whose steps take a known time, for what watches them."""

import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Paced(nn.Module):
    """Layers whose backward takes `seconds` in all, whatever the machine has to do."""

    def __init__(self, seconds: float, layers: int = 3, side: int = 96) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(layers))
        self.seconds = seconds
        for layer in self.layers:
            layer.register_full_backward_pre_hook(self._sleep)

    def _sleep(self, module: nn.Module, grad_output: object) -> None:
        time.sleep(self.seconds / len(self.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def paced(seconds: float, side: int = 96, cap_mib: float = 0.03) -> DistributedDataParallel:
    """Return a DDP of a bucket for every layer."""
    torch.manual_seed(0)
    return DistributedDataParallel(Paced(seconds, side=side), bucket_cap_mb=cap_mib)


def one_step(ddp: DistributedDataParallel, rank: int, step: int) -> None:
    """Run forward and backward once."""
    ddp.zero_grad()
    side = ddp.module.layers[0].in_features
    x = torch.full((1, side), float(rank + 1 + step % 3), requires_grad=True)
    ddp(x).sum().backward()
