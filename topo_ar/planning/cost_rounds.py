"""The cost of exchanges between equal nodes that go on round by round: ring, halving, doubling."""

from fractions import Fraction
from typing import cast

from topo_ar.planning.contention import Flow, SharedPorts
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.level_bounds import port_bandwidth
from topo_ar.planning.pipelines import Pipeline
from topo_ar.planning.recursion import Pair, rounds
from topo_ar.planning.shares import share_bandwidth

# How much longer a chunk that streams takes for its rounds, for which no other chunk has to wait:
# nothing is on the wire while a half is added up. Measured on 4, 8 and 16 nodes.
_IDLE = 0.2


def ring(parameters: CostParameters) -> Pipeline:
    """Return rails whose parts go round a ring of the nodes: ``2 (n-1) a2 + 2 (n-1)/n S beta``.

    Each node sends to the next one only, so that a rack sends to the next rack only.
    """
    p = parameters
    g, n = p.ranks_per_node, p.num_nodes
    hops = 2 * (n - 1)
    slope = _rail_ports(p).seconds([(i, (i + 1) % n, hops) for i in range(n)]) / n
    return Pipeline(
        outer=(p.in_node,),
        alpha=hops * p.flow_alpha,
        slope=slope + Fraction(n - 1, n * g) * p.gamma,
        chunk_seconds=p.chunk_seconds,
        network=slope,
    )


def halving(parameters: CostParameters) -> Pipeline:
    """Return rails of recursive halving and doubling.

    ``2 log2(n) a2 + 2 (n-1)/n S beta`` for n a power of two; else two rounds of the whole buffer
    more, among as many nodes as the next lower power.
    """
    p = parameters
    inwards = rounds(p.num_nodes, halving=True)
    outwards = [([(b, a) for a, b in pairs], part) for pairs, part in reversed(inwards)]
    adding = sum(part for _, part in inwards) * p.gamma / p.ranks_per_node
    return _round_by_round(p, _rail_ports(p), [*inwards, *outwards], adding, leading=False)


def doubling(parameters: CostParameters) -> Pipeline:
    """Return recursive doubling among one leader of each node: ``log2(n) (a2 + S beta)``.

    With n no power of two: two rounds more.
    """
    p = parameters
    all_rounds = rounds(p.num_nodes, halving=False)
    fastest = [max(port_bandwidth(nic, p.rate) for nic in node.nics) for node in p.levels.nodes]
    adds = p.num_nodes.bit_length() - 1 + (p.num_nodes & (p.num_nodes - 1) > 0)
    ports = SharedPorts(p.levels, p.rate, fastest)
    return _round_by_round(p, ports, all_rounds, adds * p.gamma, leading=True)


def _round_by_round(
    p: CostParameters,
    ports: SharedPorts,
    every: list[tuple[list[Pair], Fraction]],
    adding: float,
    *,
    leading: bool,
) -> Pipeline:
    """Return the stages around some rounds of messages, each of a part of the buffer."""
    flows: list[list[Flow]] = [
        [(a, b, cast("float", part)) for a, b in pairs] for pairs, part in every
    ]
    through = sum(ports.seconds(each) for each in flows)
    # Where some nodes sit out a round, chunks that follow use their ports meanwhile.
    busy = ports.seconds([flow for each in flows for flow in each])
    idle = 0 if leading or p.chunk_seconds is None else _IDLE * through
    return Pipeline(
        outer=(p.to_leader if leading else p.in_node,),
        alpha=len(flows) * p.flow_alpha,
        slope=busy + adding,
        trailing=max(0, through - busy) + idle,
        chunk_seconds=None if leading else p.chunk_seconds,
        network=busy,
        message_seconds=p.messages(len(flows)),
    )


def _rail_ports(p: CostParameters) -> SharedPorts:
    equal = [share_bandwidth(node, (1,) * len(node.ranks), p.rate) for node in p.levels.nodes]
    return SharedPorts(p.levels, p.rate, equal)
