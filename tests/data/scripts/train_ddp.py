"""A training script as anybody writes one; it knows nothing of topo_ar.

Gradients are whole numbers times the number of ranks, so that their average is exact in every order
of summation: the weights at the end are equal, to the bit, whatever reduces them.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Numbers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(width, width) for _ in range(4))

    def forward(self, factors):
        pairs = zip(self.layers, factors, strict=True)
        return torch.stack([(weight * factor).sum() for weight, factor in pairs]).sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", required=True)
    parser.add_argument("--exit", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Numbers(args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        factors = [
            torch.randint(-8, 9, (args.width, args.width), generator=generator) * world_size
            for _ in range(4)
        ]
        optimizer.zero_grad()
        model(factors).backward()
        optimizer.step()
    weights = torch.cat([w.detach().flatten() for w in model.parameters()])
    torch.save(weights, os.path.join(args.out, f"rank{rank}.pt"))
    dist.destroy_process_group()
    raise SystemExit(args.exit)


if __name__ == "__main__":
    main()
