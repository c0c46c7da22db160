"""Through which NICs the flows between nodes go, where hosts use several.

Every rank has a NIC of its own: that which the topology puts nearest to it, else one after the
other. A flow takes the NICs of both ends where these lead to one subnet, and otherwise those of a
subnet that the hosts share. Hosts that share none leave the way to the system's routes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from topo_ar.execution.network import Nic
from topo_ar.execution.transports.rendezvous import Way
from topo_ar.topology.levels import Levels, NodeLevel


class Endpoint(msgspec.Struct, frozen=True):
    """A NIC of a rank, and the port at which the rank listens there."""

    nic: Nic
    port: int


Endpoints = Sequence[Endpoint]


def in_order_of_use(
    nics: Sequence[Nic], level: NodeLevel | None, rank: int, local_rank: int
) -> tuple[Nic, ...]:
    """Return the NICs of a host, a rank's own first.

    Parameters
    ----------
    nics : sequence of Nic
        In the order in which the ranks of the host get them by turns.
    level : NodeLevel or None
        The host in the topology, if it has `rank` there.
    rank, local_rank : int
        The rank, and its place among those of its host.
    """
    at = local_rank % len(nics)
    if level is not None and level.rank_nics:
        near = level.rank_nics[level.ranks.index(rank)]
        names = {level.nic_names[nic] for nic in near}
        known = [i for i, nic in enumerate(nics) if nic.name in names]
        if known:
            at = known[local_rank % len(known)]
    return (*nics[at:], *nics[:at])


def way(mine: Endpoints, theirs: Endpoints) -> Way:
    """Return how a rank with the endpoints `mine` calls one with `theirs`, each in order of use."""
    pairs = [
        (i + j, i, j)
        for i, here in enumerate(mine)
        for j, there in enumerate(theirs)
        if here.nic.network and here.nic.network == there.nic.network
    ]
    if not pairs:
        return Way(theirs[0].nic.address, theirs[0].port)
    _, i, j = min(pairs)
    return Way(theirs[j].nic.address, theirs[j].port, mine[i].nic)


def own_nics(
    nodes: Sequence[tuple[int, ...]], endpoints: Mapping[int, Endpoints]
) -> tuple[str, ...]:
    """Return the name of the NIC that each rank has for itself: of those that reach other hosts.

    Parameters
    ----------
    nodes : sequence of tuple of int
        The ranks of each host.
    endpoints : mapping
        Those of every rank, in order of use.
    """
    names = [""] * len(endpoints)
    for node in nodes:
        # The ranks of a host have the same networks, in an order of their own.
        others = [endpoints[other[0]] for other in nodes if other is not node]
        reached = {each.nic.network for theirs in others for each in theirs}
        for rank in node:
            found = [each.nic.name for each in endpoints[rank] if each.nic.network in reached]
            names[rank] = found[0] if found else endpoints[rank][0].nic.name
    return tuple(names)


def with_nics(levels: Levels, names: Sequence[str]) -> Levels:
    """Return `levels` with the NIC that each rank uses in place of those near it.

    Nodes with one NIC, and those whose NICs have other names, stay as they are.

    Parameters
    ----------
    levels : Levels
        The nodes.
    names : sequence of str
        As from `own_nics`.
    """
    return replace(levels, nodes=tuple(_with_nics(node, names) for node in levels.nodes))


def _with_nics(node: NodeLevel, names: Sequence[str]) -> NodeLevel:
    own = [names[rank] for rank in node.ranks]
    if len(node.nics) < 2 or not set(own) <= set(node.nic_names):
        return node
    return replace(node, rank_nics=tuple((node.nic_names.index(name),) for name in own))
