"""A DDP script that registers a communication hook of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
model.register_comm_hook(None, fp16_compress_hook)
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
print("gradient", float(model.module.weight.grad.sum()))
dist.destroy_process_group()
