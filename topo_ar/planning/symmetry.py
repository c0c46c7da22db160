"""Which vertices of a network may change places, and the network as one rank sees it.

The group is read off the structure: machines with the same insides and the same links outwards may
be swapped, and so may racks with the same machines. (A rack is a switch with the machines that are
linked to it alone.) The bounds are optima of convex problems on which this group acts: averaging a
solution over the group gives one as good that treats the members of an orbit alike, so that one
variable per orbit and one flow per orbit of ranks lose nothing. And a flow to one rank may be
averaged over the swaps that leave this rank alone: for it the network folds, and all machines of a
kind except its own become one machine with their links added up.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from topo_ar.planning.machines import machines
from topo_ar.planning.network import Network

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The network folded as far as the flow to one rank allows.

    ``class_of[v]`` is the class of vertex v, `sink` that of the rank. Folded edge k leads from
    class ``tails[k]`` to ``heads[k]``. ``pairs`` holds, for each kind of edges, which folded edge
    it is part of (`folded`), which orbit it is of (`orbit`), and of how many edges (`count`);
    ``sources`` the same of the ranks' orbits in classes, the sink left out.
    """

    sink: int
    class_of: Ints
    num_classes: int
    tails: Ints
    heads: Ints
    folded: Ints
    orbit: Ints
    count: Ints
    sources: tuple[Ints, Ints, Ints]


@dataclass(frozen=True, slots=True, eq=False)
class Symmetry:
    """Orbits of edges and ranks; one view for each orbit of ranks.

    Attributes
    ----------
    edge_orbit : array of int
        The orbit of each edge; ``edge_sizes`` counts each orbit's edges, ``edge_first`` names one.
    rank_orbit : array of int
        The orbit of each vertex that holds a rank, -1 for the others; ``rank_sizes`` counts.
    vertex_orbit : array of int
        The orbit of each vertex.
    views : tuple of View
        The view of the first rank of each orbit, in the order of the orbits.
    """

    edge_orbit: Ints
    edge_sizes: Ints
    edge_first: Ints
    rank_orbit: Ints
    rank_sizes: Ints
    vertex_orbit: Ints
    views: tuple[View, ...]

    @property
    def trivial(self) -> bool:
        """Whether every rank is alone in its orbit."""
        return len(self.views) == int(self.rank_sizes.sum())


@dataclass(slots=True)
class _Places:
    """Machine, rack, kind of machine, kind of rack and position of every vertex."""

    machine: list[int]
    rack: list[int]
    machine_kind: list[int] = field(default_factory=list)
    rack_kind: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)


def find_symmetry(network: Network, special: Sequence[frozenset[int]] = ()) -> Symmetry:
    """Return the orbits of `network`; vertices in different sets of `special` stay apart.

    Time and memory grow linearly with the edges, times the number of orbits of ranks.
    """
    places = _places(network, special)
    keys = np.array([places.rack_kind, places.machine_kind, places.position], dtype=np.int64)
    vertex_orbit = _codes(keys)
    tails, heads = np.array(network.tails), np.array(network.heads)
    edge_orbit, edge_first = _first_codes(np.array([vertex_orbit[tails], vertex_orbit[heads]]))
    ranks = np.array(network.ranks)
    by_rank, first = _first_codes(vertex_orbit[ranks][None, :])
    rank_orbit = np.full(len(network.names), -1)
    rank_orbit[ranks] = by_rank
    return Symmetry(
        edge_orbit=edge_orbit,
        edge_sizes=np.bincount(edge_orbit),
        edge_first=edge_first,
        rank_orbit=rank_orbit,
        rank_sizes=np.bincount(by_rank),
        vertex_orbit=vertex_orbit,
        views=tuple(
            _view(int(ranks[position]), places, keys, tails, heads, edge_orbit, rank_orbit)
            for position in first
        ),
    )


def _view(
    rank: int,
    places: _Places,
    keys: Ints,
    tails: Ints,
    heads: Ints,
    edge_orbit: Ints,
    rank_orbit: Ints,
) -> View:
    vertices = np.arange(len(rank_orbit))
    machine, rack = np.array(places.machine), np.array(places.rack)
    same_rack = rack == rack[rank]
    own = (machine == machine[rank]) & (machine >= 0) | (vertices == rank)
    # What stays apart: each vertex of its own machine, and its own rack from racks of its kind.
    class_of = _codes(np.array([*keys, np.where(own, vertices + 1, 0), same_rack]))
    num_classes = int(class_of.max()) + 1
    ends = class_of[tails] * num_classes + class_of[heads]
    between = class_of[tails] != class_of[heads]
    num_orbits = int(edge_orbit.max()) + 1
    kinds, count = np.unique(ends[between] * num_orbits + edge_orbit[between], return_counts=True)
    folded_ends, folded = np.unique(kinds // num_orbits, return_inverse=True)
    sending = (rank_orbit >= 0) & (vertices != rank)
    num_rank_orbits = int(rank_orbit.max()) + 1
    supplies, supply_count = np.unique(
        class_of[sending] * num_rank_orbits + rank_orbit[sending], return_counts=True
    )
    return View(
        sink=int(class_of[rank]),
        class_of=class_of,
        num_classes=num_classes,
        tails=folded_ends // num_classes,
        heads=folded_ends % num_classes,
        folded=folded,
        orbit=kinds % num_orbits,
        count=count,
        sources=(supplies // num_rank_orbits, supplies % num_rank_orbits, supply_count),
    )


def _codes(keys: Ints) -> Ints:
    """Return a number for each column of `keys`, equal for equal columns."""
    return np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)


def _first_codes(keys: Ints) -> tuple[Ints, Ints]:
    """Return a number for each column, in order of first appearance, and where each appears."""
    _, first, codes = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    order = np.argsort(first)
    renumber = np.empty_like(order)
    renumber[order] = np.arange(len(order))
    return renumber[codes.reshape(-1)], first[order]


def _places(network: Network, special: Sequence[frozenset[int]]) -> _Places:
    machine = machines(network)
    links = _links(network)
    places = _Places(machine, _racks(network, machine, links))
    members: dict[int, list[int]] = {}
    for vertex, label in enumerate(machine):
        members.setdefault(label, []).append(vertex)
    position = {v: i for label, group in members.items() if label >= 0 for i, v in enumerate(group)}
    held = frozenset(network.ranks)
    marks = [frozenset(held), *special]

    def mark(vertex: int) -> tuple[bool, ...]:
        return tuple(vertex in group for group in marks)

    def outside(vertex: int, label: int, rack: int) -> Hashable:
        if machine[vertex] == label >= 0:
            return (0, position[vertex])
        return (1, 0) if vertex == rack else (2, vertex)

    kinds: dict[Hashable, int] = {}
    kind_of = {}
    inside: dict[int, Counter[int]] = {}
    for label, group in members.items():
        if label < 0:
            continue
        rack = places.rack[group[0]]
        insides = tuple(
            (mark(v), tuple(sorted((outside(w, label, rack), *link) for w, *link in links[v])))
            for v in group
        )
        kind_of[label] = kinds.setdefault((rack >= 0, insides), len(kinds))
        inside.setdefault(rack, Counter())[kind_of[label]] += 1
    rack_kind = {-1: -1}
    for rack, counted in inside.items():
        if rack >= 0:
            up = sorted(
                (w, *link) for w, *link in links[rack] if places.rack[w] != rack or machine[w] < 0
            )
            key = (mark(rack), tuple(sorted(counted.items())), tuple(up))
            rack_kind[rack] = kinds.setdefault(key, len(kinds))
    for vertex, label in enumerate(machine):
        rack = places.rack[vertex]
        places.rack_kind.append(rack_kind[rack])
        places.machine_kind.append(kind_of[label] if label >= 0 else -1)
        # What is in no machine keeps its place: only the switch of a rack moves with it.
        places.position.append(position.get(vertex, 0 if vertex == rack else vertex))
    return places


def _links(network: Network) -> list[list[tuple[int, int, int]]]:
    """Return the edges at each vertex: the other end, 0 out or 1 in, and the capacity or -1."""
    links: list[list[tuple[int, int, int]]] = [[] for _ in network.names]
    edges = zip(network.tails, network.heads, network.capacities, strict=True)
    for tail, head, capacity in edges:
        value = -1 if capacity is None else capacity
        links[tail].append((head, 0, value))
        links[head].append((tail, 1, value))
    return links


def _racks(
    network: Network, machine: Sequence[int], links: list[list[tuple[int, int, int]]]
) -> list[int]:
    """Return for each vertex the switch that its machine is linked to alone, or -1."""
    neighbours: dict[int, set[int]] = {}
    for vertex, label in enumerate(machine):
        if label >= 0:
            beyond = neighbours.setdefault(label, set())
            beyond.update(there for there, *_ in links[vertex] if machine[there] != label)
    held = frozenset(network.ranks)
    above = {}
    for label, beyond in neighbours.items():
        if len(beyond) == 1:
            (switch,) = beyond
            if machine[switch] < 0 and switch not in held:
                above[label] = switch
    if len(set(above.values())) < 2:
        return [-1] * len(machine)
    switches = frozenset(above.values())
    return [
        above.get(label, -1) if label >= 0 else vertex if vertex in switches else -1
        for vertex, label in enumerate(machine)
    ]
