"""Which parts of a simulation are alike, so that one of them can stand for all.

Colour refinement: vertices of one colour have equally many neighbours of each other colour, over
edges of each kind. Filling rates in max-min fairness, waiting for the last of several, and taking
turns only ever ask for such counts; so by induction over the events, what has one colour has the
same times, and one of each colour, with the counts as coefficients, gives them exactly.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SEED = 20_261_203


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges of one kind: arrays of the vertices that they lead from and to."""

    sources: "NDArray[np.int64]"
    targets: "NDArray[np.int64]"


def colours(labels: Sequence[Hashable], edges: Sequence[Edges]) -> "NDArray[np.int64]":
    """Return the colour of every vertex: the coarsest stable partition that keeps `labels` apart.

    Colours are numbered in the order of their first vertex. Neighbourhoods are compared by sums of
    random 64-bit numbers; that two different ones agree is less likely than a memory fault.
    """
    import numpy as np

    known: dict[Hashable, int] = {}
    colour = np.array([known.setdefault(label, len(known)) for label in labels], dtype=np.int64)
    generator = np.random.default_rng(_SEED)
    count = len(known)
    while True:
        mark = np.zeros(len(colour), dtype=np.uint64)
        for each in edges:
            for here, there in ((each.sources, each.targets), (each.targets, each.sources)):
                salt = generator.integers(0, 1 << 64, count, dtype=np.uint64)
                np.add.at(mark, here, salt[colour[there]])
        pairs = np.stack([colour.astype(np.uint64), mark], axis=1)
        _, first, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        rank_of = np.empty(len(first), dtype=np.int64)
        rank_of[np.argsort(first)] = np.arange(len(first))
        colour = rank_of[inverse.reshape(-1)]
        if len(first) == count:
            return colour
        count = len(first)
