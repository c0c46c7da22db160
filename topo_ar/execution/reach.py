"""Between which ranks of different nodes there are flows: decided before any plan is made.

With nodes of equal numbers of ranks a rank needs those in its place on the other nodes. Unequal
nodes cut a chunk in different places, and where depends on weights that are not known yet: every
rank then has a flow to every rank of other nodes, or, in a large job, to those whose share it
overlaps when the ranks of a node have equal shares.
"""

from collections.abc import Sequence

from topo_ar.execution.program import BETWEEN
from topo_ar.planning.schedule import Schedule

Nodes = Sequence[tuple[int, ...]]

# A rank of the largest job that connects all ranks has this many sockets at most.
ALL_CONNECTED_RANKS = 64


def peers_of(nodes: Nodes, rank: int) -> tuple[int, ...]:
    """Return the ranks of other nodes to which `rank` has a flow; it then has one to them too.

    Parameters
    ----------
    nodes : sequence of tuple of int
        The ranks of each node, in the order of their numbers.
    rank : int
        One of them.
    """
    mine = next(node for node in nodes if rank in node)
    others = [node for node in nodes if node is not mine]
    at = mine.index(rank)
    if is_equal(nodes):
        return tuple(node[at] for node in others)
    if sum(map(len, nodes)) <= ALL_CONNECTED_RANKS:
        return tuple(peer for node in others for peer in node)
    return tuple(
        peer
        for node in others
        for place, peer in enumerate(node)
        if at * len(node) < (place + 1) * len(mine) and place * len(mine) < (at + 1) * len(node)
    )


def rail_of(nodes: Nodes, rank: int) -> tuple[int, ...]:
    """Return the ranks in the place of `rank` on all nodes, in their order; equal nodes only.

    Empty where nodes hold unequal numbers of ranks.
    """
    if not is_equal(nodes):
        return ()
    at = next(node.index(rank) for node in nodes if rank in node)
    return tuple(node[at] for node in nodes)


def is_equal(nodes: Nodes) -> bool:
    """Tell whether all nodes hold equally many ranks."""
    return len({len(node) for node in nodes}) == 1


class Reach:
    """Looks for flows that a schedule needs and the job does not have; the same on every rank.

    Parameters
    ----------
    nodes : sequence of tuple of int
        As for `peers_of`.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._peers: dict[int, frozenset[int]] = {}
        self._possible: set[tuple[int, ...]] = set()

    def missing(self, schedule: Schedule) -> str:
        """Return what the schedule needs and has not, in a sentence; empty if there is nothing."""
        for step in schedule.steps:
            if step.stage not in BETWEEN or step.group in self._possible:
                continue
            for rank in step.group:
                for peer in step.group:
                    if peer != rank and peer not in self._peers_of(rank):
                        return self._sentence(rank, peer)
            self._possible.add(step.group)
        return ""

    def _peers_of(self, rank: int) -> frozenset[int]:
        peers = self._peers.get(rank)
        if peers is None:
            peers = self._peers[rank] = frozenset(peers_of(self._nodes, rank))
        return peers

    def _sentence(self, rank: int, peer: int) -> str:
        need = (
            "equal nodes need the same shares in every node, their ranks in the order of their "
            "numbers"
            if is_equal(self._nodes)
            else f"in jobs of more than {ALL_CONNECTED_RANKS} ranks, unequal nodes need equal "
            "shares of their ranks"
        )
        return (
            f"it needs a flow between ranks {rank} and {peer}, which the job does not have: {need}"
        )
