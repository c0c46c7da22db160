"""Sums whose order the rank numbers fix, so that their bits do not tell how ranks are placed.

All ranks are the leaves of one binary tree: a block of ``2^k`` ranks from a multiple of ``2^k`` on
is a node of it, as far as there are ranks. The ranks of a host add up the largest blocks that they
hold whole and pass on one row for each; who has the rows of all hosts adds up the rest of the tree.
Hosts of equal powers of two of consecutive ranks pass on one row, as any other sum does; where
ranks are dealt round robin, nothing can be added early and every rank's row travels.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from topo_ar.execution.kernels import Array, Kernel, unify_nans
from topo_ar.execution.workspace import work_space

# First rank and size.
Block = tuple[int, int]


class FixedOrder(Kernel):
    """Adds or multiplies floats in the order of the tree; 16-bit types in fp32, rounded at the end.

    All NaNs are one, for which of two survives an addition is up to the processor.

    Parameters
    ----------
    dtype : torch.dtype
        A floating-point type.
    op : ReduceOp
        SUM, AVG or PRODUCT.
    nodes : sequence of tuple of int
        The ranks of each host, ascending.
    rank : int
        This rank.
    """

    __slots__ = ("_mine", "_root", "_rows", "_scratch", "_world_size")

    def __init__(
        self,
        dtype: torch.dtype,
        op: "dist.ReduceOp.RedOpType",
        nodes: Sequence[tuple[int, ...]],
        rank: int,
    ) -> None:
        self._world_size = sum(map(len, nodes))
        super().__init__(dtype, op, self._world_size)
        if self._rounds:
            self.partial = np.dtype(np.float32)
        self._root = (0, 1 << (self._world_size - 1).bit_length())
        self._rows: dict[int, tuple[Block, ...]] = {}
        for node in nodes:
            self._rows.update(dict.fromkeys(node, self._blocks_in(self._root, frozenset(node))))
        self._mine = next(node for node in nodes if rank in node)
        self._scratch: dict[int, Array] = {}

    def _blocks_in(self, block: Block, ranks: frozenset[int]) -> tuple[Block, ...]:
        first, size = block
        there = ranks.intersection(range(first, first + size))
        if not there:
            return ()
        if len(there) == min(size, self._world_size - first):
            return (block,)
        half = size // 2
        return (
            *self._blocks_in((first, half), there),
            *self._blocks_in((first + half, half), there),
        )

    def partial_nbytes(self, rank: int) -> int:
        """Return how many bytes an element of a partial has: one of `partial` for each row."""
        return len(self._rows[rank]) * self.partial.itemsize

    def piece(self, partial: Array, begin: int, end: int) -> Array:
        """Return elements of one's own node's partial, contiguous."""
        rows = len(self._rows[self._mine[0]])
        return np.ascontiguousarray(partial.reshape(rows, -1)[:, begin:end]).reshape(-1)

    def reduce_all(self, out: Array, sources: Sequence[Array]) -> None:
        """Reduce the input of all ranks."""
        self._finish(out, self._leaves(sources))

    def reduce_in_node(self, out: Array, sources: Sequence[Array]) -> None:
        """Reduce the input of the ranks of a node to the rows of their blocks."""
        leaves = self._leaves(sources)
        rows = self._rows[self._mine[0]]
        for block, row in zip(rows, out.reshape(len(rows), -1), strict=True):
            value = self._value(block, leaves, row)
            if value is not row:
                np.copyto(row, value)

    def reduce_between(self, out: Array, sources: Sequence[Array], rail: Sequence[int]) -> None:
        """Reduce the rows of all nodes."""
        leaves: dict[Block, Array] = {}
        for rank, source in zip(rail, sources, strict=True):
            rows = self._rows[rank]
            leaves.update(zip(rows, source.reshape(len(rows), -1), strict=True))
        self._finish(out, leaves)

    def _leaves(self, sources: Sequence[Array]) -> dict[Block, Array]:
        if self._rounds:
            tensors = [torch.from_numpy(source).view(self.dtype) for source in sources]
            sources = [tensor.float().numpy() for tensor in tensors]
        return {(rank, 1): source for rank, source in zip(self._mine, sources, strict=True)}

    def _value(self, block: Block, leaves: dict[Block, Array], space: Array) -> Array:
        """Return the value of a block: its leaf, or computed in `space`."""
        leaf = leaves.get(block)
        if leaf is not None:
            return leaf
        first, half = block[0], block[1] // 2
        if first + half >= self._world_size:
            return self._value((first, half), leaves, space)
        left = self._value((first, half), leaves, space)
        right = self._value((first + half, half), leaves, self._scratch_of(half, space))
        self._op(left, right, out=space)
        return space

    def _scratch_of(self, level: int, like: Array) -> Array:
        scratch = self._scratch.get(level)
        if scratch is None or scratch.size < like.size:
            space = work_space(like.size * self.partial.itemsize)
            scratch = self._scratch[level] = space.view(self.partial)
        return scratch[: like.size]

    def _finish(self, out: Array, leaves: dict[Block, Array]) -> None:
        total = self._scratch_of(self._root[1], out) if self._rounds else out
        value = self._value(self._root, leaves, total)
        if value is not total:
            np.copyto(total, value)
        if self._divisor != 1:
            np.divide(total, self._divisor, out=total)
        unify_nans(total)
        if self._rounds:
            torch.from_numpy(out).view(self.dtype).copy_(torch.from_numpy(total))
