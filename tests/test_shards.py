import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from topo_ar.compression.parts import part_of, split
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.compression.shards import shard_bounds
from topo_ar.planning.codecs import BLOCK, factors_pay, parse_codec

SHAPES = st.one_of(
    st.tuples(st.integers(1, 3000)),
    st.tuples(st.integers(1, 200), st.integers(1, 60)),
    st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)),
)


def bucket(shapes):
    pieces, offset = [], 0
    for number, shape in enumerate(shapes):
        numel = math.prod(shape)
        pieces.append(Piece(f"p{number}", shape, 0, numel, offset))
        offset += numel
    return Layout(0, tuple(pieces))


@given(st.lists(SHAPES, max_size=6), st.integers(1, 5), st.sampled_from(["int8", "topk:0.01"]))
def test_shards_have_the_blocks_of_the_bucket(shapes, num_local, name):
    whole = bucket(shapes)
    bounds = shard_bounds(whole, parse_codec(name), num_local)
    assert bounds[0] == 0
    assert bounds[-1] == whole.numel
    assert list(bounds) == sorted(bounds)
    assert len(bounds) == num_local + 1
    parts = [part_of(whole, a, b) for a, b in pairwise(bounds)]
    coded = [sum(b - a for a, b in split(part).coded) for part in parts]
    total = sum(b - a for a, b in split(whole).coded)
    assert sum(-(-each // BLOCK) for each in coded) == -(-total // BLOCK)


@given(st.lists(SHAPES, max_size=6), st.integers(1, 5), st.integers(1, 4))
def test_powersgd_gets_whole_rows(shapes, num_local, rank):
    whole = bucket(shapes)
    bounds = shard_bounds(whole, parse_codec(f"powersgd:{rank}"), num_local)
    assert list(bounds) == sorted(bounds)
    for place in bounds:
        for piece in whole.pieces:
            inside = place - piece.offset
            if 0 < inside < piece.end and factors_pay(piece.shape, rank):
                assert inside % math.prod(piece.shape[1:]) == 0


def test_shards_are_nearly_equal():
    whole = bucket([(512, 512, 3, 3), (512,), (256, 512)])
    for name in ("int8", "powersgd:4"):
        bounds = shard_bounds(whole, parse_codec(name), 4)
        for local in range(5):
            assert abs(bounds[local] - whole.numel * local // 4) <= 512 * 9 // 2
