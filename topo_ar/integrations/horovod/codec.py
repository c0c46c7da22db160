"""Gradients of a `DistributedOptimizer` by a codec: exact inside nodes, compressed in between."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from topo_ar.execution.torch_private import GradBucket
from topo_ar.integrations.backend import TopoGroup
from topo_ar.integrations.compressed import CompressedReduction
from topo_ar.integrations.compression_choice import CompressionSettings
from topo_ar.integrations.horovod.job import ProcessSet
from topo_ar.integrations.horovod.operations import submit
from topo_ar.integrations.horovod.requests import Handle


@dataclass(frozen=True, slots=True)
class _Bucket:
    """What `CompressedReduction` asks of a bucket."""

    number: int
    tensors: list[torch.Tensor]

    def index(self) -> int:
        return self.number

    def parameters(self) -> list[torch.Tensor]:
        return self.tensors


class CodecReducer:
    """Averages the gradients of parameters, in buckets that are asked for in their order.

    Parameters
    ----------
    buckets : sequence of dict
        The parameters of each by name.
    codec : str
        As for `topo_ar.attach`.
    process_set : ProcessSet
        The ranks.
    """

    def __init__(
        self, buckets: Sequence[dict[str, torch.Tensor]], codec: str, process_set: ProcessSet
    ) -> None:
        self._parameters = {name: p for bucket in buckets for name, p in bucket.items()}
        self._buckets = [_Bucket(i, list(each.values())) for i, each in enumerate(buckets)]
        self._settings = CompressionSettings(compression=codec, start_step=0)
        self._process_set = process_set
        self._made: CompressedReduction | None = None

    def reduce(self, number: int, name: str, gradients: list[torch.Tensor]) -> Handle:
        """Begin to average the gradients of a bucket in place."""
        return submit(
            "codec",
            gradients,
            name,
            self._process_set,
            op=str(self._settings.compression),
            result=partial(_put, gradients),
            repeats=True,
            work=partial(self._work, self._buckets[number], gradients),
        )

    def _work(
        self, bucket: _Bucket, gradients: list[torch.Tensor], group: dist.ProcessGroup
    ) -> "torch.futures.Future[torch.Tensor]":
        if self._made is None:
            dist.all_reduce(torch.zeros(1), group=group)  # makes the communicator
            assert isinstance(group, TopoGroup)
            assert group.communicator is not None
            self._made = CompressedReduction(group.communicator, self._parameters, self._settings)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        like = cast(GradBucket, bucket)
        self._made.begin(like)
        return self._made.reduce(like, flat, None)


def _put(gradients: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))
    return gradients
