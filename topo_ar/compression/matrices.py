"""Which rank of a node holds which rows of a bucket's matrices, and which node answers for each.

PowerSGD sees a parameter as a matrix of its first dimension by all others. Inside a node its rows
are spread over the ranks' shards or lie in one of them. What is not worth its factors is the tail.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from topo_ar.compression.protocol import Group, Layout, Piece
from topo_ar.errors import PlanError
from topo_ar.planning.codecs import factors_pay


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `begin` to `end` of a matrix, from element `offset` of a shard on."""

    begin: int = 0
    end: int = 0
    offset: int = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter that is sent as its factors.

    Attributes
    ----------
    name : str
        The parameter.
    columns : int
        Elements of a row.
    blocks : tuple of Block
        The rows of each local rank; they may be none.
    owner : int
        The node that adds up the left factor and orthogonalises it for all.
    """

    name: str
    columns: int
    blocks: tuple[Block, ...]
    owner: int

    @property
    def spread(self) -> bool:
        """Whether more than one rank of the node holds rows."""
        return sum(block.rows > 0 for block in self.blocks) > 1

    def view(self, shard: torch.Tensor, local: int) -> torch.Tensor:
        """Return the rows that local rank `local` holds in its `shard`, as a matrix."""
        block = self.blocks[local]
        numel = block.rows * self.columns
        return shard[block.offset : block.offset + numel].view(block.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A bucket's matrices, and by local rank the rest.

    Attributes
    ----------
    matrices : tuple of Matrix
        In one order for all ranks.
    tails : tuple of tuple of (int, int)
        By local rank, the runs of its shard that no matrix covers.
    tail_shares : tuple of tuple of int
        By local rank, the elements of its tail that each node adds up: such that the nodes have
        as nearly as possible the same number of elements to add up, factors included.
    """

    matrices: tuple[Matrix, ...]
    tails: tuple[tuple[tuple[int, int], ...], ...]
    tail_shares: tuple[tuple[int, ...], ...]

    def held(self, local: int) -> list[Matrix]:
        """Return the matrices of which local rank `local` holds rows."""
        return [matrix for matrix in self.matrices if matrix.blocks[local].rows]

    def tail(self, shard: torch.Tensor, local: int) -> torch.Tensor:
        """Return a copy of the tail of local rank `local`, flat."""
        runs = [shard[begin:end] for begin, end in self.tails[local]]
        return torch.cat([shard.new_empty(0), *runs])

    def put_tail(self, shard: torch.Tensor, local: int, tail: torch.Tensor) -> None:
        """Write `tail` where it belongs in the `shard` of local rank `local`."""
        lengths = [end - begin for begin, end in self.tails[local]]
        for (begin, end), run in zip(self.tails[local], torch.split(tail, lengths), strict=True):
            shard[begin:end] = run


def exchange_layouts(layout: Layout, node: Group, device: torch.device) -> list[Layout]:
    """Return the layouts of all ranks of a node, by position."""
    pieces = [[p.name, p.shape, p.begin, p.end, p.offset] for p in layout.pieces]
    text = json.dumps([layout.bucket, pieces]).encode()
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    found = [json.loads(bytes(other.tolist())) for other in node.all_gather(mine)]
    return [
        Layout(bucket, tuple(Piece(name, tuple(shape), *run) for name, shape, *run in pieces))
        for bucket, pieces in found
    ]


def arrange(layouts: Sequence[Layout], rank: int, num_nodes: int) -> Arrangement:
    """Find the matrices in the shards of a node, and deal them out to the nodes.

    The matrices are dealt out in order of size, each to the node that has the least to do on the
    rails that carry it.

    Parameters
    ----------
    layouts : sequence of Layout
        The shards of a node, by local rank; the same on all nodes.
    rank : int
        The rank of the factors.
    num_nodes : int
        Members of each rail.

    Raises
    ------
    PlanError
        If a shard cuts through a row of a matrix, or the node does not hold all of its rows once.
    """
    found: dict[str, tuple[tuple[int, ...], list[Block]]] = {}
    tails: list[tuple[tuple[int, int], ...]] = []
    for local, layout in enumerate(layouts):
        runs = []
        for piece in layout.pieces:
            if not factors_pay(piece.shape, rank):
                runs.append((piece.offset, piece.offset + piece.end - piece.begin))
                continue
            shape, blocks = found.setdefault(piece.name, (piece.shape, [Block()] * len(layouts)))
            if blocks[local].rows or shape != piece.shape:
                raise _misfit(layout.bucket, piece, local, "which it holds twice")
            blocks[local] = _block(layout.bucket, piece, local)
        tails.append(tuple(runs))
    for name, (shape, blocks) in found.items():
        _check_rows(layouts[0].bucket, name, shape[0], blocks)
    owners, loads = _deal(found, len(layouts), rank, num_nodes)
    matrices = tuple(
        Matrix(name, math.prod(shape[1:]), tuple(blocks), owners[name])
        for name, (shape, blocks) in found.items()
    )
    shares = tuple(
        _fill(load, sum(end - begin for begin, end in runs))
        for load, runs in zip(loads, tails, strict=True)
    )
    return Arrangement(matrices, tuple(tails), shares)


def _block(bucket: int, piece: Piece, local: int) -> Block:
    columns = math.prod(piece.shape[1:])
    if piece.begin % columns or piece.end % columns:
        raise _misfit(bucket, piece, local, f"which are not whole rows of {columns}")
    return Block(piece.begin // columns, piece.end // columns, piece.offset)


def _misfit(bucket: int, piece: Piece, local: int, fault: str) -> PlanError:
    return PlanError(
        f"bucket {bucket}: local rank {local} holds elements {piece.begin} to {piece.end} of "
        f"{piece.name!r}, {fault}; PowerSGD needs each shard to hold whole rows in one run, "
        "so cut the shards between rows"
    )


def _check_rows(bucket: int, name: str, rows: int, blocks: Sequence[Block]) -> None:
    end = 0
    for block in sorted((b for b in blocks if b.rows), key=lambda b: b.begin):
        if block.begin != end:
            break
        end = block.end
    if end != rows:
        raise PlanError(
            f"bucket {bucket}: the shards of a node do not hold each of the {rows} rows of "
            f"{name!r} once; PowerSGD needs a whole parameter in one bucket"
        )


def _deal(
    found: dict[str, tuple[tuple[int, ...], list[Block]]], num_local: int, rank: int, num_nodes: int
) -> tuple[dict[str, int], list[list[int]]]:
    """Return the owner of each matrix, and by local rank the elements that each node adds up."""
    loads = [[0] * num_nodes for _ in range(num_local)]
    owners = {}
    for name, (_, blocks) in sorted(found.items(), key=lambda item: -item[1][0][0]):
        lanes = [(load, rank * b.rows) for load, b in zip(loads, blocks, strict=True) if b.rows]
        owner = min(range(num_nodes), key=lambda v: max(load[v] for load, _ in lanes))
        owners[name] = owner
        for load, numel in lanes:
            load[owner] += numel
    return owners, loads


def _fill(loads: Sequence[int], extra: int) -> tuple[int, ...]:
    """Share out `extra` so that the sums with `loads` are as equal as they can be."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    while True:
        level, odd = divmod(extra + sum(loads[v] for v in order), len(order))
        if level >= loads[order[-1]]:
            break
        order.pop()
    shares = [0] * len(loads)
    for place, v in enumerate(order):
        shares[v] = level - loads[v] + (place < odd)
    return tuple(shares)
