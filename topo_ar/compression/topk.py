"""The entries of largest magnitude as pairs of value and index.

On few nodes every member gathers all pairs and adds them up, which loses nothing more. Pairs grow
with the number of nodes, so on many nodes each member owns a part of the shard: pairs go to the
owner of their part, which adds them, selects again and sends its selection to all, 2 (n-1)/n of k
pairs (the shape of Ok-Topk: Li and Hoefler, "Near-Optimal Sparse Allreduce", 2022). Whatever would
be longer as pairs than in full goes in full.
"""

import math
from fractions import Fraction

import torch

from topo_ar.compression.parts import Chosen, all_reduce_nbytes, alone, cuts, join_bytes, split
from topo_ar.compression.protocol import Group, Layout, Reduced
from topo_ar.compression.select import top_k_indices
from topo_ar.compression.stateless import Stateless

# Up to here one round of all pairs is preferred to two rounds and a second selection.
FEW_NODES = 4
_FLOAT_NBYTES = 4
_PAIR_NBYTES = 8


def kept(density: float, numel: int) -> int:
    """Return k, rounded up: at least one of any."""
    return math.ceil(Fraction(repr(density)) * numel)


class TopK(Stateless):
    """Exact top-k of the compressed part of a shard; vectors and small tensors travel beside it."""

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
        if rail.size > FEW_NODES:
            return self._two_shot(shard, layout, rail, k)
        if k * rail.size >= coded.numel():
            nbytes = all_reduce_nbytes(rail.size, shard.nbytes)
            return Reduced(rail.all_reduce(shard), shard, nbytes)
        chosen = top_k_indices(coded, k)
        message = join_bytes([exact, coded[chosen], chosen.int()])
        total, exact_total = torch.zeros_like(coded), torch.zeros_like(exact)
        for other in rail.all_gather(message):
            exact_total += other[: exact.nbytes].view(torch.float32)
            _add(total, other[exact.nbytes :])
        whole = kinds.join(total, exact_total)
        return Chosen(whole, kinds, shard, chosen, (rail.size - 1) * message.nbytes)

    def _two_shot(self, shard: torch.Tensor, layout: Layout, rail: Group, k: int) -> Reduced:
        kinds = split(layout)
        coded, exact = kinds.take(shard)
        at, exact_at = cuts(coded.numel(), rail.size), cuts(exact.numel(), rail.size)
        chosen = top_k_indices(coded, k)
        borders = torch.searchsorted(chosen, torch.tensor(at, device=chosen.device)).tolist()
        own, messages = torch.zeros_like(coded), []
        for i in range(rail.size):
            part = slice(at[i], at[i + 1])
            body = _pack(coded[part], chosen[borders[i] : borders[i + 1]] - at[i])
            _add(own[part], body)
            messages.append(join_bytes([exact[exact_at[i] : exact_at[i + 1]], body]))

        mine = slice(at[rail.index], at[rail.index + 1])
        head = (exact_at[rail.index + 1] - exact_at[rail.index]) * _FLOAT_NBYTES
        exact_sum = torch.zeros(head // _FLOAT_NBYTES, device=shard.device)
        coded_sum = torch.zeros(mine.stop - mine.start, device=shard.device)
        for message in rail.all_to_all(messages):
            exact_sum += message[:head].view(torch.float32)
            _add(coded_sum, message[head:])

        # Rounded up: a part that may send nothing would keep its errors for ever.
        again = torch.arange(coded_sum.numel(), device=shard.device)
        union = int(torch.count_nonzero(coded_sum))
        share = min(-(-k // rail.size), union)
        if share * _PAIR_NBYTES < coded_sum.nbytes:
            again = top_k_indices(coded_sum, share)
        final = join_bytes([exact_sum, _pack(coded_sum, again)])
        total, exact_total = torch.zeros_like(coded), torch.empty_like(exact)
        for i, message in enumerate(rail.all_gather(final)):
            head = (exact_at[i + 1] - exact_at[i]) * _FLOAT_NBYTES
            exact_total[exact_at[i] : exact_at[i + 1]] = message[:head].view(torch.float32)
            _add(total[at[i] : at[i + 1]], message[head:])
        own[mine] += total[mine] - coded_sum
        sent = sum(m.nbytes for i, m in enumerate(messages) if i != rail.index)
        return Reduced(
            kinds.join(total, exact_total),
            kinds.join(own, exact),
            sent + (rail.size - 1) * final.nbytes,
        )


def _pack(part: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the chosen entries as pairs, or all of `part` where that is not longer."""
    if chosen.numel() * _PAIR_NBYTES >= part.nbytes:
        return join_bytes([part])
    return join_bytes([part[chosen], chosen.int()])


def _add(part: torch.Tensor, body: torch.Tensor) -> None:
    """Add a packed part; its length tells which of the two forms it has."""
    if body.nbytes == part.nbytes:
        part += body.view(torch.float32)
        return
    count = body.nbytes // _PAIR_NBYTES
    values = body[: count * _FLOAT_NBYTES].view(torch.float32)
    # Indices of one member differ from each other, so the order of adding is fixed.
    part.index_add_(0, body[count * _FLOAT_NBYTES :].view(torch.int32), values)
