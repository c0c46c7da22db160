"""Training with compression in rank processes: models, steps and what the tests compare."""

import os
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.integrations.ddp import Handle

CODECS = ["fp16", "bf16", "int8", "int4", "sign", "topk:0.05", "randomk:0.1", "powersgd:2"]
TWO_BY_TWO = blocks(2, 2)


def on_hosts(rank: int, hosts: Sequence[int]) -> None:
    """Let this rank count as being on host ``hosts[rank]``."""
    os.environ[HOST_ID_ENV] = str(hosts[rank])


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three layers, of which biases and the last one stay exact; 9 000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 64, bias=False), nn.Tanh(), nn.Linear(64, 8)
    ).to(dtype)


def attached(ddp: DistributedDataParallel, compression, **options) -> Handle:
    """Attach with compression from step 2 on."""
    settings = {"start_step": 2, "guard_steps": 0, "timeout_s": 20.0, **options}
    return topo_ar.attach(ddp, compression=compression, **settings)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what a rank is fed with in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 32, generator=generator).to(dtype)


def train_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Do one step of training."""
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()


def weights(module: nn.Module) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Given(nn.Module):
    """A model whose parameters' gradients are what it is called with."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        super().__init__()
        dtypes = dtypes or {}
        made = {k: torch.zeros(s, dtype=dtypes.get(k)) for k, s in shapes.items()}
        self.values = nn.ParameterDict({k: nn.Parameter(value) for k, value in made.items()})

    def forward(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        each = [(p * factors[k]).sum().double() for k, p in self.values.items()]
        return torch.stack(each).sum()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.values.items()}
