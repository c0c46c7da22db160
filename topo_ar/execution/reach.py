"""Between which ranks of different nodes there are flows: decided before any plan is made.

A plan may order the ranks of a node by their NICs, cut a chunk by weights, or send from rack to
rack: until it is made nobody knows who will send to whom. So every rank has a flow to every rank of
other nodes; a flow that no plan needs costs a socket. In a large job a rank has flows only to those
whose share it overlaps when the ranks of a node have equal shares: of nodes of equal numbers of
ranks, to the ranks in its own place. Of very many equal nodes it has flows to those only with which
it has to do round a ring and in recursive halving or doubling, in the order of the nodes' numbers.
"""

from collections.abc import Sequence

from topo_ar.execution.program import BETWEEN
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Plan
from topo_ar.planning.recursion import rounds
from topo_ar.planning.runtime import CPU_RUNTIME
from topo_ar.planning.step_list import RINGS

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
    if not is_direct(nodes):
        return _of_few(_in_place_of(nodes, rank), rank)
    mine = next(node for node in nodes if rank in node)
    at = mine.index(rank)
    everyone = is_complete(nodes)
    return tuple(
        peer
        for node in nodes
        if node is not mine
        for place, peer in enumerate(node)
        if everyone
        or (at * len(node) < (place + 1) * len(mine) and place * len(mine) < (at + 1) * len(node))
    )


def is_complete(nodes: Nodes) -> bool:
    """Tell whether there is a flow between any two ranks of different nodes."""
    return sum(map(len, nodes)) <= ALL_CONNECTED_RANKS


def is_direct(nodes: Nodes) -> bool:
    """Tell whether there is a flow between any two ranks in the same place of equal nodes."""
    return is_complete(nodes) or not is_equal(nodes) or len(nodes) <= CPU_RUNTIME.most_direct_nodes


def _of_few(rail: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the neighbours round a ring, and the partners of all rounds of a recursion."""
    size, at = len(rail), rail.index(rank)
    peers = {(at - 1) % size, (at + 1) % size}
    for pairs, _ in rounds(size, halving=True):
        peers.update({b for a, b in pairs if a == at}, {a for a, b in pairs if b == at})
    return tuple(rail[peer] for peer in sorted(peers))


def rail_of(nodes: Nodes, rank: int) -> tuple[int, ...]:
    """Return the ranks in the place of `rank` on all nodes, in their order, that have flows.

    Empty where there are no such groups, see `why_no_rails`.
    """
    return () if why_no_rails(nodes) else _in_place_of(nodes, rank)


def why_no_rails(nodes: Nodes) -> str | None:
    """Return why the ranks in one place of all nodes cannot all talk to each other, if so."""
    if not is_equal(nodes):
        return "the nodes have unequal numbers of ranks"
    if not is_direct(nodes):
        most = CPU_RUNTIME.most_direct_nodes
        return f"ranks of more than {most} nodes do not all reach each other"
    return None


def _in_place_of(nodes: Nodes, rank: int) -> tuple[int, ...]:
    at = next(node.index(rank) for node in nodes if rank in node)
    return tuple(node[at] for node in nodes)


def is_equal(nodes: Nodes) -> bool:
    """Tell whether all nodes hold equally many ranks."""
    return len({len(node) for node in nodes}) == 1


class Reach:
    """Looks for flows that a plan needs and the job does not have; the same on every rank.

    Parameters
    ----------
    nodes : sequence of tuple of int
        As for `peers_of`.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._peers: dict[int, frozenset[int]] = {}
        self._possible: set[tuple[int, ...]] = set()

    def missing(self, plan: Plan, itemsize: int) -> str:
        """Return what `plan` needs and the job has not, in a sentence; empty if there is nothing.

        Parameters
        ----------
        plan : Plan
            It can be lowered for elements of `itemsize` bytes.
        """
        if is_complete(self._nodes):
            return ""
        for step in lower(plan, plan.nbytes // itemsize, itemsize).steps:
            if step.stage not in BETWEEN or step.group in self._possible:
                continue
            for at, rank in enumerate(step.group):
                others = step.group[:at] + step.group[at + 1 :]
                for peer in (step.group[at - 1],) if step.stage in RINGS else others:
                    if peer not in self._peers_of(rank):
                        return self._sentence(rank, peer)
            self._possible.add(step.group)
        return ""

    def _peers_of(self, rank: int) -> frozenset[int]:
        peers = self._peers.get(rank)
        if peers is None:
            peers = self._peers[rank] = frozenset(peers_of(self._nodes, rank))
        return peers

    def _sentence(self, rank: int, peer: int) -> str:
        if not is_direct(self._nodes):
            return (
                f"it needs a flow between ranks {rank} and {peer}, and of more than "
                f"{CPU_RUNTIME.most_direct_nodes} nodes each reaches few: they exchange round a "
                "ring, in recursive halving or doubling, in the order of their numbers"
            )
        need = (
            "equal nodes need the same shares in every node, their ranks in the order of their "
            "numbers"
            if is_equal(self._nodes)
            else "unequal nodes need equal shares of their ranks"
        )
        return (
            f"it needs a flow between ranks {rank} and {peer}, which a job of more than "
            f"{ALL_CONNECTED_RANKS} ranks does not have: {need}"
        )
