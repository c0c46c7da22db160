"""The two levels a planner thinks in: ranks inside a node, nodes joined by their NICs."""

from dataclasses import dataclass

from topo_ar.topology.model import Source


@dataclass(frozen=True, slots=True)
class Rate:
    """What one port carries: bytes/s in one direction, and the latency in seconds.

    `payload` is the effective rate; it equals `nominal` where nothing better is known.
    """

    nominal: float
    payload: float
    latency: float
    source: Source


@dataclass(frozen=True, slots=True)
class NodeLevel:
    """One node: its global ranks in local-rank order, one rank's port inside it, and its NICs."""

    name: str
    ranks: tuple[int, ...]
    intra: Rate
    nics: tuple[Rate, ...]


@dataclass(frozen=True, slots=True)
class Levels:
    """All nodes of a job, ordered by their lowest rank. Together they hold each rank once."""

    nodes: tuple[NodeLevel, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks over all nodes."""
        return sum(len(node.ranks) for node in self.nodes)
