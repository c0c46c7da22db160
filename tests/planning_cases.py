"""Clusters the planning tests share, with rates as exact fractions."""

from fractions import Fraction

from hypothesis import strategies as st

from topo_ar.topology.levels import Levels, NodeLevel, Rate
from topo_ar.topology.model import Source


def rate(value, latency=0, payload=None):
    exact = value if isinstance(value, float) else Fraction(value)
    return Rate(exact, exact if payload is None else payload, latency, Source.ASSUMED)


def cluster(sizes, intra, nics, *, intra_latency=0, nic_latency=0):
    """Nodes of ``sizes[i]`` ranks; `nics` holds the NIC rates of a node, or of each node."""
    nodes, first = [], 0
    per_node = nics if nics and isinstance(nics[0], list | tuple) else [nics] * len(sizes)
    for i, (size, rates) in enumerate(zip(sizes, per_node, strict=True)):
        nodes.append(
            NodeLevel(
                f"node{i}",
                tuple(range(first, first + size)),
                rate(intra, intra_latency),
                tuple(rate(value, nic_latency) for value in rates),
            )
        )
        first += size
    return Levels(tuple(nodes))


# Name, nodes, ranks per node, rank port, NICs; GB/s. PCIe 12 with 10GbE is the last.
EQUAL = {
    "2x4 rails": (2, 4, 300, [25] * 4),
    "2x4 one nic": (2, 4, 300, [25]),
    "4x4 rails": (4, 4, 300, [25] * 4),
    "4x4 one nic": (4, 4, 300, [25]),
    "2x8 A100": (2, 8, 300, [25] * 8),
    "4x8 A100": (4, 8, 300, [25] * 8),
    "2x8 H100": (2, 8, 450, [50] * 8),
    "2x4 10GbE": (2, 4, 12, [Fraction(5, 4)]),
}


def equal(name):
    nodes, ranks, intra, nics = EQUAL[name]
    return cluster([ranks] * nodes, intra, nics)


_RATES = st.integers(1, 400)


@st.composite
def any_levels(draw, even=None, max_nodes=4, max_ranks=4, number=int):
    """Small clusters without latency; ranks may be dealt out to the nodes in any order."""
    num_nodes = draw(st.integers(1, max_nodes))
    even = draw(st.booleans()) if even is None else even
    one = draw(st.integers(1, max_ranks))
    sizes = [one if even else draw(st.integers(1, max_ranks)) for _ in range(num_nodes)]
    deal = draw(st.permutations(range(sum(sizes))))
    nodes, first = [], 0
    for i, size in enumerate(sizes):
        nodes.append(
            NodeLevel(
                f"node{i}",
                tuple(sorted(deal[first : first + size])),
                rate(number(draw(_RATES))),
                tuple(rate(number(draw(_RATES))) for _ in range(draw(st.integers(1, 3)))),
            )
        )
        first += size
    return Levels(tuple(sorted(nodes, key=lambda node: node.ranks[0])))
