"""Who owns how much: small integer weights of nodes, and of ranks by the NICs near them."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

from topo_ar.planning.level_bounds import RateKind, node_bandwidth, node_shares, port_bandwidth
from topo_ar.planning.plan import Shards
from topo_ar.topology.levels import Levels, NodeLevel

# Weights are rounded to integers of at most this size ...
_LARGEST_WEIGHT = 64
# ... as small as possible while they cost less than this over the exact shares.
_ROUNDING = 1.001


def share_bandwidth(node: NodeLevel, weights: Sequence[int], rate: RateKind) -> float:
    """Return the bytes/s that leave `node` when rank k sends ``weights[k]`` parts of them.

    Each rank spreads its part over the NICs nearest to it in proportion to their rates; the NIC
    that is busy longest counts. Where the nearest are not known, every rank uses all NICs.
    """
    if not node.rank_nics:
        return node_bandwidth(node, rate)
    rates = [port_bandwidth(nic, rate) for nic in node.nics]
    busy: list[float] = [0] * len(rates)
    for weight, near in zip(weights, node.rank_nics, strict=True):
        together = sum(rates[nic] for nic in near)
        for nic in near:
            busy[nic] += weight / together
    return sum(weights) / max(busy)


def rank_weights(node: NodeLevel, rate: RateKind) -> tuple[int, ...]:
    """Return the weights of a node's ranks: in proportion to their part of the NICs near them.

    Ranks that are near the same NIC share it; equal weights where the nearest are not known.
    """
    if not node.rank_nics:
        return (1,) * len(node.ranks)
    rates = [port_bandwidth(nic, rate) for nic in node.nics]
    users = [sum(nic in near for near in node.rank_nics) for nic in range(len(rates))]
    parts = [sum(rates[nic] / users[nic] for nic in near) for near in node.rank_nics]
    if len(set(parts)) == 1:
        return (1,) * len(node.ranks)
    return small_integers(parts, lambda weights: 1 / share_bandwidth(node, weights, rate))


def weighted_shards(levels: Levels, rate: RateKind) -> Shards:
    """Return the shards that suit what each node and each NIC carries.

    Equal weights where they are as good as any: nodes of equal NICs, or two nodes.
    """
    ranks = tuple(rank_weights(node, rate) for node in levels.nodes)
    count = len(levels.nodes)
    if count < 3:
        return Shards((1,) * count, ranks)
    bandwidths = [
        share_bandwidth(node, weights, rate)
        for node, weights in zip(levels.nodes, ranks, strict=True)
    ]
    if len(set(bandwidths)) == 1:
        return Shards((1,) * count, ranks)
    nodes = small_integers(node_shares(bandwidths), lambda w: node_slope(bandwidths, w))
    return Shards(nodes, ranks)


def node_slope(bandwidths: Sequence[float], weights: Sequence[int]) -> float:
    """Return seconds per byte of the stage between nodes, both ways of every NIC always at work.

    A node with the share w sends and receives ``1 + w (n - 2)`` times the buffer.
    """
    total, count = sum(weights), len(weights)
    return max(
        (total + weight * (count - 2)) / (total * bandwidth)
        for weight, bandwidth in zip(weights, bandwidths, strict=True)
    )


def most_rails(ranks: Sequence[Sequence[int]]) -> int:
    """Return how many rails the busiest rank takes part in.

    Every edge between the shards of one node also cuts the shards of the others.
    """
    edges = [[Fraction(end, sum(weights)) for end in accumulate(weights)] for weights in ranks]
    everyone = sorted({edge for own in edges for edge in own})
    places = {edge: place for place, edge in enumerate(everyone)}
    return max(
        places[end] - (places[own[k - 1]] if k else -1)
        for own in edges
        for k, end in enumerate(own)
    )


def small_integers(
    parts: Sequence[Fraction | float], cost: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """Return the smallest integers in about the proportions of `parts`.

    The first ones, counted by the largest, that `cost` finds no more than 0.1 % above the best of
    those up to 64.
    """
    top = max(parts)
    tried = [
        tuple(round(part * scale / top) for part in parts)
        for scale in range(1, _LARGEST_WEIGHT + 1)
    ]
    costs = [cost(weights) for weights in tried]
    limit = min(costs) * _ROUNDING
    return next(weights for weights, value in zip(tried, costs, strict=True) if value <= limit)
