"""One bucket's exchange of factors: multiplied, added up over node and rail, decoded."""

from dataclasses import dataclass

import torch

from topo_ar.compression.factors import (
    Factors,
    add_up,
    decode,
    flat,
    multiply,
    subtract,
    unflat,
)
from topo_ar.compression.matrices import Arrangement, Matrix
from topo_ar.compression.orthogonal import orthogonalize, orthogonalize_blocks
from topo_ar.compression.parts import all_reduce_nbytes
from topo_ar.compression.protocol import Group, Reduced


@dataclass(frozen=True, slots=True)
class Sums:
    """Factors by parameter of the rail's sum and of this node's part in it; the tail's sum."""

    left: Factors
    right: Factors
    own_left: Factors
    own_right: Factors
    tail: torch.Tensor
    sent_nbytes: int


class LowRank(Reduced):
    """Factors of the rail's sum and of this node's part; multiplied when somebody asks."""

    def __init__(
        self, sums: Sums, job: "Job", arrangement: Arrangement, shard: torch.Tensor
    ) -> None:
        super().__init__(shard[:0], shard[:0], sums.sent_nbytes)
        self._sums, self._arrangement = sums, arrangement
        self._held, self._local, self._tail = job.held, job.local, job.tail
        self._like, self._numel, self._poison = job.tail, shard.numel(), job.poison

    @property
    def total(self) -> torch.Tensor:
        """The rail's sum, decoded."""
        if not self._total.numel():
            sums = self._sums
            self._total = self._decoded(sums.left, sums.right, sums.tail)
        return self._total

    @property
    def own(self) -> torch.Tensor:
        """Part of this node in it, decoded."""
        if not self._own.numel():
            sums = self._sums
            self._own = self._decoded(sums.own_left, sums.own_right, self._tail)
        return self._own

    def poison(self) -> torch.Tensor:
        """Return zero, or NaN where an element could be too large or is none."""
        sums = self._sums
        largest = [
            len(left) * left.abs().amax() * sums.right[name].abs().amax()
            for name, left in sums.left.items()
            if left.numel()
        ]
        return torch.stack([self._poison, sums.tail.sum(), *largest]).sum() * 0

    def take_from(self, shard: torch.Tensor) -> None:
        """Subtract the product of the node's factors, one pass over the shard."""
        sums = self._sums
        for matrix in self._held:
            left, right = sums.own_left[matrix.name], sums.own_right[matrix.name]
            subtract(left, right, matrix.view(shard, self._local))
        zero = torch.zeros_like(self._tail)
        self._arrangement.put_tail(shard, self._local, zero)

    def _decoded(self, left: Factors, right: Factors, tail: torch.Tensor) -> torch.Tensor:
        out = self._like.new_empty(self._numel)
        for matrix in self._held:
            decode(left[matrix.name], right[matrix.name], matrix.view(out, self._local))
        self._arrangement.put_tail(out, self._local, tail)
        return out


class Job:
    """One bucket's exchange: the shard as matrices and tail, and the groups it is added up with.

    Attributes
    ----------
    held : list of Matrix
        Matrices of which rows are here.
    known : list of Matrix
        Those and the ones spread over the node, of which all its ranks know the right factor.
    """

    def __init__(
        self, shard: torch.Tensor, arrangement: Arrangement, rank: int, rail: Group, node: Group
    ) -> None:
        self.rail, self.node, self.local = rail, node, node.index
        self.held = arrangement.held(node.index)
        self.known = [m for m in arrangement.matrices if m.spread or m in self.held]
        self.tail = arrangement.tail(shard, node.index)
        self.rank = rank
        self.poison = self.tail.new_zeros(())
        self._tail_shares = list(arrangement.tail_shares[node.index])
        self._views = {m.name: m.view(shard, node.index) for m in self.held}

    def rows(self, matrices: list[Matrix]) -> dict[str, tuple[int, int]]:
        """Return the shapes of their left factors here."""
        return {m.name: (self.rank, m.blocks[self.local].rows) for m in matrices}

    def times_columns(self, right: Factors) -> Factors:
        """Return the left factors ``right M'`` of the matrices held."""
        return multiply(right, {name: view.T for name, view in self._views.items()})

    def times_rows(self, left: Factors) -> Factors:
        """Return what the rows here add to the right factors: ``left M`` of the matrices held.

        The same pass finds what is not finite, by a row of ones: `poison` is NaN then, else zero.
        """
        ones = {
            name: torch.cat([factor, factor.new_ones(1, factor.shape[1])])
            for name, factor in left.items()
        }
        products = multiply(ones, self._views)
        sums = [self.tail.sum(), *(product[-1].sum() for product in products.values())]
        self.poison = torch.stack(sums).sum() * 0
        return {name: product[:-1] for name, product in products.items()}

    def orthogonalize(self, matrices: list[Matrix], left: Factors) -> Factors:
        """Return bases of the left factors; all ranks of the node name the same spread ones."""
        whole = [m.name for m in matrices if not m.spread]
        bases = dict(zip(whole, orthogonalize([left[name] for name in whole]), strict=True))
        spread = [m.name for m in matrices if m.spread]
        if spread:
            blocks = orthogonalize_blocks([left[name] for name in spread], self.node)
            bases.update(zip(spread, blocks, strict=True))
        return bases

    def sum_left(self, left: Factors) -> tuple[Factors, torch.Tensor, int]:
        """Add up left factors and tail over the rail; each owner orthogonalises its matrices.

        Returns the bases of the matrices held, the sum of the tail, and the bytes sent.
        """
        rail = self.rail
        dealt = [[m for m in self.held if m.owner == v] for v in range(rail.size)]
        parts = [
            flat([*(left[m.name] for m in matrices), share], share)
            for matrices, share in zip(
                dealt, torch.split(self.tail, self._tail_shares), strict=True
            )
        ]
        sent = sum(part.nbytes for v, part in enumerate(parts) if v != rail.index)
        summed, share = unflat(add_up(rail.all_to_all(parts)), self.rows(dealt[rail.index]))
        mine = [m for m in self.known if m.owner == rail.index]
        nothing = share.new_empty(self.rank, 0)
        bases = self.orthogonalize(mine, {m.name: summed.get(m.name, nothing) for m in mine})
        message = flat([*(bases[m.name] for m in dealt[rail.index]), share], share)
        sent += (rail.size - 1) * message.nbytes
        result, shares = {}, []
        for matrices, found in zip(dealt, rail.all_gather(message), strict=True):
            theirs, rest = unflat(found, self.rows(matrices))
            result.update(theirs)
            shares.append(rest)
        return result, torch.cat(shares), sent

    def sum_right(
        self, right: Factors, tail: torch.Tensor
    ) -> tuple[Factors, Factors, torch.Tensor, int]:
        """Add up right factors over the rows in the node, then over the rail, with `tail`.

        Each rank of the node carries a slice of those that are spread over it. Returns the node's
        own factors and the rail's, of the matrices known, the sum of the tail, and the bytes sent.
        """
        node = self.node
        shapes = {m.name: (self.rank, m.columns) for m in self.known}
        spread = {m.name: shapes[m.name] for m in self.known if m.spread}
        whole = {name: shape for name, shape in shapes.items() if name not in spread}
        own = {name: right[name] for name in whole}
        slice_ = tail.new_empty(0)
        if spread:
            partial = flat((right.get(n, tail.new_zeros(s)) for n, s in spread.items()), tail)
            slice_ = add_up(node.all_to_all(list(partial.tensor_split(node.size))))
        message = flat([*own.values(), tail, slice_], tail)
        summed = self.rail.all_reduce(message) if message.numel() else message
        total, rest = unflat(summed, whole)
        tail_sum, slice_sum = rest[: len(tail)], rest[len(tail) :]
        if spread:
            halves = [pair.chunk(2) for pair in node.all_gather(torch.cat([slice_, slice_sum]))]
            own |= unflat(torch.cat([half[0] for half in halves]), spread)[0]
            total |= unflat(torch.cat([half[1] for half in halves]), spread)[0]
        return own, total, tail_sum, all_reduce_nbytes(self.rail.size, message.nbytes)
