"""The topology of a whole job, gathered from its ranks and the same on all of them."""

from collections.abc import Sequence

from topo_ar.execution.gather import Channel
from topo_ar.topology.merge import merge_hosts
from topo_ar.topology.model import Topology, from_json, to_json
from topo_ar.topology.probe import probe


def discover_job(channel: Channel, nodes: Sequence[tuple[int, ...]]) -> Topology:
    """Return the cluster topology of a job: the lowest rank of each node probes its host.

    Parameters
    ----------
    channel : Channel
        The ranks of the job.
    nodes : sequence of tuple of int
        The ranks of each host, as the co-location handshake found them.
    """
    node = next(node for node in nodes if channel.rank in node)
    mine = b""
    if channel.rank == node[0]:
        mine = to_json(probe(num_ranks=len(node)))
    gathered = channel.all_gather(mine)
    return merge_hosts([from_json(gathered[node[0]]) for node in nodes], nodes)
