"""How long flows between nodes take that share NICs, and uplinks of racks."""

from collections.abc import Iterable, Sequence

from topo_ar.planning.level_bounds import RateKind, node_bandwidth, port_bandwidth
from topo_ar.topology.levels import Levels

# From node, to node, how much; nodes are positions in `Levels.nodes`.
Flow = tuple[int, int, float]


class SharedPorts:
    """The NICs of all nodes and the uplinks of all racks; what lies behind them never blocks.

    Parameters
    ----------
    levels : Levels
        Nodes and racks.
    rate : {"nominal", "payload"}
        Which rates count.
    bandwidths : sequence of float, optional
        What leaves each node, in bytes/s, where it is not the sum of its NICs.

    Attributes
    ----------
    rack_of : list of int
        The rack of each node; empty where there are none.
    one_rank : list of float
        Bytes/s that one rank of each node can fill alone: a NIC, or its even part of them all.
    """

    def __init__(
        self, levels: Levels, rate: RateKind, bandwidths: Sequence[float] | None = None
    ) -> None:
        self._count = len(levels.nodes)
        if bandwidths is None:
            bandwidths = [node_bandwidth(node, rate) for node in levels.nodes]
        self.bandwidths = bandwidths
        self.one_rank = [
            max(bandwidth / len(node.ranks), *(port_bandwidth(nic, rate) for nic in node.nics))
            if node.nics
            else 0
            for node, bandwidth in zip(levels.nodes, bandwidths, strict=True)
        ]
        self.uplinks = [port_bandwidth(rack.uplink, rate) for rack in levels.racks]
        self.rack_of = [0] * self._count if levels.racks else []
        for number, rack in enumerate(levels.racks):
            for node in rack.nodes:
                self.rack_of[node] = number

    def seconds(self, flows: Iterable[Flow]) -> float:
        """Return how long the busiest NICs or uplink need for all flows at once, full duplex."""
        sent: list[float] = [0] * self._count
        received: list[float] = [0] * self._count
        up: list[float] = [0] * len(self.uplinks)
        down: list[float] = [0] * len(self.uplinks)
        for here, there, amount in flows:
            sent[here] += amount
            received[there] += amount
            if self.rack_of and self.rack_of[here] != self.rack_of[there]:
                up[self.rack_of[here]] += amount
                down[self.rack_of[there]] += amount
        return max(
            busiest(sent, self.bandwidths),
            busiest(received, self.bandwidths),
            busiest(up, self.uplinks),
            busiest(down, self.uplinks),
        )

    def all_to_all(self, senders: Sequence[float], shares: Sequence[float]) -> float:
        """Return how long it takes when every sender sends each node's share to that node.

        ``senders[i]`` are in node i, and each sends ``shares[j]`` to node j; what stays inside a
        node is not counted. Time grows with the nodes, not with their pairs.
        """
        held: list[float] = [0] * len(self.uplinks)
        inside: list[float] = [0] * len(self.uplinks)
        for node, rack in enumerate(self.rack_of):
            inside[rack] += senders[node]
            held[rack] += shares[node]
        return max(
            _all_to_all(senders, shares, self.bandwidths),
            _all_to_all(inside, held, self.uplinks) if self.uplinks else 0,
        )

    def reduce_and_share(self, shares: Sequence[float]) -> float:
        """Return how long the busiest port is at work when every node roots its share.

        Node i sends what others root and, later, what it roots to all others: a share w of a whole
        of 1 means ``(1 - w) + (n - 1) w`` in each direction, a rack of r nodes with the share W
        ``r (1 - W) + (n - r) W``. Both phases overlap, as they do over many chunks.
        """
        count, whole = self._count, sum(shares)
        sent = [(whole - share) + (count - 1) * share for share in shares]
        up: list[float] = []
        for number in range(len(self.uplinks)):
            own = [node for node, rack in enumerate(self.rack_of) if rack == number]
            held = sum(shares[node] for node in own)
            up.append(len(own) * (whole - held) + (count - len(own)) * held)
        return max(busiest(sent, self.bandwidths), busiest(up, self.uplinks))


def _all_to_all(senders: Sequence[float], shares: Sequence[float], rates: Sequence[float]) -> float:
    all_senders, whole = sum(senders), sum(shares)
    sent = [each * (whole - share) for each, share in zip(senders, shares, strict=True)]
    received = [(all_senders - each) * share for each, share in zip(senders, shares, strict=True)]
    return max(busiest(sent, rates), busiest(received, rates))


def busiest(loads: Sequence[float], rates: Sequence[float]) -> float:
    """Return the longest of ``load / rate``; 0 where nothing is carried."""
    return max((load / rate for load, rate in zip(loads, rates, strict=True) if load), default=0)
