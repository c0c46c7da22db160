"""Which vertices of a network form one machine, and the coarse all-reduce bound of its ports."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from topo_ar.planning.network import Network


def machines(network: Network) -> list[int]:
    """Return a number for the machine of each vertex, -1 for what is in none.

    A machine is what the attribute ``node`` names. Without one anywhere, it is what falls apart
    when the switches with the most links are taken away.
    """
    if any(name is not None for name in network.machines):
        numbers: dict[Hashable, int] = {}
        return [
            -1 if name is None else numbers.setdefault(name, len(numbers))
            for name in network.machines
        ]
    neighbours: list[set[int]] = [set() for _ in network.names]
    for tail, head in zip(network.tails, network.heads, strict=True):
        neighbours[tail].add(head)
        neighbours[head].add(tail)
    held = frozenset(network.ranks)
    degrees = {len(near) for v, near in enumerate(neighbours) if v not in held}
    for degree in sorted(degrees, reverse=True)[:4]:
        cut = {v for v, near in enumerate(neighbours) if v not in held and len(near) >= degree}
        parts = _components(neighbours, cut)
        if len({parts[rank] for rank in network.ranks}) > 1:
            return parts
    return [-1] * len(network.names)


def _components(neighbours: list[set[int]], without: set[int]) -> list[int]:
    parts = [-1] * len(neighbours)
    count = 0
    for start in range(len(neighbours)):
        if parts[start] >= 0 or start in without:
            continue
        parts[start], pending = count, [start]
        while pending:
            for there in neighbours[pending.pop()]:
                if parts[there] < 0 and there not in without:
                    parts[there] = count
                    pending.append(there)
        count += 1
    return parts


@dataclass(frozen=True, slots=True)
class Ports:
    """A rate in units of the network, and the ports that allow no more.

    `side` holds the vertices that the edges of the heaviest cut lead away from, `links` all edges
    that limit.
    """

    rate: Fraction
    side: frozenset[int]
    links: tuple[int, ...]


def all_reduce_cut(network: Network, special: frozenset[int]) -> Ports:
    """Return the rate that the ports of ranks and machines allow.

    The whole buffer must leave, and enter, every set that holds some of the ranks and not all. And
    if disjoint sets, k in all, hold all ranks, each element needs 2 (k - 1) messages between them,
    unless a switch of `special`, which copies or adds, lies outside of them. Of equal rates the
    first is kept, ranks before machines.
    """
    labels = machines(network)
    ranks = {rank: number for number, rank in enumerate(network.ranks)}
    single = [ranks.get(vertex, -1) for vertex in range(len(network.names))]
    terms = [*_port_terms(network, single, special), *_port_terms(network, labels, special)]
    return min(terms, key=lambda ports: ports.rate)


def _port_terms(network: Network, labels: list[int], special: frozenset[int]) -> Iterator[Ports]:
    members: dict[int, list[int]] = {}
    for vertex, label in enumerate(labels):
        members.setdefault(label, []).append(vertex)
    holding = {labels[rank] for rank in network.ranks}
    if len(holding) == 1:
        return
    every = frozenset(range(len(labels)))
    together = []
    for near, far in ((network.tails, network.heads), (network.heads, network.tails)):
        ports: dict[int, list[int]] = {label: [] for label in sorted(holding - {-1})}
        for edge, (inside, outside) in enumerate(zip(near, far, strict=True)):
            label = labels[inside]
            if label in ports and label != labels[outside]:
                ports[label].append(edge)
        rates = {label: _rate(network, edges) for label, edges in ports.items()}
        limited = {label: rate for label, rate in rates.items() if rate is not None}
        if not limited:
            continue
        label = min(limited, key=limited.__getitem__)
        part = frozenset(members[label])
        side = part if near is network.tails else every - part
        yield Ports(Fraction(limited[label]), side, tuple(ports[label]))
        if len(limited) == len(holding):
            all_ports = tuple(edge for edges in ports.values() for edge in edges)
            rate = Fraction(sum(limited.values()), 2 * (len(holding) - 1))
            together.append(Ports(rate, side, all_ports))
    if all(labels[switch] in holding for switch in special):
        yield from together


def _rate(network: Network, edges: list[int]) -> int | None:
    """Return what `edges` carry together, None without a limit."""
    total = 0
    for edge in edges:
        capacity = network.capacities[edge]
        if capacity is None:
            return None
        total += capacity
    return total
