"""The directed links that a message takes from rank to rank.

Inside a node it takes the nearest path (`topology.paths`). A mesh of direct links between GPUs
counts as what each GPU's links carry together, as in `topology.levels`: the rings of a runtime use
them all.
Between nodes it is spread over the NICs nearest to the sender, in proportion to their rates, and
each part arrives at the receiver's NIC of the same place; between the NICs it takes a shortest way
over the switches, and of several the one that the place of the NICs picks. A rank on a CPU sends
from its own memory: a shared-memory link carries what goes to other ranks of the host. A link of
unknown rate is taken not to limit anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from topo_ar.errors import TopologyError
from topo_ar.topology.graph import RateKind, link_rate
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.ports import (
    FAST_KINDS,
    NETWORK_KINDS,
    carries_data,
    links_by_device,
    nic_rate,
)

if TYPE_CHECKING:
    import networkx as nx

# A part of the bytes, and the links it goes through.
Part = tuple[float, tuple[int, ...]]
_Hop = tuple[str, str]
_MOST_WAYS = 16


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """One direction of all links between two devices.

    Attributes
    ----------
    name : str
        ``a > b`` with the ids of the devices.
    kind : str
        Of the link, such as ``nvlink``.
    bandwidth : float
        Bytes/s.
    between_nodes : bool
        Whether it is a part of the network.
    """

    name: str
    kind: str
    bandwidth: float
    between_nodes: bool


class Routes:
    """The ways of a topology's ranks to each other; what was found is kept.

    Parameters
    ----------
    topology : Topology
        Sound, with ranks.
    rate : {"effective", "nominal"}
        Which rates count; effective ones where known.

    Attributes
    ----------
    levels : Levels
        Of the topology.
    links : list of DirectedLink
        Those that routes have used so far; routes name positions in it.

    Raises
    ------
    TopologyError
        As `topology.levels.levels`.
    """

    def __init__(self, topology: Topology, rate: RateKind = "effective") -> None:
        self.levels: Levels = levels(topology)
        self.links: list[DirectedLink] = []
        self._topology = topology
        self._rate = rate
        self._devices = {device.id: device for device in topology.devices}
        self._by_device = links_by_device(topology.links)
        self._position: dict[_Hop, int | None] = {}
        self._parts: dict[tuple[int, int], tuple[Part, ...]] = {}
        self._nodes = _Nodes(topology, self.levels, self._by_device, self._devices, rate)
        self._ways: dict[_Hop, list[tuple[str, ...]]] = {}

    def between(self, source: int, target: int) -> tuple[Part, ...]:
        """Return the parts in which a message goes from rank to rank; they sum up to 1.

        Raises
        ------
        TopologyError
            If there is no way.
        """
        key = (source, target)
        if key not in self._parts:
            self._parts[key] = self._find(source, target)
        return self._parts[key]

    def process(self, rank: int, bandwidth: float) -> int:
        """Return a link that stands for what one process can pass on, in bytes/s."""
        return self._own((f"rank {rank}'s process", ""), "cpu", bandwidth)

    def _own(self, key: _Hop, kind: str, bandwidth: float) -> int:
        found = self._position.get(key)
        if found is None:
            found = self._position[key] = len(self.links)
            self.links.append(DirectedLink(" > ".join(filter(None, key)), kind, bandwidth, False))
        return found

    def _mesh(self, source: int, target: int) -> tuple[int, ...]:
        """Return both ports where direct fast links join the island of two ranks."""
        node = self.levels.nodes[self._nodes.of_rank[source]]
        if node.islands and not any({source, target} <= {*island} for island in node.islands):
            return ()
        found = []
        for rank, out in ((source, True), (target, False)):
            gpu = self._topology.ranks[rank]
            fast = [link for link in self._by_device.get(gpu, ()) if link.kind in FAST_KINDS]
            ends = {self._devices[end].kind for link in fast for end in (link.a, link.b)}
            figures = [link_rate(link, self._rate) for link in fast]
            if not fast or ends != {DeviceKind.GPU} or None in figures:
                return ()
            total = sum(figure.value for figure in figures if figure is not None)
            ports = (gpu, "its island") if out else ("its island", gpu)
            found.append(self._own(ports, fast[0].kind.value, total))
        return tuple(found)

    def same_node(self, a: int, b: int) -> bool:
        """Return whether two ranks share a node."""
        return self._nodes.of_rank[a] == self._nodes.of_rank[b]

    def _find(self, source: int, target: int) -> tuple[Part, ...]:
        a, b = self._topology.ranks[source], self._topology.ranks[target]
        if self.same_node(source, target):
            if ports := self._mesh(source, target):
                return ((1, ports),)
            return ((1, self._links(self._nodes.inside(a, b))),)
        out, into = self._nodes.nics(source), self._nodes.nics(target)
        if not out or not into:
            raise TopologyError(
                f"ranks {source} and {target} are on different nodes, one of which has no NIC; "
                "add NICs to the topology"
            )
        pairs = (
            [(share, nic, far) for (share, nic), (_, far) in zip(out, into, strict=True)]
            if len(out) == len(into)
            else [(share * part, nic, far) for share, nic in out for part, far in into]
        )
        parts = []
        for number, (share, nic, far) in enumerate(pairs):
            inside = self._nodes.inside(a, nic), self._nodes.inside(far, b)
            hops = [*self._leaving(inside[0]), *self._across(nic, far, number)]
            parts.append((share, self._links([*hops, *self._leaving(inside[1])])))
        return tuple(parts)

    def _leaving(self, hops: Sequence[_Hop]) -> list[_Hop]:
        """Leave out shared memory, which is not on the way between a rank and its NIC."""
        return [hop for hop in hops if self._kind(hop) is not LinkKind.SHM]

    def _across(self, nic: str, far: str, number: int) -> list[_Hop]:
        ends = [self._plug(nic), self._plug(far)]
        ways = self._between(ends[0], ends[1])
        way = ways[number % len(ways)]
        return list(pairwise([*([nic] * (ends[0] != nic)), *way, *([far] * (ends[1] != far))]))

    def _plug(self, nic: str) -> str:
        """Return what the NIC's first cable leads to, or the NIC where that is no switch."""
        for link in self._by_device.get(nic, ()):
            end = link.b if link.a == nic else link.a
            if link.kind in NETWORK_KINDS and self._devices[end].kind is DeviceKind.SWITCH:
                return end
        return nic

    def _between(self, a: str, b: str) -> list[tuple[str, ...]]:
        """Return shortest ways over the network."""
        if a == b:
            return [(a,)]
        if (a, b) not in self._ways:
            import networkx as nx

            try:
                found = nx.all_shortest_paths(self._fabric, a, b)
                self._ways[a, b] = [tuple(way) for way in islice(found, _MOST_WAYS)]
            except (nx.NetworkXNoPath, nx.NodeNotFound):
                raise TopologyError(
                    f"no cable leads from {a!r} to {b!r}; join the network of both nodes"
                ) from None
        return self._ways[a, b]

    @cached_property
    def _fabric(self) -> "nx.Graph[str]":
        import networkx as nx

        # NICs end a way: a network goes through switches.
        graph: nx.Graph[str] = nx.Graph()
        graph.add_edges_from(
            (link.a, link.b)
            for link in self._topology.links
            if link.kind in NETWORK_KINDS
            and (
                DeviceKind.NIC not in (self._devices[link.a].kind, self._devices[link.b].kind)
                or self._devices[link.a].kind is self._devices[link.b].kind
            )
        )
        return graph

    def _links(self, hops: Sequence[_Hop]) -> tuple[int, ...]:
        found = (self._link(hop) for hop in hops)
        return tuple(link for link in found if link is not None)

    def _link(self, hop: _Hop) -> int | None:
        if hop not in self._position:
            a, b = hop
            both = self._joining(hop)
            figures = [link_rate(link, self._rate) for link in both]
            known = [figure.value for figure in figures if figure is not None]
            self._position[hop] = None
            if len(known) == len(both):
                self._position[hop] = len(self.links)
                self.links.append(
                    DirectedLink(
                        f"{a} > {b}",
                        both[0].kind.value,
                        sum(known),
                        any(link.kind in NETWORK_KINDS for link in both),
                    )
                )
        return self._position[hop]

    def _kind(self, hop: _Hop) -> LinkKind:
        return self._joining(hop)[0].kind

    def _joining(self, hop: _Hop) -> list[Link]:
        """Return the links between two neighbours, looked for where there are fewer: no switch."""
        a, b = sorted(hop, key=lambda device: len(self._by_device[device]))
        return [link for link in self._by_device[a] if b in (link.a, link.b)]


class _Nodes:
    """Ways inside nodes, searched once for all nodes of equal shape."""

    def __init__(
        self,
        topology: Topology,
        known: Levels,
        links: dict[str, list[Link]],
        devices: dict[str, Device],
        rate: RateKind,
    ) -> None:
        self._topology = topology
        self._links = links
        self._rate = rate
        self.of_rank = {rank: i for i, node in enumerate(known.nodes) for rank in node.ranks}
        self._levels = known
        names = {node.name for node in known.nodes}
        self._members: dict[str | None, list[str]] = {name: [] for name in names}
        for device in topology.devices:
            if device.node in names:
                self._members[device.node].append(device.id)
        self._place = {
            device: i for members in self._members.values() for i, device in enumerate(members)
        }
        self._devices = devices
        self._shapes: dict[object, str | None] = {}
        self._like: dict[str | None, str | None] = {}
        self._paths: dict[str | None, Paths] = {}
        self._found: dict[tuple[str | None, int, int], tuple[int, ...]] = {}
        self._nic_ids: dict[int, list[str]] = {}

    def inside(self, a: str, b: str) -> list[_Hop]:
        """Return the hops from device to device of one node."""
        node = self._devices[a].node
        if node not in self._like:
            self._like[node] = self._shapes.setdefault(self._shape(node), node)
        alike = self._like[node]
        key = (alike, self._place[a], self._place[b])
        if key not in self._found:
            if alike not in self._paths:
                self._paths[alike] = self._paths_of(self._members[alike])
            ends = [self._members[alike][self._place[device]] for device in (a, b)]
            path = self._paths[alike].between(*ends)
            if path.path_class is PathClass.DIS:
                raise TopologyError(f"no link leads from {a!r} to {b!r}; describe the node")
            self._found[key] = tuple(self._place[device] for device in path.devices)
        members = self._members[node]
        return list(pairwise(members[place] for place in self._found[key]))

    def nics(self, rank: int) -> list[tuple[float, str]]:
        """Return the NICs that a rank sends through, each with its share of the bytes."""
        number = self.of_rank[rank]
        node = self._levels.nodes[number]
        if number not in self._nic_ids:
            own = (self._devices[device] for device in self._members[node.name])
            self._nic_ids[number] = [
                device.id
                for device in own
                if device.kind is DeviceKind.NIC
                and carries_data(device)
                and nic_rate(device, self._links, self._devices) is not None
            ]
        near = node.rank_nics[node.ranks.index(rank)] if node.rank_nics else range(len(node.nics))
        together = sum(node.nics[nic].payload for nic in near)
        return [(node.nics[nic].payload / together, self._nic_ids[number][nic]) for nic in near]

    def _shape(self, node: str | None) -> object:
        inside = []
        for device in self._members[node]:
            for link in self._links.get(device, ()):
                if link.a == device and self._devices[link.b].node == node:
                    figure = link_rate(link, self._rate)
                    inside.append(
                        (
                            self._place[device],
                            self._place[link.b],
                            link.kind,
                            figure and figure.value,
                        )
                    )
        kinds = tuple(self._devices[device].kind for device in self._members[node])
        return kinds, tuple(inside)

    def _paths_of(self, members: Sequence[str]) -> Paths:
        own = set(members)
        return Paths(
            Topology(
                "node",
                tuple(self._devices[device] for device in members),
                tuple(
                    link
                    for device in members
                    for link in self._links.get(device, ())
                    if link.a == device and link.b in own
                ),
            ),
            self._rate,
        )
