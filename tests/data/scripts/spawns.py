"""A DDP script that starts its ranks itself."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def work(rank, world_size, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(nn.Linear(8, 8))
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 8), float(rank))).sum().backward()
    print("gradient", float(model.module.weight.grad.sum()))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (2, sys.argv[1]), nprocs=2)
