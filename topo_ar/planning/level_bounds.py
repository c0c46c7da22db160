"""What no all-reduce can beat on two levels, and which port or cut says so.

The bounds hold for every algorithm that uses the ports named in the levels, in which ranks send,
receive and add, and switches only forward (no multicast, no addition inside a switch). All
arithmetic is generic: with rates given as ``fractions.Fraction`` the results are exact.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from topo_ar.errors import PlanError
from topo_ar.topology.levels import Levels, NodeLevel, Rack, Rate
from topo_ar.units import format_rate

RateKind = Literal["nominal", "payload"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound of one all-reduce in seconds, and the resource that sets it."""

    seconds: float
    bottleneck: str


def check_levels(levels: Levels) -> None:
    """Refuse levels that no plan can be made for.

    Raises
    ------
    PlanError
        If there are no ranks, if a rank is missing or named twice, if nodes cannot reach each
        other, or if a rate is not positive or a latency negative; the message names the node.
    """
    ranks = sorted(rank for node in levels.nodes for rank in node.ranks)
    if not ranks:
        raise PlanError("the topology has no ranks, so there is nothing to plan; give it ranks")
    if ranks != list(range(len(ranks))):
        raise PlanError(
            f"the nodes hold the ranks {ranks[:16]}, but together they must hold each of "
            f"0..{len(ranks) - 1} once; correct the topology's ranks"
        )
    for node in levels.nodes:
        if not node.ranks:
            raise PlanError(f"{node.name} has no ranks; leave it out of the topology")
        if len(levels.nodes) > 1 and not node.nics:
            raise PlanError(f"{node.name} has no NIC, so it cannot reach other nodes; add one")
        for what, rate in _named_rates(node):
            if not (rate.nominal > 0 and rate.payload > 0 and rate.latency >= 0):
                raise PlanError(
                    f"{node.name}'s {what} has rates of {rate.nominal:g} and {rate.payload:g} "
                    f"bytes/s and a latency of {rate.latency:g} s; rates must be positive, "
                    "latencies must not be negative"
                )
    for rack in levels.racks:
        if not (rack.uplink.nominal > 0 and rack.uplink.payload > 0):
            raise PlanError(
                f"{rack.name}'s uplinks have rates of {rack.uplink.nominal:g} and "
                f"{rack.uplink.payload:g} bytes/s; rates must be positive"
            )
    if levels.racks and sorted(i for r in levels.racks for i in r.nodes) != list(
        range(len(levels.nodes))
    ):
        raise PlanError("the racks must hold each node once; correct their nodes, or name no racks")


def _named_rates(node: NodeLevel) -> Iterator[tuple[str, Rate]]:
    if len(node.ranks) > 1:
        yield "rank port", node.intra
    for position, nic in enumerate(node.nics):
        yield f"NIC {position}", nic


def port_bandwidth(port: Rate, rate: RateKind) -> float:
    """Return the bytes/s that `port` carries in one direction."""
    return port.nominal if rate == "nominal" else port.payload


def node_bandwidth(node: NodeLevel, rate: RateKind) -> float:
    """Return what all NICs of `node` carry together, in bytes/s in one direction."""
    return sum(port_bandwidth(nic, rate) for nic in node.nics)


def all_reduce_lower_bound(
    levels: Levels, nbytes: int, rate: RateKind = "nominal", *, nvls: bool = False
) -> Bound:
    """Return a proven lower bound of an all-reduce of `nbytes` bytes.

    Two facts give every term. Through a cut with ranks on both sides at least `nbytes` must pass in
    each direction. And if the ranks are divided into k parts, each element needs at least 2(k-1)
    messages between parts, so that ``2 (k-1) nbytes`` bytes leave all parts together; with the
    nodes as parts this is ``2 (n-1) / n * nbytes / C`` for n equal nodes with C bytes/s of NICs
    each, with single ranks as parts ``2 (N-1) / N * nbytes / B``; racks as parts have what their
    uplinks carry. Latency is left out.

    Where a node has islands, a rank is taken to drive the port of its island and the one across
    islands at once. The islands give no term of their own: the levels hold the rate of their
    slowest port only.

    Parameters
    ----------
    levels : Levels
        The nodes with their ports.
    nbytes : int
        Size of each rank's buffer.
    rate : {"nominal", "payload"}
        Data-sheet rates, or what a payload gets.
    nvls : bool
        Whether the switches inside nodes multicast and add (NVLink SHARP): ranks are then no parts
        of their own, since a rank may send and receive each element once.

    Raises
    ------
    PlanError
        If the levels contradict themselves.
    """
    check_levels(levels)
    if levels.world_size == 1:
        return Bound(0.0, "nothing: one rank has nobody to talk to")
    terms = list(_cuts(levels, rate))
    if not nvls or len(levels.nodes) > 1:
        terms.append(_heaviest_partition(levels, rate, divide=not nvls))
    best_weight, best_name = max(terms, key=lambda term: term[0])
    return Bound(nbytes * best_weight, best_name)


def latency_bound(world_size: int, alpha: float) -> float:
    """Return the seconds that no all-reduce is below for its messages alone.

    After k messages in a row a rank knows of at most 2^k ranks, so that ``ceil(log2 N)`` messages
    of `alpha` seconds each must follow one another.

    Raises
    ------
    PlanError
        If there is no rank or the latency is negative.
    """
    if world_size < 1 or not alpha >= 0:
        raise PlanError(
            f"{world_size} ranks and a latency of {alpha:g} s bound nothing; there must be a rank, "
            "and latencies must not be negative"
        )
    return (world_size - 1).bit_length() * alpha


def reduction_bound(world_size: int, nbytes: int, gamma: float) -> float:
    """Return the seconds that no all-reduce is below for its additions alone.

    Of N buffers N - 1 must be added, in ranks only, which share the work at best evenly:
    ``(N - 1) / N * nbytes * gamma``, with `gamma` seconds for each byte added.

    Raises
    ------
    PlanError
        If there is no rank, or a size or `gamma` is negative.
    """
    if world_size < 1 or nbytes < 0 or not gamma >= 0:
        raise PlanError(
            f"{world_size} ranks, {nbytes} bytes and {gamma:g} s for each byte bound nothing; "
            "there must be a rank, and sizes and times must not be negative"
        )
    return (world_size - 1) * nbytes * gamma / world_size


def _cuts(levels: Levels, rate: RateKind) -> Iterator[tuple[float, str]]:
    """Seconds per byte of every single node, rack, and of one rank of every node."""
    nodes = levels.nodes
    alike = _all_alike(nodes, rate)
    for node in nodes if len(nodes) > 1 else ():
        owner = "each node" if alike else node.name
        yield 1 / node_bandwidth(node, rate), f"{owner}'s NICs ({_describe(node.nics, rate)})"
    for rack in levels.racks:
        uplink = port_bandwidth(rack.uplink, rate)
        yield 1 / uplink, f"the uplinks of {rack.name} ({format_rate(float(uplink))} together)"
    for node in nodes:
        if len(node.ranks) > 1:
            # A rank may drive every NIC of its node by itself: counting them all keeps this safe.
            out = _rank_bandwidth(node, rate) + (
                node_bandwidth(node, rate) if len(nodes) > 1 else 0
            )
            port = format_rate(float(port_bandwidth(node.intra, rate)))
            yield 1 / out, f"the port of one rank in {node.name} ({port})"


def _rank_bandwidth(node: NodeLevel, rate: RateKind) -> float:
    """Return what one rank of `node` sends to the others of its node, in bytes/s."""
    inside = port_bandwidth(node.island, rate) if node.island is not None else 0
    return port_bandwidth(node.intra, rate) + inside


@dataclass(frozen=True, slots=True)
class _Partition:
    """Racks that are one part each, and of the other racks' nodes those of one part for each rank.

    `nodes` are all nodes of the other racks.
    """

    racks: tuple[Rack, ...]
    nodes: tuple[NodeLevel, ...]
    divided: tuple[NodeLevel, ...]

    def quotient(self, rate: RateKind, *, network: bool) -> float:
        """Return ``2 (parts - 1) / (bytes/s out of all parts)``."""
        ports = sum(len(node.ranks) * _rank_bandwidth(node, rate) for node in self.divided)
        uplinks = sum(port_bandwidth(rack.uplink, rate) for rack in self.racks)
        nics = sum(node_bandwidth(node, rate) for node in self.nodes) if network else 0
        extra = sum(len(node.ranks) - 1 for node in self.divided)
        return 2 * (len(self.racks) + len(self.nodes) + extra - 1) / (nics + uplinks + ports)


def _heaviest_partition(levels: Levels, rate: RateKind, *, divide: bool) -> tuple[float, str]:
    """Maximise ``2 (parts - 1) / (bytes/s out of all parts)``.

    Every rack is either one part or divided into nodes, and every node of a divided rack is one
    part or as many as it has ranks (leaving out some of its ranks is never heavier). The choices
    are independent for a given quotient, so that Dinkelbach's iteration ends at the exact maximum
    after a few rounds. Without `divide` nodes stay whole.
    """
    nodes = levels.nodes
    network = len(nodes) > 1
    chosen = _Partition((), nodes, () if network else nodes)
    best = chosen.quotient(rate, network=network)
    while True:
        wanted = _wanted(levels, best, rate, divide=divide)
        value = wanted.quotient(rate, network=network)
        if value <= best:
            return best, _describe_partition(levels, chosen, rate)
        best, chosen = value, wanted


def _wanted(levels: Levels, best: float, rate: RateKind, *, divide: bool) -> _Partition:
    """Return the parts of the largest ``2 parts - best * (bytes/s out of them)``."""
    nodes = levels.nodes
    gains = [
        2 * (len(node.ranks) - 1) - best * len(node.ranks) * _rank_bandwidth(node, rate)
        if divide and len(node.ranks) > 1
        else 0
        for node in nodes
    ]
    whole = []
    for rack in levels.racks:
        split = sum(
            2 - best * node_bandwidth(nodes[i], rate) + max(gains[i], 0) for i in rack.nodes
        )
        if 2 - best * port_bandwidth(rack.uplink, rate) > split:
            whole.append(rack)
    closed = {i for rack in whole for i in rack.nodes}
    opened = [i for i in range(len(nodes)) if i not in closed]
    divided = tuple(nodes[i] for i in opened if gains[i] > 0 or len(nodes) == 1)
    return _Partition(tuple(whole), tuple(nodes[i] for i in opened), divided)


def _describe_partition(levels: Levels, partition: _Partition, rate: RateKind) -> str:
    nodes, divided = partition.nodes, partition.divided
    nics = [nic for node in nodes for nic in node.nics] if len(levels.nodes) > 1 else []
    uplinks = _describe((rack.uplink for rack in partition.racks), rate)
    racked = f"uplinks of {len(partition.racks)} racks ({uplinks})" if partition.racks else ""
    if not nodes:
        return f"the {racked} together"
    if not divided:
        whose = f"{len(nodes)} nodes and the {racked}" if racked else "all nodes"
        return f"the NICs of {whose} together ({_describe(nics, rate)})"
    ports = _describe((node.intra for node in divided for _ in node.ranks), rate)
    everywhere = len(divided) == len(levels.nodes) > 1
    where = "all nodes" if everywhere else ", ".join(n.name for n in divided)
    network = f", NICs {_describe(nics, rate)}" if nics else ""
    network += f", {racked}" if racked else ""
    return f"the ports of the ranks in {where} (inside {ports}{network})"


def _describe(rates: Iterable[Rate], kind: RateKind) -> str:
    counts = Counter(float(port_bandwidth(rate, kind)) for rate in rates)
    return " + ".join(f"{count} x {format_rate(value)}" for value, count in counts.items())


def _all_alike(nodes: tuple[NodeLevel, ...], rate: RateKind) -> bool:
    return len({_describe(node.nics, rate) for node in nodes}) == 1


def share_limits(bandwidths: Sequence[Fraction | float]) -> tuple[Fraction, tuple[Fraction, ...]]:
    """Return the least seconds per byte of nodes with unequal NICs, and how much each may root.

    Each element has a root node, which sums it and sends it out again. A node that roots the share
    w of S bytes sends and receives ``S (1 + w (n - 2))`` bytes: its own part of what others root,
    and what it roots to and from n - 1 others. Hence, with C the nodes' bandwidths,
    ``T / S = max(1 / min C, 2 (n - 1) / sum C)``, reached by any shares of which none is above its
    limit ``(C_i T / S - 1) / (n - 2)``. The limits sum to 1 or more. With two nodes (or one) every
    share will do, and each limit is 1.

    Parameters
    ----------
    bandwidths : sequence of int, Fraction or float
        What all NICs of each node carry together, in bytes/s in one direction. A float is taken
        as the exact binary number that it is.

    Raises
    ------
    PlanError
        If there are no nodes or a bandwidth is not positive.
    """
    if not bandwidths:
        raise PlanError("there are no nodes to share the buffer; name the bandwidth of each node")
    for position, bandwidth in enumerate(bandwidths):
        if not 0 < bandwidth < math.inf:
            raise PlanError(
                f"node {position} has NICs of {float(bandwidth):g} bytes/s in all; "
                "the bandwidth of a node must be positive and finite"
            )
    capacities = [Fraction(bandwidth) for bandwidth in bandwidths]
    count = len(capacities)
    if count == 1:
        return Fraction(0), (Fraction(1),)
    slowest, total = min(capacities), sum(capacities, Fraction(0))
    seconds = max(Fraction(1) / slowest, Fraction(2 * (count - 1)) / total)
    if count == 2:
        return seconds, (Fraction(1),) * 2
    return seconds, tuple((capacity * seconds - 1) / (count - 2) for capacity in capacities)


def node_shares(bandwidths: Sequence[Fraction | float]) -> tuple[Fraction, ...]:
    """Return which share of the buffer each node should root; the shares sum to exactly 1.

    The shares respect `share_limits`, so that they reach its time, and are as equal as the limits
    allow: if equal shares are optimal already, they are what is returned. A share may be 0.

    Raises
    ------
    PlanError
        If there are no nodes or a bandwidth is not positive.
    """
    _, limits = share_limits(bandwidths)
    shares = [Fraction(0)] * len(limits)
    left = Fraction(1)
    ascending = sorted(range(len(limits)), key=limits.__getitem__)
    for done, position in enumerate(ascending):
        shares[position] = min(limits[position], left / (len(limits) - done))
        left -= shares[position]
    return tuple(shares)
