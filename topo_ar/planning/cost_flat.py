"""The cost of algorithms that know ranks only: rounds of messages that share ports and NICs."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from topo_ar.planning import recursion
from topo_ar.planning.contention import Flow, SharedPorts
from topo_ar.planning.level_bounds import RateKind, port_bandwidth
from topo_ar.planning.runtime import Runtime
from topo_ar.topology.levels import Levels


@dataclass(frozen=True, slots=True)
class Round:
    """What all ranks do at once before any goes on.

    Attributes
    ----------
    latency : float
        Seconds until a message of no bytes is there.
    local, network : float
        Seconds per byte of the buffer at the busiest port of a rank and at the busiest NICs or
        uplink, which are at work at the same time.
    adding : float
        Seconds per byte of the buffer for adding what arrived.
    """

    latency: float
    local: float
    network: float
    adding: float = 0

    def seconds(self, nbytes: float) -> float:
        """Return seconds for a buffer of `nbytes` bytes."""
        return self.latency + nbytes * (max(self.local, self.network) + self.adding)


Rounds = tuple[Round, ...]


def seconds_of(rounds: Rounds, nbytes: float) -> float:
    """Return seconds of one round after the other."""
    return sum(each.seconds(nbytes) for each in rounds)


class FlatRounds:
    """The rounds of each flat algorithm on given levels, ranks in the order of the nodes.

    Parameters
    ----------
    levels : Levels
        The cluster.
    rate : {"nominal", "payload"}
        Which rates count.
    runtime : Runtime
        What a message costs beside its port.
    """

    def __init__(self, levels: Levels, rate: RateKind, runtime: Runtime) -> None:
        self._runtime = runtime
        self._network = SharedPorts(levels, rate)
        self._sizes = [len(node.ranks) for node in levels.nodes]
        self._node_of = [i for i, size in enumerate(self._sizes) for _ in range(size)]
        self._world = levels.world_size
        shared = [node for node in levels.nodes if len(node.ranks) > 1]
        several = len(levels.nodes) > 1
        self._port = max((1 / port_bandwidth(node.intra, rate) for node in shared), default=0)
        self._hop = 1 / runtime.flat_bytes_per_s
        self._intra_alpha = max((node.intra.latency for node in shared), default=0)
        self._inter_alpha = (
            max(nic.latency for node in levels.nodes for nic in node.nics) if several else 0
        )

    def direct(self) -> Rounds:
        """Return reduce-scatter and all-gather in which every rank sends to every other.

        Each waits for one message and sends N-1 of ``S / N`` bytes; all ranks of a node share its
        NICs.
        """
        world, sizes = self._world, self._sizes
        runtime = self._runtime
        latency = self._inter_alpha or self._intra_alpha
        message = runtime.further_message_seconds(latency)
        latency += runtime.flat_hop_seconds + (world - 2) * message
        local = max((max(sizes) - 1) * self._port, (world - 1) * self._hop) / world
        network = self._network.all_to_all(sizes, sizes) / world if len(sizes) > 1 else 0
        gamma = (runtime.reduce_seconds_per_byte or 0) * (world - 1) / world
        return (Round(latency, local, network, gamma), Round(latency, local, network))

    def halving_doubling(self) -> Rounds:
        """Return recursive halving and doubling, nearest partners first.

        With N no power of two the ranks beyond the next lower one first give their buffer to a
        partner and get the result at the end.
        """
        rounds = [
            self._round(pairs, part) for pairs, part in recursion.rounds(self._world, halving=True)
        ]
        back = [Round(r.latency, r.local, r.network) for r in reversed(rounds)]
        return (*rounds, *back)

    def _round(self, messages: Sequence[tuple[int, int]], part: Fraction) -> Round:
        """Return the round in which each (sender, receiver) sends `part` of the buffer to add."""
        nodes = self._node_of
        crossing = [(nodes[a], nodes[b], 1) for a, b in messages if nodes[a] != nodes[b]]
        inside = len(crossing) < len(messages)
        alphas = [self._inter_alpha] * bool(crossing) + [self._intra_alpha] * inside
        return Round(
            latency=max(alphas) + self._runtime.flat_hop_seconds,
            local=part * max(self._port if inside else 0, self._hop),
            network=part * max(self._network.seconds(crossing), self._alone(crossing)),
            adding=part * (self._runtime.reduce_seconds_per_byte or 0),
        )

    def _alone(self, crossing: Sequence[Flow]) -> float:
        """Return seconds per byte of the slowest message, however idle the other NICs are."""
        slowest = min((self._network.one_rank[i] for i, _, _ in crossing), default=0)
        return 1 / slowest if slowest else 0
