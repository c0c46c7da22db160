"""The network between nodes: one non-blocking switch, leaf and spine, or rails."""

from collections.abc import Sequence
from typing import Literal

from topo_ar.errors import ConfigError
from topo_ar.topology.model import Device, DeviceKind, Figure, Link, Source
from topo_ar.topology.names import FABRIC
from topo_ar.topology.presets.build import Cable, Parts

FabricKind = Literal["non-blocking", "rail-optimised", "leaf-spine"]
FABRICS: tuple[FabricKind, ...] = ("non-blocking", "rail-optimised", "leaf-spine")

_SPINE = "spine"
_DOWN_PORTS = 32


class Fabric:
    """How NICs are joined, and how much less than they carry goes up.

    Parameters
    ----------
    kind : {"non-blocking", "rail-optimised", "leaf-spine"}
        One switch; or a leaf switch for the NICs of equal number (a rail) of a group of nodes; or
        a leaf switch for all NICs of a group of nodes. Leaf switches hang on one spine.
    oversubscription : float, optional
        What the NICs of a leaf switch carry together, over what its uplinks carry; 1 when left
        out.
    nodes_per_leaf : int, optional
        Nodes of a group; what fits the lower half of a switch with 64 ports when left out.

    Raises
    ------
    ConfigError
        If the kind is unknown or an option does not fit it.
    """

    def __init__(
        self, kind: str, oversubscription: float | None, nodes_per_leaf: int | None
    ) -> None:
        if kind not in FABRICS:
            raise ConfigError(f"there is no fabric {kind!r}; known are {', '.join(FABRICS)}")
        if kind == FABRICS[0] and (oversubscription is not None or nodes_per_leaf is not None):
            raise ConfigError(
                "oversubscription and nodes per leaf shape a fabric of several switches; choose "
                f"{' or '.join(FABRICS[1:])}, or leave them out"
            )
        self._kind = kind
        self._over = 1.0 if oversubscription is None else oversubscription
        if not 1 <= self._over < float("inf"):
            raise ConfigError(
                f"an oversubscription of {oversubscription} is not possible; give 1 or more, such "
                "as 2 for uplinks of half of what comes up"
            )
        if nodes_per_leaf is not None and nodes_per_leaf < 1:
            raise ConfigError(f"{nodes_per_leaf} nodes per leaf are not possible; take at least 1")
        self._nodes_per_leaf = nodes_per_leaf

    def join(self, parts: Parts, cables: Sequence[Sequence[Cable]]) -> str:
        """Add switches and the cables of each node's NICs to `parts`; return a note on them."""
        if self._kind == FABRICS[0]:
            parts.devices.append(Device(FABRIC, DeviceKind.SWITCH))
            parts.links += [_link(cable, FABRIC) for node in cables for cable in node]
            return "the network between the nodes is taken to be one non-blocking switch"
        rails = self._kind == "rail-optimised"
        num_nics = max(len(node) for node in cables)
        group_size = self._nodes_per_leaf or max(1, _DOWN_PORTS // (1 if rails else num_nics))
        below: dict[str, list[Cable]] = {}
        for index, node in enumerate(cables):
            group = index // group_size
            for cable in node:
                leaf = f"leaf{group}-rail{cable.rail}" if rails else f"leaf{group}"
                below.setdefault(leaf, []).append(cable)
        parts.devices.append(Device(_SPINE, DeviceKind.SWITCH))
        for leaf, own in below.items():
            parts.devices.append(Device(leaf, DeviceKind.SWITCH))
            parts.links += [_link(cable, leaf) for cable in own]
            parts.links.append(self._uplink(leaf, own))
        return (
            f"the fabric is {self._kind} as asked for: {group_size} nodes to a leaf switch, all "
            f"uplinks of a leaf drawn as one, with an oversubscription of {self._over:g}"
        )

    def _uplink(self, leaf: str, own: Sequence[Cable]) -> Link:
        note = f"{len(own)} NICs over an oversubscription of {self._over:g}, as asked for"
        nominal = sum(cable.nominal.value for cable in own) / self._over
        payload = sum((cable.effective or cable.nominal).value for cable in own) / self._over
        effective = Figure(payload, Source.PRESET, note) if payload < nominal else None
        return Link(leaf, _SPINE, own[0].kind, Figure(nominal, Source.PRESET, note), effective)


def _link(cable: Cable, switch: str) -> Link:
    return Link(cable.nic, switch, cable.kind, cable.nominal, cable.effective, cable.latency)
