"""The cost of the double binary tree: two trees over the nodes, a chain in each node."""

from collections import Counter

from topo_ar.planning.contention import Flow, SharedPorts
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.lowering_tree import tree_parents
from topo_ar.planning.pipelines import Pipeline
from topo_ar.topology.levels import Levels


def double_binary_tree(levels: Levels, parameters: CostParameters) -> Pipeline:
    """Return the pipeline of chunks up and down both trees, half of every chunk in each.

    With depth h, ``2 h (alpha + chunk * beta) + 2 S beta``: a rank sends and receives twice the
    buffer; so do the NICs of a node, but on two nodes once. Messages of one chunk follow each
    other; those of other chunks fill the gaps.
    """
    p = parameters
    most = max(len(node.ranks) for node in levels.nodes)
    n = p.num_nodes
    flows: list[Flow] = []
    height = fan = 0
    for tree in (0, 1):
        parents = tree_parents(n, tree)
        height = max(height, _height(parents))
        edges = [(child, parent) for child, parent in enumerate(parents) if parent is not None]
        fan = max([fan, *Counter(parent for _, parent in edges).values()])
        for child, parent in edges:
            flows += [(child, parent, 1), (parent, child, 1)]
    ports = SharedPorts(levels, p.rate)
    network = ports.seconds(flows) / 2
    hop = ports.longest_message() / 2 if n > 1 else 0
    # The end of a chain of two sends only up, its head only down.
    local = min(most - 1, 2) * p.ring_local_beta
    near, far = p.intra_alpha + p.ring_alpha, p.inter_alpha + p.ring_alpha
    busy = max(local, network) + p.gamma
    way = (most - 1) * p.ring_local_beta / 2 + height * fan * hop
    occupied = 2 * (far if n > 1 else near)
    return Pipeline(
        outer=(),
        alpha=occupied,
        slope=busy,
        trailing=max(2 * way - busy, 0),
        network=network,
        once=max(2 * ((most - 1) * near + height * far) - occupied, 0),
    )


def _height(parents: list[int | None]) -> int:
    depths = [0] * len(parents)
    for i in range(len(parents)):
        at = parents[i]
        while at is not None:
            depths[i] += 1
            at = parents[at]
    return max(depths)
