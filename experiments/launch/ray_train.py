"""Ray Train: the same loop, attached by hand, since Ray's workers are no scripts.

Command: python experiments/launch/ray_train.py --workers 16 --storage /shared/ray

Needs ``pip install 'ray[train]'``. Ray restarts all workers after one has died, and
`ray.train.get_checkpoint` then hands them the last one.
"""

import argparse
import os
import tempfile
from typing import Any

import torch
from torch import nn


def train(config: dict[str, Any]) -> None:
    """One worker of Ray: a rank, with the process group made."""
    import ray.train
    from ray.train.torch import get_device, prepare_model

    import topo_ar

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = prepare_model(module)  # DistributedDataParallel on the worker's device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = topo_ar.attach(model, compression=config["compression"])
    first, rank = 0, ray.train.get_context().get_world_rank()
    if found := ray.train.get_checkpoint():
        with found.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["compression"])
        first = state["step"]
    for step in range(first, config["steps"]):
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        inputs = torch.randn(8, 64, generator=generator).to(get_device())
        labels = torch.randint(10, (8,), generator=generator).to(get_device())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % 10:
            continue
        compression = handle.state_dict()  # collective
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                state = {
                    "step": step + 1,
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "compression": compression,
                }
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": float(loss)}, checkpoint=checkpoint)
    handle.close()


def main() -> None:
    """Start the workers and wait for them."""
    import ray.train
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--storage", required=True, help="a folder that all nodes see, or a bucket")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "compression": options.compression},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=ray.train.RunConfig(
            storage_path=options.storage,
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
