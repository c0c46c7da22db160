"""The bound of an all-reduce on a topology, with its bottleneck in words."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from topo_ar.errors import PlanError
from topo_ar.planning.bounds import GraphBoundKind, all_reduce_bound
from topo_ar.planning.cut_names import name_bottleneck
from topo_ar.planning.flow_graph import FlowGraph, flow_graph
from topo_ar.topology.graph import RateKind
from topo_ar.topology.model import DeviceKind, Topology


@dataclass(frozen=True, slots=True)
class TopologyBound:
    """The largest rate of an all-reduce, and what limits it.

    Attributes
    ----------
    algbw : Fraction
        Bytes/s of each rank's buffer.
    bottleneck : str
        The links of the cut, whose they are, and what each carries.
    cut : frozenset of str
        The devices that these links lead away from. A device that PCIe passes in both directions
        may be on either side.
    kind : str
        Which bound it is, as in `topo_ar.planning.bounds.GraphBound`.
    tight : bool
        Whether `algbw` is the optimum of what `kind` stands for, not just an upper limit.
    """

    algbw: Fraction
    bottleneck: str
    cut: frozenset[str]
    kind: GraphBoundKind
    tight: bool

    def seconds(self, nbytes: int) -> float:
        """Return the least seconds of an all-reduce of `nbytes` bytes."""
        return float(nbytes / self.algbw)


def topology_bound(
    topology: Topology,
    *,
    rate: RateKind = "nominal",
    multicast: Iterable[str] = (),
    reducing: Iterable[str] = (),
    exact: bool = True,
) -> TopologyBound:
    """Return what no all-reduce on `topology` can beat; latency is left out.

    Parameters
    ----------
    topology : Topology
        Devices, links and ranks.
    rate : {"nominal", "effective"}
        Data-sheet rates, or what a payload gets. A link without a nominal rate does not limit.
    multicast, reducing : iterable of str
        Switches that can copy, and that can add: device ids, or ``nvswitch`` or ``switch`` for all
        of a kind.
    exact : bool
        Whether to solve the linear program where its size allows; otherwise the bound comes from
        the ports of ranks and nodes alone, without scipy.

    Raises
    ------
    PlanError
        If there are fewer than two ranks, they cannot reach each other, no rate is known that
        limits them, or a switch does not exist; the message names the device.

    Examples
    --------
    >>> from topo_ar.topology.presets import preset
    >>> bound = topology_bound(preset("dgx-a100", nodes=4))
    >>> bound.bottleneck
    "each node's NICs (8 x 25 GB/s)"
    """
    graph = flow_graph(topology, rate)
    found = all_reduce_bound(
        graph.digraph(),
        graph.ranks,
        _vertices(topology, graph, multicast),
        _vertices(topology, graph, reducing),
        exact=exact,
    )
    side = frozenset(str(vertex) for vertex in found.bottleneck)
    return TopologyBound(
        algbw=found.algbw,
        bottleneck=name_bottleneck(graph, side, {(str(a), str(b)) for a, b in found.links}),
        cut=frozenset(device for vertex in side for device in graph.stands_for[vertex]),
        kind=found.kind,
        tight=found.tight,
    )


def _vertices(topology: Topology, graph: FlowGraph, names: Iterable[str]) -> list[str]:
    """Return the graph's vertices of these switches; one that is only passed through has none."""
    kinds = {DeviceKind.NVSWITCH.value, DeviceKind.SWITCH.value}
    switches = {device.id: device.kind.value for device in topology.devices}
    wanted = set[str]()
    for name in names:
        if name not in switches and name not in kinds:
            raise PlanError(
                f"there is no switch {name!r}; name a device of the topology, or 'nvswitch' or "
                "'switch' for all of a kind"
            )
        wanted.update(device for device, kind in switches.items() if name in (device, kind))
    return [vertex for vertex, devices in graph.stands_for.items() if wanted.intersection(devices)]
