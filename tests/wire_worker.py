"""One rank of an emulated host: trains a linear layer and reads its NIC's counter (R03)."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar

STEPS = 10


def sent_nbytes() -> int:
    """Return what the NIC that gloo uses has sent."""
    interface = os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def main(codec: str) -> None:
    """Train some steps and print what a step sent, by the NIC and by the package's own count."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(1000, 1000, bias=False))
    x = torch.randn(2, 1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    with topo_ar.attach(model, compression=codec, start_step=0, guard_steps=0) as handle:
        for _ in range(2):
            model(x).square().mean().backward()
        before = sent_nbytes()
        for _ in range(STEPS):
            model(x).square().mean().backward()
        dist.barrier()
        row = {
            "nic": (sent_nbytes() - before) / STEPS,
            "own": handle.compression.sent_nbytes,
            "dtype": str(model.module.weight.grad.dtype),
        }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
