"""The ranks of a job: who shares a host with whom, and the ways between them."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from topo_ar.errors import ExecutionError
from topo_ar.execution.bootstrap import Bootstrap
from topo_ar.execution.gather import Channel, find_colocated
from topo_ar.execution.network import Nic, local_nics
from topo_ar.execution.nics import Endpoint, in_order_of_use, own_nics, way
from topo_ar.execution.reach import peers_of
from topo_ar.execution.transports.rendezvous import NONCE_NBYTES, connect, listen
from topo_ar.execution.transports.segment import Owned
from topo_ar.execution.transports.shm import Node, ordered_stores
from topo_ar.execution.transports.tcp import Flow
from topo_ar.topology.levels import levels
from topo_ar.topology.model import Topology

logger = logging.getLogger("topo_ar")

_SETUP_TIMEOUT_S = 60.0
_RECONNECT_TIMEOUT_S = 5.0
# Who waits for an agreement hears in time from those whose collective comes to its deadline.
_CONTROL_PATIENCE = 1.15
_CONTROL_PATIENCE_S = 3.0


class _Announcement(msgspec.Struct, frozen=True):
    """Where a rank listens, in order of use, and a nonce: that of rank 0 is the job's."""

    endpoints: tuple[Endpoint, ...]
    nonce: bytes


class Job:
    """One rank's view of a job. Making one is collective over the ranks of `bootstrap`.

    It is whole when `connect` was called.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks.
    timeout_s : float
        Deadline of operations on the channel.
    slot_nbytes : int
        Capacity of a slot of shared memory.

    Attributes
    ----------
    channel : Channel
        All ranks, for set-up and the plain path.
    control : Channel or None
        All ranks, to agree on leaving the fast path; None before `open_control`.
    nodes : tuple of tuple of int
        The ranks of each host.
    node : Node
        The ranks of this host.
    flows : dict
        A connection to each rank of other hosts that `reach.peers_of` names.
    nics : tuple of str
        The name of the NIC that each rank has for itself, see `own_nics`.
    plain_reason : str or None
        Why every collective has to take the plain path; None when they need not.

    Raises
    ------
    ConfigError
        If ``GLOO_SOCKET_IFNAME`` is not usable.
    ExecutionError
        If the ranks do not meet.
    """

    def __init__(self, bootstrap: Bootstrap, timeout_s: float, slot_nbytes: int) -> None:
        self._bootstrap, self._timeout_s = bootstrap, timeout_s
        with ExitStack() as undo:
            self.channel = Channel(bootstrap, timeout_s)
            undo.callback(self.channel.close)
            owned = Owned(slot_nbytes)
            undo.callback(owned.close)
            colocation = find_colocated(self.channel, owned)
            for peer in colocation.peers.values():
                undo.callback(peer.close)
            self.nodes = colocation.nodes
            self.plain_reason = self._why_plain()
            self.control: Channel | None = None
            rank = self.channel.rank
            mine = next(node for node in self.nodes if rank in node)
            self.node = Node(mine, rank, owned, colocation.peers)
            self.flows: dict[int, Flow] = {}
            self.nics: tuple[str, ...] = ()
            self._nics: tuple[Nic, ...] = ()
            self._undo = undo.pop_all()

    def _why_plain(self) -> str | None:
        if self.channel.world_size == 1:
            return "there is one rank"
        if not ordered_stores():
            return "this processor does not keep the order of stores that shared counters need"
        return None

    def open_control(self) -> Channel:
        """Make `control` and return it. Collective.

        Raises
        ------
        ExecutionError
            If the ranks do not meet.
        """
        timeout_s = _CONTROL_PATIENCE * self._timeout_s + _CONTROL_PATIENCE_S
        self.control = Channel(self._bootstrap, timeout_s, "control")
        self._undo.callback(self.control.close)
        return self.control

    def connect(self, topology: Topology) -> None:
        """Connect this rank with those of other hosts. Collective.

        Parameters
        ----------
        topology : Topology
            Of the job; says which NIC is near to which rank.

        Raises
        ------
        ConfigError
            If the environment names an interface that is not usable.
        ExecutionError
            If ranks cannot reach each other.
        """
        # On the plain path no data takes these flows, but the news of a dead rank does.
        if self.plain_reason is not None:
            logger.info("plain all-reduce for everything: %s", self.plain_reason)
        node, rank = self.node, self.channel.rank
        self._nics = local_nics(rank, warn=node.local_rank == 0)
        if len(self._nics) > 1:
            level = next((n for n in levels(topology).nodes if rank in n.ranks), None)
            self._nics = in_order_of_use(self._nics, level, rank, node.local_rank)
        self.nics = own_nics(
            self.nodes, self._meet(self.channel, _SETUP_TIMEOUT_S, self._bootstrap.look)
        )

    def reconnect(self) -> bool:
        """Make the flows anew after a failure: news of dead ranks takes them. Collective.

        Return False, on all ranks, where not all of them could be made, and there are none.

        Raises
        ------
        ExecutionError
            If `control` is at its end.
        """
        assert self.control is not None
        self.flows = {}
        made = True
        try:
            self._meet(self.control, _RECONNECT_TIMEOUT_S)
        except (ExecutionError, OSError, MemoryError) as error:
            logger.info("flows are not made again: %s", error)
            made = False
        if all(each for (each,) in self.control.all_gather_words([made])):
            return True
        for flow in self.flows.values():
            flow.close()
        self.flows = {}
        return False

    def _meet(
        self, channel: Channel, timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> dict[int, tuple[Endpoint, ...]]:
        """Connect with the ranks of other hosts; return where every rank listens."""
        rank, nics = channel.rank, self._nics
        with ExitStack() as listening:
            listeners = [listening.enter_context(listen(nic)) for nic in nics]
            mine = _Announcement(
                tuple(
                    Endpoint(nic, listener.getsockname()[1])
                    for nic, listener in zip(nics, listeners, strict=True)
                ),
                os.urandom(NONCE_NBYTES),
            )
            announced = [
                msgspec.json.decode(data, type=_Announcement)
                for data in channel.all_gather(msgspec.json.encode(mine))
            ]
            ways = {
                peer: way(mine.endpoints, announced[peer].endpoints)
                for peer in peers_of(self.nodes, rank)
            }
            self.flows = connect(listeners, rank, ways, announced[0].nonce, timeout_s, look)
        for flow in self.flows.values():
            self._undo.callback(flow.close)
        return {peer: each.endpoints for peer, each in enumerate(announced)}

    def cut(self) -> None:
        """Close the groups, so that ranks which wait in them learn that this one has failed."""
        for channel in (self.channel, self.control):
            if channel is not None:
                channel.close()

    def close(self) -> None:
        """Close every connection and release the memory; for once, by who used them last."""
        # Who still waits for this rank learns of it here; a group may wait for its deadline.
        for flow in self.flows.values():
            flow.close()
        self._undo.close()
