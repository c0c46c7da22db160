"""A small ResNet and generated, labelled images that it can learn.

It is made for comparing trainings whose gradients differ by rounding. Normalisation is by group: a
batch norm's running statistics differ from rank to rank, so that more than the gradients would
differ. The activation is smooth: at the kink of a ReLU a last bit decides whether a gradient is
there, and after an epoch such flips have made differences of rounding ten thousand times larger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

NUM_CLASSES = 8
_NUM_ANGLES = 4
_CYCLES = (2.0, 4.0)
_NOISE = 0.8
_GROUPS = 8


class ResNet(nn.Module):
    """A residual network for small colour images; 0.3 M parameters at width 32 in three stages.

    The CIFAR form of He et al., "Deep Residual Learning for Image Recognition" (2016), section 4.2,
    with group normalisation and SiLU.

    Parameters
    ----------
    width : int
        Channels of the first stage, a multiple of 8; each other has twice as many as the last.
    num_classes : int
        Outputs.
    depths : sequence of int
        Blocks of each stage.
    """

    def __init__(
        self, width: int = 32, num_classes: int = NUM_CLASSES, depths: Sequence[int] = (1, 1, 1)
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.GroupNorm(_GROUPS, width), nn.SiLU()
        )
        blocks = []
        num_inputs = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(_Block(num_inputs, width << stage, stride))
                num_inputs = width << stage
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(num_inputs, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of `images`, which are (batch, 3, height, width)."""
        features: torch.Tensor = self.stages(self.stem(images))
        logits: torch.Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def resnet18(num_classes: int = NUM_CLASSES, width: int = 64) -> ResNet:
    """Return a ResNet-18; 11.2 M parameters at its own width."""
    return ResNet(width, num_classes, (2, 2, 2, 2))


class _Block(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False),
            nn.GroupNorm(_GROUPS, num_outputs),
            nn.SiLU(),
            nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False),
            nn.GroupNorm(_GROUPS, num_outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_inputs != num_outputs:
            self.shortcut = nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.residual(features) + self.shortcut(features)
        return functional.silu(total)


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Images (number, 3, size, size) with a label each."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Sequence[int] | torch.Tensor) -> "ImageSet":
        """Return the images at `indices`."""
        chosen = torch.as_tensor(indices)
        return ImageSet(self.images[chosen], self.labels[chosen])


def gratings(num_images: int, seed: int, size: int = 16) -> ImageSet:
    """Return noisy coloured stripes; the label says their direction and how narrow they are.

    Where the stripes begin, their colours and the noise are random, so that no single pixel tells
    the class. The same `seed` gives the same images; labels are balanced and shuffled.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(num_images) % NUM_CLASSES)[
        torch.randperm(num_images, generator=generator)
    ]
    angle = (labels % _NUM_ANGLES) * (math.pi / _NUM_ANGLES)
    cycles = torch.tensor(_CYCLES)[labels // _NUM_ANGLES]
    phase = 2 * math.pi * torch.rand(num_images, generator=generator)
    row, column = torch.meshgrid(*[torch.arange(size) / size] * 2, indexing="ij")
    along = (
        angle.cos()[:, None, None] * column[None] + angle.sin()[:, None, None] * row[None]
    ) * cycles[:, None, None]
    stripes = torch.sin(2 * math.pi * along + phase[:, None, None])
    colours = 0.5 + torch.rand(num_images, 3, 1, 1, generator=generator)
    noise = _NOISE * torch.randn(num_images, 3, size, size, generator=generator)
    return ImageSet(colours * stripes[:, None] + noise, labels)


def shuffled_batches(num_images: int, global_batch: int, seed: int) -> list[torch.Tensor]:
    """Return an epoch's batches of image numbers, in the order of `seed`; a rest is left out."""
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed))
    whole = order[: num_images - num_images % global_batch]
    return list(whole.reshape(-1, global_batch).unbind())
