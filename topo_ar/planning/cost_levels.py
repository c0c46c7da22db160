"""The cost of hierarchies beyond equal rails: shards by what nodes carry, and a third level."""

from dataclasses import dataclass
from fractions import Fraction

from topo_ar.planning.contention import SharedPorts
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.level_bounds import port_bandwidth
from topo_ar.planning.pipelines import Pipeline, Stage
from topo_ar.planning.plan import Shards
from topo_ar.planning.shares import most_rails, share_bandwidth, weighted_shards
from topo_ar.topology.levels import Levels

# Shares that promise less than this over equal ones are not worth being unequal.
_WORTH = 1.001


@dataclass(frozen=True, slots=True)
class Weighted:
    """Shards by what nodes and NICs carry, the pipeline they make, and what equal ones would.

    Attributes
    ----------
    shards : Shards
        The weights.
    stages : Pipeline
        Their cost.
    equal_slope : float
        Seconds per byte between nodes with equal shards.
    pointless : str
        Why shards in proportion are no better than equal rails; empty where they are, or where
        nodes of different numbers of ranks leave no other hierarchy.
    """

    shards: Shards
    stages: Pipeline
    equal_slope: float
    pointless: str

    @property
    def gain(self) -> float:
        """How much faster the stage between nodes is than with equal shards."""
        return self.equal_slope / self.stages.slope if self.stages.slope else 1


def weighted(levels: Levels, parameters: CostParameters) -> Weighted:
    """Return the weighted family on these levels; its nodes may hold any numbers of ranks.

    References
    ----------
    The shares of nodes are those of `level_bounds.node_shares`.
    """
    nodes = levels.nodes
    even = Shards((1,) * len(nodes), tuple((1,) * len(node.ranks) for node in nodes))
    shards = weighted_shards(levels, parameters.rate)
    stages, equal = (weighted_stages(levels, parameters, each) for each in (shards, even))
    if shards != even and equal.slope <= stages.slope * _WORTH:
        shards, stages = even, equal
    pointless = ""
    if shards == even and parameters.ranks_per_node:
        pointless = (
            "of two nodes each must send the whole buffer out, whatever its share"
            if len(nodes) == 2
            else "equal shares keep the NICs as busy as any other"
        )
    return Weighted(shards, stages, equal.slope, pointless)


def weighted_stages(levels: Levels, parameters: CostParameters, shards: Shards) -> Pipeline:
    """Return what these shards cost on these levels."""
    p, n = parameters, len(levels.nodes)
    spread = max(map(_spread, shards.ranks))
    # Of the bytes that a rank gets it adds as many as it has of every other rank.
    most = max(len(weights) for weights in shards.ranks)
    inside = Stage((most - 1) * p.intra_alpha, spread * p.intra_beta, spread * p.gamma)
    if n == 1:
        return Pipeline((inside,), 0, 0, chunk_seconds=p.chunk_seconds)
    ports = SharedPorts(
        levels,
        p.rate,
        [
            share_bandwidth(node, weights, p.rate)
            for node, weights in zip(levels.nodes, shards.ranks, strict=True)
        ],
    )
    # Two nodes exchange: each sends everything, whoever would have been the root.
    roots = shards.nodes if n > 2 else (1, 1)
    total = sum(roots)
    # To and from a single root every message is sent at once.
    single = sum(root > 0 for root in roots) == 1
    alpha = 2 * p.flow_alpha if single else p.rail_alpha
    busy = ports.reduce_and_share(roots) / total
    through = 2 * ports.all_to_all([1] * n, roots) / total
    return Pipeline(
        outer=(inside,),
        alpha=alpha * most_rails(shards.ranks),
        slope=busy + p.gamma * Fraction((n - 1) * max(roots), total),
        trailing=through - busy,
        chunk_seconds=p.chunk_seconds,
        network=busy,
        message_seconds=p.messages(min(n - 1, 2) * (n - 1) * most_rails(shards.ranks)),
    )


def _spread(weights: tuple[int, ...]) -> Fraction:
    """Return the part of a chunk that the busiest rank sends or receives in a reduce-scatter."""
    total, others = sum(weights), len(weights) - 1
    if not others:
        return Fraction(0)
    return max(Fraction(max(total - weight, others * weight), total) for weight in weights)


def islands_of(levels: Levels) -> tuple[tuple[int, ...], ...]:
    """Return the islands of all nodes where all are of equal size; else none."""
    islands = [island for node in levels.nodes for island in node.islands]
    equal = len({len(island) for island in islands}) == 1
    alike = len({len(node.islands) for node in levels.nodes}) == 1
    return tuple(islands) if equal and alike and len(islands[0]) > 1 else ()


def racks_of(levels: Levels) -> tuple[tuple[int, ...], ...]:
    """Return the racks where all hold equally many nodes, more than one; else none."""
    sizes = {len(rack.nodes) for rack in levels.racks}
    if len(levels.racks) < 2 or len(sizes) > 1 or sizes == {1}:
        return ()
    return tuple(rack.nodes for rack in levels.racks)


def has_third_level(levels: Levels, parameters: CostParameters) -> bool:
    """Return whether there are islands or racks of equal size around equal nodes."""
    return bool(parameters.ranks_per_node and (islands_of(levels) or racks_of(levels)))


def three_level(levels: Levels, parameters: CostParameters) -> Pipeline:
    """Return the stages over islands where there are any, else over racks."""
    over = _over_islands if islands_of(levels) else _over_racks
    return over(levels, parameters)


def _over_islands(levels: Levels, p: CostParameters) -> Pipeline:
    """Reduce-scatter in islands, then across them with ``1 / s`` of the buffer, then rails.

    A rank's port is taken to be busy in both inner stages, what joins the islands in the second.
    """
    islands = islands_of(levels)
    g, n = p.ranks_per_node, p.num_nodes
    s = len(islands[0])
    m = g // s
    rates = [node.island for node in levels.nodes if node.island is not None]
    port = max(1 / port_bandwidth(each, p.rate) for each in rates)
    inner_alpha = (s - 1) * max(each.latency for each in rates)
    inner = Stage(inner_alpha, Fraction(g - 1, g) * port, Fraction(s - 1, s) * p.gamma)
    part = Fraction(m - 1, g)
    across = Stage((m - 1) * p.intra_alpha, part * p.intra_beta, part * p.gamma)
    if n == 1:
        slope = 2 * across.slope + across.adding
        return Pipeline((inner,), 2 * across.alpha, slope, chunk_seconds=p.chunk_seconds)
    return Pipeline(
        outer=(inner, across),
        alpha=p.rail_alpha,
        slope=p.inter_slope + Fraction(n - 1, n * g) * p.gamma,
        chunk_seconds=p.chunk_seconds,
        network=p.inter_slope,
        message_seconds=p.messages(min(n - 1, 2) * (n - 1)),
    )


def _over_racks(levels: Levels, p: CostParameters) -> Pipeline:
    """Reduce-scatter in nodes, then in racks, then across them with ``1 / r`` of a shard.

    Both outer stages use the NICs: these are busy for all of them, the uplinks for the last only.
    """
    racks = racks_of(levels)
    g, n, q = p.ranks_per_node, p.num_nodes, len(racks)
    r = len(racks[0])
    equal = [share_bandwidth(node, (1,) * g, p.rate) for node in levels.nodes]
    nic = max(1 / bandwidth for bandwidth in equal)
    uplink = max(1 / port_bandwidth(rack.uplink, p.rate) for rack in levels.racks)
    in_rack = 2 * Fraction(r - 1, r) * nic
    across = 2 * Fraction(q - 1, q) * max(nic / r, uplink)
    busy = max(2 * Fraction(n - 1, n) * nic, 2 * Fraction(q - 1, q) * uplink)
    phases = min(q - 1, 2)
    far = max(p.inter_alpha, *(rack.uplink.latency for rack in levels.racks))
    return Pipeline(
        outer=(p.in_node,),
        alpha=2 * (p.flow_alpha + p.messages(r - 1)) + phases * (far + p.messages(q - 1)),
        slope=busy + Fraction(n - 1, n * g) * p.gamma,
        trailing=in_rack + across - busy,
        chunk_seconds=p.chunk_seconds,
        network=busy,
        message_seconds=p.messages(2 * (r - 1) + phases * (q - 1)),
    )
