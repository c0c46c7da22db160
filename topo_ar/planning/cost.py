"""The alpha-beta cost of each family: what an all-reduce takes on rates that a payload gets.

Latencies are alpha (seconds for each message waited for), rates are beta (seconds per byte). The
formulas are generic: integers, fractions and floats all work, so that tests can be exact.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from topo_ar.planning.contention import SharedPorts
from topo_ar.planning.level_bounds import RateKind, check_levels, port_bandwidth
from topo_ar.planning.pipelines import Pipeline, Stage
from topo_ar.planning.runtime import GPU_RUNTIME, Runtime
from topo_ar.planning.shares import share_bandwidth
from topo_ar.topology.levels import Levels


@dataclass(frozen=True, slots=True)
class CostParameters:
    """What the formulas need of a cluster, slowest node first in mind.

    Attributes
    ----------
    world_size, num_nodes : int
        N ranks on n nodes.
    ranks_per_node : int
        g, or 0 where the nodes hold different numbers of ranks.
    crossings : int
        Hops of a ring in rank order that lead to another node; n when the ranks are in good order.
    intra_alpha, inter_alpha : float
        Seconds of latency inside a node and between nodes.
    flow_alpha : float
        Seconds that the runtime's own messages between nodes are waited for.
    intra_beta : float
        Seconds per byte through one rank's port inside its node.
    nic_beta : float
        Seconds per byte through the fastest NIC of a node.
    rail_rounds : int
        Messages that a rail between nodes waits for, one after the other: 2 where each rank sends
        to all others at once, 1 where two ranks exchange, 2 (n-1) round a ring.
    message_seconds : float
        What a message between nodes costs a rank that does not wait for it.
    inter_slope : float
        ``k2 = 2 (n-1) / n * beta``: seconds per byte of equal rails between nodes, each rank using
        the NICs near it; longer where rails share the uplink of a rack.
    leader_slope : float
        Seconds per byte when the leaders of all nodes send to each other on one NIC each.
    ring_alpha, ring_local_beta, ring_network_beta : float
        What a flat ring in rank order adds to the latency of each hop, and the seconds per byte of
        its slowest hop inside a node and over the network.
    chunk_seconds : float or None
        As in `Runtime`.
    gamma : float
        Seconds per byte of adding, 0 where the rates include it.
    levels, rate
        What all this was taken from.
    """

    world_size: int
    num_nodes: int
    ranks_per_node: int
    crossings: int
    intra_alpha: float
    inter_alpha: float
    flow_alpha: float
    intra_beta: float
    nic_beta: float
    rail_rounds: int
    message_seconds: float
    inter_slope: float
    leader_slope: float
    ring_alpha: float
    ring_local_beta: float
    ring_network_beta: float
    chunk_seconds: float | None
    gamma: float
    levels: Levels = field(repr=False)
    rate: RateKind = "payload"

    @staticmethod
    def from_levels(
        levels: Levels, rate: RateKind = "payload", runtime: Runtime = GPU_RUNTIME
    ) -> "CostParameters":
        """Return the parameters of `levels`; the slowest port of each kind counts.

        The default runtime adds nothing to the ports. Nodes are taken in the order of `levels`.

        Raises
        ------
        PlanError
            If the levels contradict themselves.
        """
        check_levels(levels)
        nodes, world = levels.nodes, levels.world_size
        node_of = {rank: i for i, node in enumerate(nodes) for rank in node.ranks}
        shared = [node for node in nodes if len(node.ranks) > 1]
        n = len(nodes)
        intra_beta = max((1 / port_bandwidth(node.intra, rate) for node in shared), default=0)
        sizes = {len(node.ranks) for node in nodes}
        hops = [(node_of[rank], node_of[(rank + 1) % world]) for rank in range(world)]
        crossing = [(here, there, 1) for here, there in hops if here != there]
        fastest = [
            max((port_bandwidth(nic, rate) for nic in node.nics), default=0) for node in nodes
        ]
        equal = [share_bandwidth(node, (1,) * len(node.ranks), rate) for node in nodes]
        rails = SharedPorts(levels, rate, equal)
        ring = [(i, (i + 1) % n, 2 * (n - 1)) for i in range(n)]
        inter_alpha = max(nic.latency for node in nodes for nic in node.nics) if n > 1 else 0
        return CostParameters(
            world_size=world,
            num_nodes=n,
            ranks_per_node=sizes.pop() if len(sizes) == 1 else 0,
            crossings=len(crossing),
            intra_alpha=max((node.intra.latency for node in shared), default=0),
            inter_alpha=inter_alpha,
            flow_alpha=runtime.latency_share * inter_alpha,
            intra_beta=intra_beta,
            nic_beta=max(1 / bandwidth for bandwidth in fastest) if n > 1 else 0,
            rail_rounds=2 * (n - 1) if runtime.ring_rails else min(n - 1, 2),
            message_seconds=(
                0 if runtime.ring_rails else runtime.further_message_seconds(inter_alpha)
            ),
            inter_slope=(
                rails.seconds(ring)
                if runtime.ring_rails
                else 2 * rails.all_to_all([1] * n, [1] * n)
            )
            / n
            if n > 1
            else 0,
            leader_slope=SharedPorts(levels, rate, fastest).all_to_all([1] * n, [1] * n),
            ring_alpha=runtime.flat_hop_seconds,
            ring_local_beta=max(intra_beta, 1 / runtime.flat_bytes_per_s),
            ring_network_beta=SharedPorts(levels, rate).seconds(crossing),
            chunk_seconds=runtime.chunk_seconds,
            gamma=runtime.reduce_seconds_per_byte or 0,
            levels=levels,
            rate=rate,
        )

    @property
    def intra_slope(self) -> float:
        """``k1 = 2 (g-1) / g * beta``: seconds per byte of reduce-scatter plus all-gather."""
        g = self.ranks_per_node
        return 2 * (g - 1) * self.intra_beta / g

    @property
    def rail_alpha(self) -> float:
        """What a rail waits for: the latency of its rounds, and messages that are sent at once."""
        at_once = self.rail_rounds * (self.num_nodes - 1) if self.rail_rounds <= 2 else 0
        further = max(0, at_once - self.rail_rounds) * self.message_seconds
        return self.rail_rounds * self.flow_alpha + further

    @property
    def in_node(self) -> Stage:
        """Reduce-scatter inside the nodes, and all-gather: ``(g-1) a1 + S k1 / 2`` each."""
        g = self.ranks_per_node
        adding = Fraction(g - 1, g) * self.gamma
        return Stage((g - 1) * self.intra_alpha, self.intra_slope / 2, adding)

    @property
    def to_leader(self) -> Stage:
        """Reduction to a leader inside the nodes, and broadcast: ``S beta1`` each."""
        adding = (self.ranks_per_node - 1) * self.gamma
        return Stage(self.intra_alpha, self.intra_beta, adding)

    def messages(self, count: int) -> float:
        """Return what `count` messages of one chunk cost a rank beyond the first."""
        return max(0, count - 1) * self.message_seconds


def flat_ring(parameters: CostParameters, nbytes: float) -> float:
    """Return seconds of a flat ring in rank order.

    ``2 (N-1) / N * S * beta`` of the slowest hop; of the 2(N-1) steps as many wait for the network
    as a message meets node boundaries on its way, the others for a port inside a node; the runtime
    may add to each.
    """
    p = parameters
    n_network = 2 * (p.crossings - 1) if p.crossings else 0
    n_local = 2 * (p.world_size - 1) - n_network
    latency = n_network * p.inter_alpha + n_local * p.intra_alpha
    latency += 2 * (p.world_size - 1) * p.ring_alpha
    slope = 2 * max(p.ring_local_beta, p.ring_network_beta) + p.gamma
    return latency + (p.world_size - 1) * nbytes * slope / p.world_size


def rails(parameters: CostParameters) -> Pipeline:
    """Return reduce-scatter, all-reduce of each rank's equal shard between nodes, all-gather.

    With one chunk the stages follow each other: ``2 (g-1) a1 + r a2 + S (k1 + k2)`` with r rounds
    between nodes; with more they overlap. Two nodes exchange and wait once; more send directly and
    wait twice, or wait 2 (n-1) times round a ring. Valid for nodes with equal numbers of ranks.
    """
    p = parameters
    g, n = p.ranks_per_node, p.num_nodes
    return Pipeline(
        outer=(p.in_node,),
        alpha=p.rail_alpha,
        slope=p.inter_slope + Fraction(n - 1, n * g) * p.gamma,
        chunk_seconds=p.chunk_seconds,
        network=p.inter_slope,
        message_seconds=p.messages(min(n - 1, 2) * (n - 1)),
    )


def leaders(parameters: CostParameters, *, direct: bool = True) -> Pipeline:
    """Return the stages when one rank of each node reduces, exchanges on one NIC and shares out.

    ``2 S beta1`` inside the node; between nodes ``(n-1) S beta`` when every leader sends its sum
    to every other (`direct`, one latency: what a Schedule does), else a ring of the leaders with
    ``2 (n-1) / n S beta`` and 2(n-1) latencies.
    """
    p = parameters
    n = p.num_nodes
    slope = p.leader_slope if direct else 2 * (n - 1) * p.nic_beta / n
    at_once = p.messages(n - 1) if direct else 0
    return Pipeline(
        outer=(p.to_leader,),
        alpha=p.flow_alpha * (min(n - 1, 1) if direct else 2 * (n - 1)) + at_once,
        slope=slope + (n - 1) * p.gamma,
        network=slope,
    )
