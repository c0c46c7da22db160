"""The double binary tree: two trees over the nodes, each with half of every chunk.

The ranks of a node form a chain; its first rank, the head, is the node in the tree. Heads change
from chunk to chunk and from tree to tree, so that every rank, and its NIC, has its turn.
"""

from topo_ar.planning.plan import Plan
from topo_ar.planning.schedule import Op, Stage
from topo_ar.planning.step_list import Interval, StepList, cut


def double_binary_tree(steps: StepList, plan: Plan, chunk: int, interval: Interval) -> None:
    """Add the reductions up and the copies down both trees of one chunk.

    References
    ----------
    Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
    2009.
    """
    for tree, part in enumerate(cut(*interval, (1, 1))):
        if part[0] < part[1]:
            _up_and_down(steps, _parents(plan, chunk, tree), chunk, part)


def tree_parents(size: int, tree: int) -> list[int | None]:
    """Return the parent of each of `size` positions in the first or second tree; None at the root.

    Positions 1, 2, ... of the first tree stand in the order in which a walk from left to right
    meets them; odd ones are leaves. The second is its mirror image for an even `size` and is
    shifted by one for an odd one, so that no position is an inner one twice.
    """
    parents: list[int | None] = [None] * size
    for position in range(1, size + 1):
        lowest = position & -position
        parent = (position ^ lowest) | lowest << 1
        if parent > size:
            parent = position ^ lowest
        if parent:
            parents[_place(position, size, tree)] = _place(parent, size, tree)
    return parents


def _place(position: int, size: int, tree: int) -> int:
    if tree == 0:
        return position - 1
    return size - position if size % 2 == 0 else position % size


def _parents(plan: Plan, chunk: int, tree: int) -> dict[int, int | None]:
    """Return the parent of every rank, children before their parents."""
    chains = [
        [node[(place + chunk + tree) % len(node)] for place in range(len(node))]
        for node in plan.nodes
    ]
    above = tree_parents(len(chains), tree)
    depth = [0] * len(chains)
    for i, parent in enumerate(above):
        while parent is not None:
            depth[i] += 1
            parent = above[parent]
    parents: dict[int, int | None] = {}
    for chain in chains:
        parents.update(zip(chain[:0:-1], chain[-2::-1], strict=True))
    for i in sorted(range(len(chains)), key=lambda i: -depth[i]):
        parent = above[i]
        parents[chains[i][0]] = None if parent is None else chains[parent][0]
    return parents


def _up_and_down(
    steps: StepList, parents: dict[int, int | None], chunk: int, part: Interval
) -> None:
    last: dict[int, int] = {}
    for child, parent in parents.items():
        if parent is not None:
            waits = {last[rank] for rank in (child, parent) if rank in last}
            last[parent] = steps.send(
                Stage.TREE_REDUCE, Op.REDUCE_SCATTER, child, parent, part, chunk, waits
            )
    # Heads come after the chains in `parents`: backwards, the network goes before the node.
    for child, parent in reversed(parents.items()):
        if parent is not None:
            last[child] = steps.send(
                Stage.TREE_BROADCAST, Op.ALL_GATHER, parent, child, part, chunk, (last[parent],)
            )
