"""The cost of the double binary tree: two trees over the nodes, a chain in each node."""

from collections.abc import Sequence

from topo_ar.planning.contention import Flow, SharedPorts
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.lowering_tree import tree_parents
from topo_ar.planning.pipelines import Pipeline
from topo_ar.topology.levels import Levels


def double_binary_tree(levels: Levels, parameters: CostParameters) -> Pipeline:
    """Return the pipeline of chunks up and down both trees, half of every chunk in each.

    With depth h, ``2 h (alpha + chunk * beta) + 2 S beta``: the NICs of a node send and receive
    twice the buffer, but on two nodes once; a rank sends ``2 (g-1) / g`` of it to its neighbours in
    the chain of its node. One rank of a node speaks for it in a tree, with its part of the NICs; a
    parent hears its children one after the other, and the chunks of others fill the gaps.
    """
    p = parameters
    most = max(len(node.ranks) for node in levels.nodes)
    n = p.num_nodes
    flows: list[Flow] = []
    hops = 0
    for tree in (0, 1):
        parents = tree_parents(n, tree)
        hops = max(hops, _messages_in_turn(parents))
        for child, parent in enumerate(parents):
            if parent is not None:
                flows += [(child, parent, 1), (parent, child, 1)]
    ports = SharedPorts(levels, p.rate)
    network = ports.seconds(flows) / 2
    heads = min(most, 2)
    head = [
        min(bandwidth / heads, one)
        for bandwidth, one in zip(ports.bandwidths, ports.one_rank, strict=True)
        if n > 1
    ]
    hop = max((1 / rate for rate in (*head, *ports.uplinks)), default=0) / 2
    near, far = p.intra_alpha + p.ring_alpha, p.inter_alpha + p.ring_alpha
    busy = max(2 * (most - 1) * p.ring_local_beta / most, network) + p.gamma
    way = (most - 1) * p.ring_local_beta / 2 + hops * hop
    # A node sends up once and down to two children in one tree and up in the other.
    occupied = (4 * far / heads if n > 2 else 2 * far) if n > 1 else 2 * near
    return Pipeline(
        outer=(),
        alpha=occupied,
        slope=busy,
        trailing=max(2 * way - busy, 0),
        network=network,
        once=max(2 * ((most - 1) * near + hops * far) - occupied, 0),
    )


def _depths(parents: Sequence[int | None]) -> list[int]:
    depths = [0] * len(parents)
    for i in range(len(parents)):
        at = parents[i]
        while at is not None:
            depths[i] += 1
            at = parents[at]
    return depths


def _messages_in_turn(parents: Sequence[int | None]) -> int:
    """Return how many messages, one after the other, it takes until the root has heard all."""
    depths = _depths(parents)
    heard = [0] * len(parents)
    for i in sorted(range(len(parents)), key=lambda i: -depths[i]):
        parent = parents[i]
        if parent is not None:
            heard[parent] = max(heard[parent], heard[i]) + 1
    return max(heard)
