"""The ranks of a job: who shares a host with whom, and the ways between them."""

import logging
from contextlib import ExitStack

import msgspec
import torch.distributed as dist

from topo_ar.execution.gather import Channel, agree_on_nonce, find_colocated
from topo_ar.execution.reach import peers_of
from topo_ar.execution.transports.rendezvous import connect, listen
from topo_ar.execution.transports.segment import Owned
from topo_ar.execution.transports.shm import Node, ordered_stores
from topo_ar.execution.transports.tcp import Flow

logger = logging.getLogger("topo_ar")

_SETUP_TIMEOUT_S = 60.0
# Who waits for an agreement hears in time from those whose collective comes to its deadline.
_CONTROL_PATIENCE = 1.15
_CONTROL_PATIENCE_S = 3.0


class Job:
    """One rank's view of a job. Making one is collective over the ranks of `group`.

    Parameters
    ----------
    group : ProcessGroup or None
        The ranks; None for the default group.
    timeout_s : float
        Deadline of operations on the channel.
    slot_nbytes : int
        Capacity of a slot of shared memory.

    Attributes
    ----------
    channel : Channel
        All ranks, for set-up and the plain path.
    control : Channel or None
        All ranks, to agree on leaving the fast path; None where there is none.
    nodes : tuple of tuple of int
        The ranks of each host.
    node : Node
        The ranks of this host.
    flows : dict
        A connection to each rank of other hosts that `reach.peers_of` names.
    plain_reason : str or None
        Why every collective has to take the plain path; None when they need not.

    Raises
    ------
    ConfigError
        If this rank is not in `group`, or ``GLOO_SOCKET_IFNAME`` is not usable.
    ExecutionError
        If ranks cannot reach each other.
    """

    def __init__(
        self, group: "dist.ProcessGroup | None", timeout_s: float, slot_nbytes: int
    ) -> None:
        with ExitStack() as undo:
            self.channel = Channel(group, timeout_s)
            undo.callback(self.channel.close)
            owned = Owned(slot_nbytes)
            undo.callback(owned.close)
            colocation = find_colocated(self.channel, owned)
            for peer in colocation.peers.values():
                undo.callback(peer.close)
            self.nodes = colocation.nodes
            self.plain_reason = self._why_plain()
            self.control = None
            if self.plain_reason is None:
                patience_s = _CONTROL_PATIENCE * timeout_s + _CONTROL_PATIENCE_S
                self.control = Channel(group, patience_s)
                undo.callback(self.control.close)
            rank = self.channel.rank
            mine = next(node for node in self.nodes if rank in node)
            self.node = Node(mine, rank, owned, colocation.peers)
            self.flows = self._connect()
            for flow in self.flows.values():
                undo.callback(flow.close)
            self._undo = undo.pop_all()

    def _why_plain(self) -> str | None:
        if self.channel.world_size == 1:
            return "there is one rank"
        if not ordered_stores():
            return "this processor does not keep the order of stores that shared counters need"
        return None

    def _connect(self) -> dict[int, Flow]:
        # On the plain path no data takes these flows, but the news of a dead rank does.
        if self.plain_reason is not None:
            logger.info("plain all-reduce for everything: %s", self.plain_reason)
        channel = self.channel
        peers = peers_of(self.nodes, channel.rank)
        nonce = agree_on_nonce(channel)
        with listen(channel.address) as listener:
            announced = channel.all_gather(
                msgspec.json.encode((channel.address, listener.getsockname()[1]))
            )
            addresses = {
                peer: msgspec.json.decode(announced[peer], type=tuple[str, int]) for peer in peers
            }
            return connect(listener, channel.rank, peers, addresses, nonce, _SETUP_TIMEOUT_S)

    def cut(self) -> None:
        """Close the groups, so that ranks which wait in them learn that this one has failed."""
        for channel in (self.channel, self.control):
            if channel is not None:
                channel.close()

    def close(self) -> None:
        """Close every connection and release the memory; for once, by who used them last."""
        self._undo.close()
