"""Which elements of a shard are compressed, and how the others travel beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from topo_ar.compression.protocol import Layout, Reduced
from topo_ar.planning.codecs import stays_exact

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """The elements of a shard in two flat vectors: those to compress and the exact ones.

    Attributes
    ----------
    coded, exact : tuple of (int, int)
        Intervals of the shard, in order; neighbours are merged.
    runs : tuple of int
        Where each compressed piece ends in the vector of compressed elements.
    """

    coded: tuple[Interval, ...]
    exact: tuple[Interval, ...]
    runs: tuple[int, ...]

    def take(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the compressed and the exact elements; a view where they are neighbours."""
        return _take(shard, self.coded), _take(shard, self.exact)

    def join(self, coded: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """Return the shard made of both; the inverse of `take`."""
        if not self.exact:
            return coded
        if not self.coded:
            return exact
        shard = torch.empty(coded.numel() + exact.numel(), dtype=coded.dtype, device=coded.device)
        for values, intervals in ((coded, self.coded), (exact, self.exact)):
            at = 0
            for begin, end in intervals:
                shard[begin:end] = values[at : at + end - begin]
                at += end - begin
        return shard

    def runs_within(self, begin: int, end: int) -> list[int]:
        """Return the lengths of the pieces' parts in an interval of the compressed vector."""
        inner = [run for run in self.runs if begin < run < end]
        edges = [begin, *inner, end]
        return [b - a for a, b in pairwise(edges) if b > a]


class Chosen(Reduced):
    """What a codec made of shards of which some entries travel as they are.

    Parameters
    ----------
    total : Tensor
        The rail's sum.
    kinds : Split
        Which elements of the shard those entries are from; all others travel too.
    shard : Tensor
        What was reduced.
    chosen : Tensor
        int64, places of the entries in the vector of compressed elements.
    sent_nbytes : int
        Bytes that this member sent.
    """

    def __init__(
        self,
        total: torch.Tensor,
        kinds: Split,
        shard: torch.Tensor,
        chosen: torch.Tensor,
        sent_nbytes: int,
    ) -> None:
        coded, self._exact = kinds.take(shard)
        self._kinds, self._chosen, self._values = kinds, chosen, coded[chosen]
        self._exact = self._exact.clone()
        super().__init__(total, total[:0], sent_nbytes)

    @property
    def own(self) -> torch.Tensor:
        """The entries that were chosen, in place, and the exact elements."""
        if not self._own.numel():
            coded = self._total.new_zeros(self._total.numel() - self._exact.numel())
            coded[self._chosen] = self._values
            self._own = self._kinds.join(coded, self._exact)
        return self._own

    def take_from(self, shard: torch.Tensor) -> None:
        """Set to zero what travels: entries go bit for bit or not at all."""
        if len(self._kinds.coded) > 1:
            super().take_from(shard)
            return
        for begin, _ in self._kinds.coded:
            shard.index_fill_(0, self._chosen + begin, 0)
        for begin, end in self._kinds.exact:
            shard[begin:end] = 0


@lru_cache(maxsize=1024)
def split(layout: Layout) -> Split:
    """Return what of a shard is compressed: all but vectors and small tensors."""
    coded: list[Interval] = []
    exact: list[Interval] = []
    lengths = []
    for piece in layout.pieces:
        length = piece.end - piece.begin
        if not length:
            continue
        target = exact if stays_exact(piece.shape) else coded
        if target is coded:
            lengths.append(length)
        if target and target[-1][1] == piece.offset:
            target[-1] = (target[-1][0], piece.offset + length)
        else:
            target.append((piece.offset, piece.offset + length))
    return Split(tuple(coded), tuple(exact), tuple(accumulate(lengths)))


def part_of(layout: Layout, begin: int, end: int) -> Layout:
    """Return the layout of an interval of a bucket or shard, such as a local rank's shard."""
    pieces = []
    for piece in layout.pieces:
        low = max(begin, piece.offset)
        high = min(end, piece.offset + piece.end - piece.begin)
        if low < high:
            first = piece.begin + low - piece.offset
            pieces.append(replace(piece, begin=first, end=first + high - low, offset=low - begin))
    return Layout(layout.bucket, tuple(pieces))


def cuts(numel: int, members: int, align: int = 1) -> list[int]:
    """Return the ``members + 1`` places that divide `numel` elements, at multiples of `align`."""
    blocks = -(-numel // align)
    return [min(numel, align * (blocks * i // members)) for i in range(members + 1)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat tensor, without a copy where it is contiguous."""
    return tensor.contiguous().view(torch.uint8)


def join_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one message of the bytes of flat tensors, one after the other."""
    filled = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
    if len(filled) == 1:
        return filled[0]
    return torch.cat(filled) if filled else as_bytes(tensors[0])


def all_reduce_nbytes(members: int, nbytes: int) -> int:
    """Return the bytes that a member sends to all-reduce a vector of `nbytes`."""
    return 2 * (members - 1) * nbytes // members


def alone(shard: torch.Tensor) -> Reduced:
    """Return a shard that nobody else holds: nothing is sent and nothing lost."""
    return Reduced(shard.clone(), shard, 0)


def _take(shard: torch.Tensor, intervals: tuple[Interval, ...]) -> torch.Tensor:
    if not intervals:
        return shard[:0]
    if len(intervals) == 1:
        return shard[slice(*intervals[0])]
    return torch.cat([shard[begin:end] for begin, end in intervals])
