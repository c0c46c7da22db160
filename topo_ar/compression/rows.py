"""Exact sums of gradients that have only some rows, such as those of sparse embeddings.

Duplicates are added up inside the node, where that is cheap; between nodes travel rows that differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from topo_ar.compression.parts import all_reduce_nbytes
from topo_ar.compression.protocol import Group
from topo_ar.errors import ConfigError

# Of a row in a COO tensor.
_INDEX_NBYTES = 8


@dataclass(frozen=True, slots=True)
class ReducedRows:
    """The sum over all ranks of a job.

    Attributes
    ----------
    total : Tensor
        Coalesced COO, or dense where that takes no more memory; the same bits on all ranks.
    sent_nbytes : int
        Bytes that this rank sent to other nodes.
    """

    total: torch.Tensor
    sent_nbytes: int


def reduce_rows(tensor: torch.Tensor, rail: Group, node: Group) -> ReducedRows:
    """Add up sparse gradients; all ranks of the job call it together.

    Local rank l of L carries the rows l, l + L, l + 2 L, ... of its node, R in all. With c_v the
    rows that node v has of these, u those of their union, n nodes, w bytes of a row and i of an
    index, node v sends the least of

    - ``(n-1) c_v (i + w)``: indices, and then the rows as they are,
    - ``(n-1) c_v i + 2 (n-1)/n u w``: indices, and then an all-reduce of the union,
    - ``2 (n-1)/n R w``: an all-reduce of all rows, with no index,

    summed over the nodes. The counts c_v travel first (8 bytes to each node). u is not known before
    the indices are: whether to go dense is decided with ``R (1 - prod (1 - c_v/R))``, what it is
    for independent rows. Between the first two the choice is exact.

    Parameters
    ----------
    tensor : Tensor
        COO of any float dtype with one sparse dimension, coalesced or not; it may be empty. The
        shape and dtype are the same on all ranks. Not changed. Half precision is added up in fp32
        and rounded once in the node and once between nodes.
    rail : Group
        The ranks of the same position in their nodes.
    node : Group
        The co-located ranks.

    Returns
    -------
    ReducedRows

    Raises
    ------
    ConfigError
        If `tensor` is not sparse by rows.
    """
    if tensor.layout != torch.sparse_coo or tensor.sparse_dim() != 1:
        raise ConfigError(
            f"reduce_rows takes a COO tensor with one sparse dimension; this one has layout "
            f"{tensor.layout} and shape {tuple(tensor.shape)}"
        )
    num_rows = tensor.shape[0]
    coalesced = tensor.coalesce()
    kind = torch.int32 if num_rows < 2**31 else torch.int64
    rows, values = coalesced.indices()[0].to(kind), coalesced.values()

    places = [(rows % node.size == local).nonzero()[:, 0] for local in range(node.size)]
    lists = node.all_to_all([rows[place] for place in places])
    parts = node.all_to_all([values[place].reshape(-1) for place in places])
    rows, values = _add_up(lists, _shaped(parts, tensor))

    end = max(num_rows, node.index)
    carried = torch.arange(node.index, end, node.size, dtype=kind, device=rows.device)
    rows, values, sent = _across(rows, values, carried, rail)

    lists = node.all_gather(rows)
    rows, values = _add_up(lists, _shaped(node.all_gather(values.reshape(-1)), tensor))
    total = torch.sparse_coo_tensor(
        rows[None].long(), values, tensor.shape, is_coalesced=True, check_invariants=False
    )
    row_nbytes = math.prod(tensor.shape[1:]) * tensor.itemsize
    if len(rows) * (_INDEX_NBYTES + row_nbytes) >= num_rows * row_nbytes:
        total = total.to_dense()
    return ReducedRows(total, sent)


def average_rows(tensor: torch.Tensor, rail: Group, node: Group, world_size: int) -> None:
    """Put the mean over all ranks in the place of sparse gradients; see `reduce_rows`."""
    total = reduce_rows(tensor, rail, node).total
    total = (total if total.is_sparse else total.to_sparse(1)).coalesce()
    values = total.values() / world_size
    tensor.copy_(
        torch.sparse_coo_tensor(
            total.indices(), values, tensor.shape, is_coalesced=True, check_invariants=False
        )
    )


def _across(
    rows: torch.Tensor, values: torch.Tensor, carried: torch.Tensor, rail: Group
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the union of the nodes' rows among those `carried`, their sums, and the bytes sent."""
    n = rail.size
    if n == 1:
        return rows, values, 0
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [int(other) for other in rail.all_gather(count)]
    sent = (n - 1) * count.nbytes
    row_nbytes = math.prod(values.shape[1:]) * values.itemsize
    every = len(carried)
    missing = math.prod(1 - c / every for c in counts) if every else 1.0
    listed = sum(counts)
    moved = min(listed, 2 * every * (1 - missing)) * row_nbytes + listed * rows.itemsize
    if moved >= 2 * every * row_nbytes:
        union = carried
    else:
        lists = rail.all_gather(rows)
        sent += (n - 1) * rows.nbytes
        union = _union(lists)
        if listed <= 2 * len(union):
            parts = rail.all_gather(values.reshape(-1))
            sent += (n - 1) * values.nbytes
            return *_add_up(lists, _shaped(parts, values)), sent
    spread = values.new_zeros(len(union), *values.shape[1:])
    spread[torch.searchsorted(union, rows)] = values
    sent += all_reduce_nbytes(n, spread.nbytes)
    return union, rail.all_reduce(spread.reshape(-1)).view(spread.shape), sent


def _add_up(
    lists: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the union of `lists` in order and for each row the sum of `parts`, in their order.

    No list names a row twice, so that the order of additions is the same wherever it is done.
    """
    union = _union(lists)
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].new_zeros((len(union), *parts[0].shape[1:]), dtype=wide)
    for rows, part in zip(lists, parts, strict=True):
        total.index_add_(0, torch.searchsorted(union, rows), part.to(wide))
    return union, total.to(parts[0].dtype)


def _union(lists: Sequence[torch.Tensor]) -> torch.Tensor:
    union: torch.Tensor = torch.unique(torch.cat(list(lists)))
    return union


def _shaped(parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> list[torch.Tensor]:
    return [part.view(-1, *tensor.shape[1:]) for part in parts]
