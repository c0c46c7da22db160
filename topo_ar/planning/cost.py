"""The alpha-beta cost of each family: what an all-reduce takes on rates that a payload gets.

Latencies are alpha (seconds for each message waited for), rates are beta (seconds per byte). The
formulas are generic: integers, fractions and floats all work, so that tests can be exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from topo_ar.planning.level_bounds import RateKind, check_levels, node_bandwidth, port_bandwidth
from topo_ar.planning.runtime import GPU_RUNTIME, Runtime
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
    intra_beta : float
        Seconds per byte through one rank's port inside its node.
    node_beta, nic_beta : float
        Seconds per byte through all NICs of a node, and through its fastest NIC alone.
    ring_alpha, ring_beta : float
        What a flat ring in rank order adds to the latency of each hop, and the seconds per byte of
        its slowest hop.
    chunk_seconds : float or None
        As in `Runtime`.
    """

    world_size: int
    num_nodes: int
    ranks_per_node: int
    crossings: int
    intra_alpha: float
    inter_alpha: float
    intra_beta: float
    node_beta: float
    nic_beta: float
    ring_alpha: float
    ring_beta: float
    chunk_seconds: float | None = None

    @staticmethod
    def from_levels(
        levels: Levels, rate: RateKind = "payload", runtime: Runtime = GPU_RUNTIME
    ) -> "CostParameters":
        """Return the parameters of `levels`; the slowest port of each kind counts.

        The default runtime adds nothing to the ports.

        Raises
        ------
        PlanError
            If the levels contradict themselves.
        """
        check_levels(levels)
        nodes, world = levels.nodes, levels.world_size
        node_of = {rank: i for i, node in enumerate(nodes) for rank in node.ranks}
        leaving = [
            sum(node_of[(rank + 1) % world] != i for rank in node.ranks)
            for i, node in enumerate(nodes)
        ]
        shared = [node for node in nodes if len(node.ranks) > 1]
        several = len(nodes) > 1
        bandwidths = [node_bandwidth(node, rate) for node in nodes] if several else []
        intra_beta = max((1 / port_bandwidth(node.intra, rate) for node in shared), default=0)
        sizes = {len(node.ranks) for node in nodes}
        return CostParameters(
            world_size=world,
            num_nodes=len(nodes),
            ranks_per_node=sizes.pop() if len(sizes) == 1 else 0,
            crossings=sum(leaving),
            intra_alpha=max((node.intra.latency for node in shared), default=0),
            inter_alpha=(max(nic.latency for node in nodes for nic in node.nics) if several else 0),
            intra_beta=intra_beta,
            node_beta=max((1 / bandwidth for bandwidth in bandwidths), default=0),
            nic_beta=(
                max(1 / max(port_bandwidth(nic, rate) for nic in node.nics) for node in nodes)
                if several
                else 0
            ),
            ring_alpha=runtime.flat_hop_seconds,
            ring_beta=max(
                1 / runtime.flat_bytes_per_s,
                intra_beta,
                *(k / c for k, c in zip(leaving, bandwidths, strict=False)),
            ),
            chunk_seconds=runtime.chunk_seconds,
        )

    @property
    def intra_slope(self) -> float:
        """``k1 = 2 (g-1) / g * beta``: seconds per byte of reduce-scatter plus all-gather."""
        g = self.ranks_per_node
        return 2 * (g - 1) * self.intra_beta / g

    @property
    def inter_slope(self) -> float:
        """``k2 = 2 (n-1) / n * beta``: seconds per byte of the stage between nodes, all NICs."""
        n = self.num_nodes
        return 2 * (n - 1) * self.node_beta / n


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
    return latency + 2 * (p.world_size - 1) * nbytes * p.ring_beta / p.world_size


def hierarchical(parameters: CostParameters, chunk_nbytes: Sequence[float]) -> float:
    """Return seconds of reduce-scatter, all-reduce of each shard on all NICs, all-gather.

    With one chunk the stages follow each other: ``2 (g-1) a1 + 2 (n-1) a2 + S (k1 + k2)``; with
    more they overlap (`pipeline_seconds`). A streaming runtime waits for the latencies of a whole
    buffer once and adds its own cost to each chunk. Valid for nodes with equal numbers of ranks.
    """
    p = parameters
    intra_alpha = (p.ranks_per_node - 1) * p.intra_alpha
    inter_alpha = 2 * (p.num_nodes - 1) * p.inter_alpha
    intra_slope, inter_slope = p.intra_slope / 2, p.inter_slope
    once: float = 0
    if p.chunk_seconds is not None:
        once = 2 * intra_alpha + inter_alpha
        intra_alpha = inter_alpha = p.chunk_seconds
    return once + pipeline_seconds(
        [intra_alpha + size * intra_slope for size in chunk_nbytes],
        [inter_alpha + size * inter_slope for size in chunk_nbytes],
    )


def leader(
    parameters: CostParameters, chunk_nbytes: Sequence[float], *, direct: bool = True
) -> float:
    """Return seconds when one rank of each node reduces, exchanges on one NIC and shares out.

    ``2 S beta1`` inside the node; between nodes ``(n-1) S beta`` when every leader sends its sum
    to every other (`direct`, one latency: what a Schedule does), else a ring of the leaders with
    ``2 (n-1) / n S beta`` and 2(n-1) latencies.
    """
    p = parameters
    n = p.num_nodes
    slope = (n - 1) * p.nic_beta if direct else 2 * (n - 1) * p.nic_beta / n
    alpha = p.inter_alpha * (min(n - 1, 1) if direct else 2 * (n - 1))
    return pipeline_seconds(
        [p.intra_alpha + size * p.intra_beta for size in chunk_nbytes],
        [alpha + size * slope for size in chunk_nbytes],
    )


def pipeline_seconds(intra: Sequence[float], inter: Sequence[float]) -> float:
    """Return the end of a pipeline of chunks over two resources.

    Chunk i takes ``intra[i]`` to reduce-scatter, ``inter[i]`` between nodes and ``intra[i]`` to
    all-gather; the first and the last share the ports inside the node, where reduce-scatters go
    first. When the stage between nodes is at least twice as long as the one inside, this is
    ``2 a + c t2`` for c equal chunks.
    """
    arrived: list[float] = []
    reduced: float = 0
    network: float = 0
    for local, remote in zip(intra, inter, strict=True):
        reduced += local
        network = max(network, reduced) + remote
        arrived.append(network)
    end = reduced
    for local, ready in zip(intra, arrived, strict=True):
        end = max(end, ready) + local
    return end


def optimal_chunk_count(parameters: CostParameters, nbytes: float) -> int:
    """Return the number of equal chunks at which latency and overlap balance, at least 1.

    ``c* = sqrt((K - k_m) S / a_m)`` minimises ``K S / c + A + (c-1) (a_m + k_m S / c)`` with
    ``K = k1 + k2``, k_m the larger of the two slopes and a_m the latencies of that stage. Without
    latency there is no optimum: more is better, and the answer is `nbytes`.
    """
    p = parameters
    stages = [
        (p.intra_slope, 2 * (p.ranks_per_node - 1) * p.intra_alpha),
        (p.inter_slope, 2 * (p.num_nodes - 1) * p.inter_alpha),
    ]
    if p.chunk_seconds is not None:
        stages = [(p.intra_slope, 2 * p.chunk_seconds), (p.inter_slope, p.chunk_seconds)]
    (other, _), (_, alpha) = sorted(stages)
    if other == 0 or nbytes == 0:
        return 1
    if alpha == 0:
        return max(1, int(nbytes))
    return max(1, round(math.sqrt(other * nbytes / alpha)))
