"""Which ports a step keeps busy, and for how long.

A rank sends and receives through a port of its island, one of its node, its part of the node's
NICs, and its part of the uplinks of its rack; each is two, one for each direction. Ranks that use
the same NIC or uplink divide it in proportion to what they move through it in the whole schedule,
but a rank alone does not fill more than one NIC where its node has several for each: torch's own
ring does, whose channels leave the node at different ranks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple

from topo_ar.errors import PlanError
from topo_ar.planning.level_bounds import RateKind, check_levels, port_bandwidth
from topo_ar.planning.schedule import Op, Schedule, Stage, Step
from topo_ar.planning.step_list import RINGS
from topo_ar.planning.traffic import Flow, crossing, places, within
from topo_ar.topology.levels import Levels, NodeLevel, Rate

Kind = Literal["island", "node", "nic", "uplink"]

_RAILS = (Stage.INTER_REDUCE_SCATTER, Stage.INTER_ALL_GATHER)
_RINGS = (
    *RINGS,
    Stage.ISLAND_REDUCE_SCATTER,
    Stage.ISLAND_ALL_GATHER,
    Stage.INTRA_REDUCE_SCATTER,
    Stage.INTRA_ALL_GATHER,
)


class Port(NamedTuple):
    """A serial resource: one direction of one rank's way out of its island, node or rack."""

    kind: Kind
    rank: int
    direction: Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Load:
    """What one step asks of the ports: seconds of latency, and seconds of bytes for each port."""

    latency: float
    ports: dict[Port, float]


class PortLoads:
    """The loads of the steps of a schedule on given levels.

    Parameters
    ----------
    schedule : Schedule
        Its ranks are those of `levels`.
    levels : Levels
        Nodes, islands, racks and their rates; arithmetic is generic.
    rate : {"nominal", "payload"}
        Which rates count.
    ring_rails : bool
        Ranks of different nodes go round rings, whatever the stage says: NCCL's do.

    Raises
    ------
    PlanError
        If the levels contradict themselves or hold another number of ranks, or a step moves
        nothing.
    """

    def __init__(
        self, schedule: Schedule, levels: Levels, rate: RateKind, *, ring_rails: bool = False
    ) -> None:
        check_levels(levels)
        world = schedule.world_size
        if world != levels.world_size:
            raise PlanError(
                f"the schedule is for {world} ranks, the topology has {levels.world_size}; "
                "lower a plan for this topology"
            )
        self._levels = levels
        self._rate = rate
        self._rings = (*_RINGS, *_RAILS) if ring_rails else _RINGS
        self._node_of = places([node.ranks for node in levels.nodes], world)
        islands = [island for node in levels.nodes for island in node.islands]
        self._island_of = places(islands, world)
        self._rack_of = places(
            [[r for i in rack.nodes for r in levels.nodes[i].ranks] for rack in levels.racks], world
        )
        nbytes = [self._step_nbytes(step, schedule.itemsize) for step in schedule.steps]
        if not all(nbytes):
            raise PlanError(f"step {nbytes.index({})} of the schedule moves nothing; leave it out")
        self.totals: Counter[Port] = Counter()
        for ports in nbytes:
            self.totals.update(ports)
        whole_nodes = any(step.op is Op.ALL_REDUCE for step in schedule.steps)
        self._bandwidth = self._bandwidths(whole_nodes)
        self.loads = [
            self._load(step, ports) for step, ports in zip(schedule.steps, nbytes, strict=True)
        ]

    def name(self, port: Port) -> str:
        """Return the name of the hardware behind a port, as a person would say it."""
        node = self._levels.nodes[self._node_of[port.rank]]
        if port.kind == "uplink":
            return f"{self._levels.racks[self._rack_of[port.rank]].name}'s uplink"
        if port.kind == "nic":
            return f"{node.name}'s NICs"
        return f"the ports of the ranks in {node.name}" + (
            "'s islands" if port.kind == "island" else ""
        )

    def seconds(self, port: Port) -> float:
        """Return how long the bytes of all steps keep a port busy."""
        return self.totals[port] / self._bandwidth[port]

    def _step_nbytes(self, step: Step, itemsize: int) -> dict[Port, int]:
        nbytes: dict[Port, int] = {}

        def count(kind: Kind, flows: Sequence[Flow]) -> None:
            for rank, (sent, received) in zip(step.group, flows, strict=True):
                if sent:
                    nbytes[Port(kind, rank, "out")] = sent * itemsize
                if received:
                    nbytes[Port(kind, rank, "in")] = received * itemsize

        islands = {self._island_of[rank] for rank in step.group}
        one_island = len(islands) == 1 and islands != {-1}
        count("island" if one_island else "node", within(step, self._node_of))
        count("nic", crossing(step, self._node_of))
        count("uplink", crossing(step, self._rack_of))
        return nbytes

    def _load(self, step: Step, nbytes: dict[Port, int]) -> Load:
        seconds = {port: count / self._bandwidth[port] for port, count in nbytes.items()}
        if step.op is Op.ALL_REDUCE:
            return Load(self._ring_latency(step, nbytes), seconds)
        latency = max((self._latency(port) for port in nbytes), default=0)
        return Load(self.rounds(step) * latency, seconds)

    def rounds(self, step: Step) -> int:
        """Return for how many messages, one after the other, a step waits.

        Around a ring one less than there are members: inside a node, and between nodes where the
        stage says so. One where all send at once: to or from a single owner, in an exchange, or
        where every rank sends to every other.
        """
        owners = sum(begin < end for begin, end in step.shards)
        around = step.stage in self._rings and step.op is not Op.EXCHANGE and owners > 1
        return len(step.group) - 1 if around else 1

    def _ring_latency(self, step: Step, nbytes: dict[Port, int]) -> float:
        """Of 2 (k-1) hops those over the network count that a block meets on its way."""
        homes = [self._node_of[rank] for rank in step.group]
        crossings = sum(a != b for a, b in pairwise([*homes, homes[0]]))
        far = 2 * (crossings - 1) if crossings else 0
        latency: dict[Kind, float] = {}
        for port in nbytes:
            latency[port.kind] = max(latency.get(port.kind, 0), self._latency(port))
        near = latency.get("island", latency.get("node", 0))
        return far * latency.get("nic", 0) + (2 * (len(homes) - 1) - far) * near

    def _latency(self, port: Port) -> float:
        node = self._levels.nodes[self._node_of[port.rank]]
        if port.kind == "uplink":
            return self._levels.racks[self._rack_of[port.rank]].uplink.latency
        if port.kind == "nic":
            return max(node.nics[nic].latency for nic in _near(node, port.rank))
        return node.island.latency if port.kind == "island" and node.island else node.intra.latency

    def _bandwidths(self, every_nic: bool) -> dict[Port, float]:
        """Return bytes/s of every port that is used, shared ones divided."""
        shared: Counter[object] = Counter()
        for port, nbytes in self.totals.items():
            for owner in self._owners(port):
                shared[owner] += nbytes
        found = {}
        for port, nbytes in self.totals.items():
            node = self._levels.nodes[self._node_of[port.rank]]
            parts = [Fraction(nbytes, shared[owner]) for owner in self._owners(port)]
            rates = [port_bandwidth(rate, self._rate) for rate in self._rates(node, port)]
            found[port] = sum(rate * part for rate, part in zip(rates, parts, strict=True))
            if port.kind == "nic" and not every_nic:
                found[port] = min(found[port], self._most(node, port.rank, rates))
        return found

    def _owners(self, port: Port) -> list[object]:
        """Return the keys of the hardware that `port` is a part of, one for each direction."""
        node = self._node_of[port.rank]
        if port.kind == "uplink":
            return [(self._rack_of[port.rank], port.direction)]
        if port.kind == "nic":
            near = _near(self._levels.nodes[node], port.rank)
            return [(node, nic, port.direction) for nic in near]
        return [port]

    def _rates(self, node: NodeLevel, port: Port) -> list[Rate]:
        if port.kind == "uplink":
            return [self._levels.racks[self._rack_of[port.rank]].uplink]
        if port.kind == "nic":
            return [node.nics[nic] for nic in _near(node, port.rank)]
        return [node.island if port.kind == "island" and node.island else node.intra]

    def _most(self, node: NodeLevel, rank: int, rates: Sequence[float]) -> float:
        """Return what a rank can fill: its fastest NIC, or its even part of those near it."""
        even: float = 0
        for nic, rate in zip(_near(node, rank), rates, strict=True):
            even += rate / sum(nic in _near(node, other) for other in node.ranks)
        return max(even, *rates)


def _near(node: NodeLevel, rank: int) -> Sequence[int]:
    """Return the positions of the NICs that a rank uses."""
    return node.rank_nics[node.ranks.index(rank)] if node.rank_nics else range(len(node.nics))
