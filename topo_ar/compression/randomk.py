"""Random entries by a common seed: all members choose the same, so one all-reduce adds them."""

import numpy as np
import torch
from numpy.typing import NDArray

from topo_ar.compression.parts import Chosen, all_reduce_nbytes, alone, split
from topo_ar.compression.protocol import Group, Layout, Reduced
from topo_ar.compression.stateless import Stateless
from topo_ar.compression.topk import kept
from topo_ar.planning.codecs import Codec


class RandomK(Stateless):
    """k entries at random in each step and bucket, without replacement, sent in full precision.

    Nothing is scaled up: what is not sent waits in the error memory.
    """

    def __init__(self, codec: Codec, seed: int = 0) -> None:
        super().__init__(codec)
        self.seed = seed

    def reduce(
        self, shard: torch.Tensor, layout: Layout, rail: Group, node: Group, step: int
    ) -> Reduced:
        """Add up the shards of the rail; see `Compressor.reduce`."""
        assert self.codec.argument is not None
        if rail.size == 1:
            return alone(shard)
        kinds = split(layout)
        coded, exact = kinds.take(shard)
        k = kept(self.codec.argument, coded.numel())
        chosen = torch.from_numpy(random_indices(coded.numel(), k, self.seed, step, layout.bucket))
        chosen = chosen.to(shard.device)
        values = coded[chosen]
        found = rail.all_reduce(torch.cat([values, exact]))
        total = torch.zeros_like(coded)
        total[chosen] = found[:k]
        sent = all_reduce_nbytes(rail.size, found.nbytes)
        return Chosen(kinds.join(total, found[k:]), kinds, shard, chosen, sent)


def random_indices(numel: int, k: int, seed: int, step: int, bucket: int) -> NDArray[np.int64]:
    """Return k different indices below `numel`, ascending; a function of its arguments alone.

    Drawn from Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) with
    key (seed, bucket) and counter (step): no stream has to be kept or restored, and the raw output
    is the same in every version of numpy.
    """
    if k > numel // 2:
        rest = np.ones(numel, dtype=bool)
        rest[random_indices(numel, numel - k, seed, step, bucket)] = False
        return np.flatnonzero(rest)
    key = np.array([seed, bucket], dtype=np.uint64)
    counter = np.array([0, 0, 0, step], dtype=np.uint64)
    source = np.random.Philox(key=key, counter=counter)
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < k:
        more = (source.random_raw(k) % np.uint64(max(numel, 1))).astype(np.int64)
        drawn = np.concatenate([drawn, more])
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[np.sort(first)]
    return np.sort(drawn[:k])
