"""No compression: an exact all-reduce in fp32."""

import torch

from topo_ar.compression.parts import all_reduce_nbytes
from topo_ar.compression.protocol import Group, Layout, Reduced
from topo_ar.compression.stateless import Stateless
from topo_ar.planning.codecs import NONE


class Exact(Stateless):
    """Sends the shard as it is."""

    def __init__(self) -> None:
        super().__init__(NONE)

    def reduce(
        self, shard: torch.Tensor, layout: Layout, rail: Group, node: Group, step: int
    ) -> Reduced:
        """Add up the shards of the rail; see `Compressor.reduce`."""
        return Reduced(rail.all_reduce(shard), shard, all_reduce_nbytes(rail.size, shard.nbytes))
