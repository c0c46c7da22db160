"""What a training needs to know of a workload: data, model, loss, quality and its target."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

Data = Mapping[str, torch.Tensor]
Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What knowing nothing of the single example reaches, in the workload's quality."""

    name: str
    quality: float


class Workload(ABC):
    """A data set with a model that learns it; all ranks hold all of the data.

    Attributes
    ----------
    name, metric, source : str
        What it is called, what its quality is, and where its data are from.
    synthetic : bool
        Whether the data were generated because the real ones are not installed.
    target : float
        The quality to reach, set before any run; the mean of the last three evaluations counts.
    falling : bool
        Whether quality is a loss.
    tolerance : float
        How far the mean over seeds may be from plain DDP's.
    global_batch, epochs : int
        Examples of all ranks in a step, and how often a training goes through the data.
    rate : float
        Highest learning rate.
    sparse : bool
        Whether gradients of embeddings are sparse.
    """

    name: str
    metric: str
    target: float
    falling = False
    tolerance = 0.01
    global_batch: int
    epochs: int
    rate: float
    sparse = False

    def __init__(self, data: Data, source: str, *, synthetic: bool) -> None:
        self.data = data
        self.source = source
        self.synthetic = synthetic

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """How many examples an epoch has."""

    @property
    @abstractmethod
    def baseline(self) -> Baseline:
        """What to compare the quality with."""

    @abstractmethod
    def module(self) -> nn.Module:
        """Return a new model; the global generator decides how it begins."""

    @abstractmethod
    def loss(
        self, model: nn.Module, indices: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the mean loss of the examples at `indices`; `generator` draws what is random."""

    @abstractmethod
    def score(self, module: nn.Module, part: slice) -> tuple[torch.Tensor, int]:
        """Return sum and number of the quality of part of what is never trained on."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; what does not fill a batch is left out."""
        return self.num_examples // self.global_batch

    def optimizers(self, module: nn.Module) -> Optimizers:
        """Return what steps the parameters of `module`."""
        return [torch.optim.AdamW(module.parameters(), self.rate, weight_decay=0.05)]

    def indices(self, epoch: int, step: int, seed: int, place: "Place") -> torch.Tensor:
        """Return the examples of a rank in a step."""
        order = torch.randperm(self.num_examples, generator=_generator(seed, epoch))
        batch = order[step * self.global_batch : (step + 1) * self.global_batch]
        return batch.chunk(place.world_size)[place.rank]

    def evaluate(self, module: nn.Module) -> float:
        """Return the quality of `module`, the work being divided over the ranks. Collective."""
        with torch.no_grad():
            part = slice(dist.get_rank(), None, dist.get_world_size())
            total, count = self.score(module, part)
        sums = torch.stack([total.double(), torch.tensor(count, dtype=torch.float64)])
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def reached(self, quality: float) -> bool:
        """Return whether a quality is that of the target."""
        return quality <= self.target if self.falling else quality >= self.target


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: its node, how many there are, and its place among the node's ranks."""

    rank: int
    world_size: int
    node: int = 0
    num_nodes: int = 1
    local_rank: int = 0
    local_size: int = 1


def _generator(*numbers: int) -> torch.Generator:
    mixed = 0
    for number in numbers:
        mixed = mixed * 1_000_003 + number
    return torch.Generator().manual_seed(mixed)


def generator_of(epoch: int, step: int, seed: int, rank: int) -> torch.Generator:
    """Return what draws the random part of a rank's step; equal for equal arguments."""
    return _generator(seed, epoch, step, rank + 1)


def from_first_rank(
    read: Callable[[], tuple[dict[str, torch.Tensor], str, bool]],
) -> tuple[dict[str, torch.Tensor], str, bool]:
    """Return what the first rank reads, on all ranks. Collective where there is a job."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read()
    data: dict[str, torch.Tensor] = {}
    shapes: list[object] = [None]
    if dist.get_rank() == 0:
        data, source, synthetic = read()
        about = {name: (tuple(each.shape), each.dtype) for name, each in data.items()}
        shapes = [(about, source, synthetic)]
    dist.broadcast_object_list(shapes)
    about, source, synthetic = shapes[0]  # type: ignore[misc]
    for name, (shape, dtype) in about.items():
        data.setdefault(name, torch.empty(shape, dtype=dtype))
        dist.broadcast(data[name], 0)
    return data, source, synthetic
