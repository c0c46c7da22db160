"""Two rank processes on gloo that train a model of two buckets, with torch's PowerSGD or ours.

Run by `compression_pitfalls`; a rank prints a line for each step that it has finished.
"""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import Empty, Queue

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from topo_ar.execution.transports.segment import HOST_ID_ENV

WORLD_SIZE = 2
STEPS = 5
# The buckets are rebuilt after the first step; torch's hook must not compress before.
_FIRST = 2
_START_SECONDS = 60.0


def steps_finished(side: str, silence_seconds: float) -> int:
    """Return how many compressed steps both ranks of a job finish, of `STEPS`.

    Parameters
    ----------
    side : str
        ``torch`` or ``ours``.
    silence_seconds : float
        A job in which no rank finishes a step for so long is ended, as is one that a rank has left.
    """
    lines: Queue[int | None] = Queue()
    done = [0] * WORLD_SIZE
    with tempfile.TemporaryDirectory() as directory:
        ranks = [_start(side, rank, Path(directory) / "store") for rank in range(WORLD_SIZE)]
        try:
            for rank, process in enumerate(ranks):
                threading.Thread(target=_count, args=(process, rank, lines), daemon=True).start()
            wait = _START_SECONDS
            while min(done) < _FIRST + STEPS:
                heard = lines.get(timeout=wait)
                if heard is None:
                    break
                done[heard] += 1
                wait = silence_seconds
        except Empty:
            pass
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return max(0, min(done) - _FIRST)


def _start(side: str, rank: int, store: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            __spec__.name if __spec__ else __name__,
            side,
            str(rank),
            str(store),
        ],
        env={**os.environ, HOST_ID_ENV: str(rank), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        # Gloo's threads end a process in many words.
        stderr=subprocess.DEVNULL if side == "torch" else None,
        text=True,
    )


def _count(process: "subprocess.Popen[str]", rank: int, lines: "Queue[int | None]") -> None:
    assert process.stdout is not None
    steps = 0
    for line in process.stdout:
        if line.startswith("step"):
            steps += 1
            lines.put(rank)
    if steps < _FIRST + STEPS:
        lines.put(None)


def main(side: str, rank: int, store: str) -> None:
    """Train on one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    layers = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    # Of 66 kB each.
    model = DistributedDataParallel(layers, bucket_cap_mb=0.06)
    if side == "torch":
        state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=_FIRST)
        model.register_comm_hook(state, hooks.powerSGD_hook)
    else:
        topo_ar.attach(model, compression="powersgd:2", start_step=_FIRST)
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(rank))
    for _ in range(_FIRST + STEPS):
        model.zero_grad()
        model(x).square().mean().backward()
        print("step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
