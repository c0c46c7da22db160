"""The workloads by name."""

from collections.abc import Callable

import torch

from experiments.workloads.language import Language, read_language
from experiments.workloads.recommender import Recommender, read_recommender
from experiments.workloads.vision import Vision, read_vision
from experiments.workloads.workload import Workload, from_first_rank

Read = Callable[[], tuple[dict[str, torch.Tensor], str, bool]]

_WORKLOADS: dict[str, tuple[type[Workload], Read]] = {
    "vision": (Vision, read_vision),
    "language": (Language, read_language),
    "recommender": (Recommender, read_recommender),
}
NAMES = tuple(_WORKLOADS)


def load(name: str) -> Workload:
    """Return a workload with its data, which the first rank reads for all. Collective in a job."""
    kind, read = _WORKLOADS[name]
    data, source, synthetic = from_first_rank(read)
    return kind(data, source, synthetic=synthetic)
