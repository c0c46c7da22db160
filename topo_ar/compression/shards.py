"""Where a bucket is cut into the shards of a node's ranks: so that it costs a codec nothing."""

import math
from collections.abc import Sequence

from topo_ar.compression.protocol import Layout, Piece
from topo_ar.planning.codecs import BLOCK, Codec, factors_pay, stays_exact


def shard_bounds(whole: Layout, codec: Codec, num_local: int) -> tuple[int, ...]:
    """Return the ``num_local + 1`` places that cut a bucket into nearly equal shards.

    PowerSGD gets whole rows of its matrices. For all other codecs the compressed elements before a
    place are a multiple of `BLOCK`, so that the shards together have as many blocks as the bucket.

    Parameters
    ----------
    whole : Layout
        The bucket; its pieces are whole parameters.
    codec : Codec
        What will reduce the shards.
    num_local : int
        Ranks of the node.
    """
    numel = whole.numel
    bounds = [0]
    for local in range(1, num_local):
        ideal = numel * local // num_local
        place = _row(whole.pieces, ideal, codec) if codec.whole else _block(whole.pieces, ideal)
        bounds.append(min(numel, max(bounds[-1], place)))
    return (*bounds, numel)


def _row(pieces: Sequence[Piece], ideal: int, codec: Codec) -> int:
    assert codec.argument is not None
    for piece in pieces:
        inside = ideal - piece.offset
        if 0 < inside < piece.end - piece.begin and factors_pay(piece.shape, int(codec.argument)):
            columns = math.prod(piece.shape[1:])
            return piece.offset + round(inside / columns) * columns
    return ideal


def _block(pieces: Sequence[Piece], ideal: int) -> int:
    """Return the last place up to `ideal` with whole blocks of compressed elements before it."""
    runs = [
        (piece.offset, piece.offset + piece.end - piece.begin)
        for piece in pieces
        if not stays_exact(piece.shape)
    ]
    before = sum(max(0, min(end, ideal) - begin) for begin, end in runs)
    odd = before % BLOCK
    if not odd:
        return ideal
    wanted = before - odd
    for begin, end in runs:
        if wanted <= end - begin:
            return begin + wanted
        wanted -= end - begin
    return ideal
