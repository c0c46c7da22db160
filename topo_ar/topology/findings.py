"""What in a topology keeps a job slower than its machines could be, and the remedy.

Only what the description itself shows; what it does not know is in its notes.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from topo_ar.errors import TopologyError
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.ports import carries_data, links_by_device, nominal_of
from topo_ar.topology.wording import some
from topo_ar.units import format_rate

# Beyond this class NCCL does not let a NIC reach a GPU's memory by itself.
_GPU_DIRECT = PathClass.PXB


@dataclass(frozen=True, slots=True)
class TopologyFinding:
    """Something slow or odd: what it is about, what was found, what to do about it."""

    about: str
    text: str
    remedy: str


def findings(topology: Topology) -> list[TopologyFinding]:
    """Return what deserves a look in `topology`, the gravest kinds first.

    Of nodes that look alike the first is examined; time grows linearly with devices and links.
    """
    links = links_by_device(topology.links)
    found = list(_fewer_links(topology, links))
    found += _slower_siblings(topology, links)
    found += _numa_unknown(topology)
    found += _far_nics(topology)
    try:
        both = levels(topology)
    except TopologyError as error:
        if topology.ranks:
            found.append(
                TopologyFinding("levels", str(error), "add the description that is missing")
            )
        return found
    return [*found, *_unequal_nodes(both), *_dealt_out(both), *_oversubscribed(both)]


def _by_node(topology: Topology, kind: DeviceKind) -> dict[str | None, list[Device]]:
    nodes: dict[str | None, list[Device]] = {}
    for device in topology.devices:
        if device.kind is kind and (kind is not DeviceKind.NIC or carries_data(device)):
            nodes.setdefault(device.node, []).append(device)
    return nodes


def _fewer_links(topology: Topology, links: dict[str, list[Link]]) -> Iterator[TopologyFinding]:
    """GPUs on an NVSwitch with fewer links to it than others of their node."""
    switched = {device.node for device in topology.devices if device.kind is DeviceKind.NVSWITCH}
    for node, gpus in _by_node(topology, DeviceKind.GPU).items():
        counts = {
            gpu.id: sum(
                link.count for link in links.get(gpu.id, ()) if link.kind is LinkKind.NVLINK
            )
            for gpu in gpus
        }
        most = max(counts.values())
        lame = [name for name, count in counts.items() if count < most]
        if node in switched and lame:
            shown = some([f"{name} ({counts[name]})" for name in lame])
            yield TopologyFinding(
                "nvlink",
                f"fewer NVLinks than the {most} of the other GPUs of {node}: {shown}; every "
                "collective of the node runs at the slowest GPU's rate",
                "compare `nvidia-smi nvlink -s -i N` and the fabric manager's log; drain the node "
                "if links stay down",
            )


def _slower_siblings(topology: Topology, links: dict[str, list[Link]]) -> Iterator[TopologyFinding]:
    """PCIe links of GPUs, and cables of NICs, below those of most others of their kind."""
    for kind, wanted, what, remedy in (
        (
            DeviceKind.GPU,
            frozenset({LinkKind.PCIE}),
            "PCIe",
            "reseat the card, look for a riser or slot with fewer lanes (`lspci -vv`, LnkCap and "
            "LnkSta); an idle link may be shown slower than it is",
        ),
        (
            DeviceKind.NIC,
            frozenset({LinkKind.INFINIBAND, LinkKind.ETHERNET}),
            "cable",
            "check cable and switch port (`ibstatus`, `ethtool`); a plan with weighted shards "
            "gives such a NIC less to do",
        ),
    ):
        devices = [d for found in _by_node(topology, kind).values() for d in found]
        rates: dict[str, float] = {}
        for device in devices:
            figures = [
                figure.value
                for link in links.get(device.id, ())
                if link.kind in wanted and (figure := nominal_of(link)) is not None
            ]
            if figures:
                rates[device.id] = min(figures)
        if not rates:
            continue
        usual = Counter(rates.values()).most_common(1)[0][0]
        slow = [name for name, rate in rates.items() if rate < 0.9 * usual]
        if slow:
            shown = some([f"{name} ({format_rate(rates[name])})" for name in slow])
            yield TopologyFinding(
                what.lower(),
                f"{what} slower than the usual {format_rate(usual)}: {shown}",
                remedy,
            )


def _numa_unknown(topology: Topology) -> Iterator[TopologyFinding]:
    nodes = {d.numa for d in topology.devices if d.kind is DeviceKind.CPU and d.numa is not None}
    # A NIC without a number may still hang on a CPU that has one.
    hosts = {device.id for device in topology.devices if device.kind is DeviceKind.HOST}
    beside = {
        end for link in topology.links if {link.a, link.b} & hosts for end in (link.a, link.b)
    }
    lost = [
        device.id
        for device in topology.devices
        if device.numa is None
        and (
            device.kind is DeviceKind.GPU
            or (device.kind is DeviceKind.NIC and device.id in beside and carries_data(device))
        )
    ]
    if len(nodes) > 1 and lost:
        yield TopologyFinding(
            "numa",
            f"NUMA node not known: {some(lost)}; processes may be bound to the far socket",
            "give the provider's NCCL topology file, or bind by hand (`numactl --cpunodebind`)",
        )


def _far_nics(topology: Topology) -> Iterator[TopologyFinding]:
    """GPUs of the first node whose nearest NIC lies beyond GPUDirect's reach, and idle NICs."""
    if not topology.ranks:
        return
    home = next(d.node for d in topology.devices if d.id == topology.ranks[0])
    devices = {device.id: device for device in topology.devices if device.node == home}
    gpus = [r for r in topology.ranks if r in devices and devices[r].kind is DeviceKind.GPU]
    nics = [
        nic.id
        for nic in devices.values()
        if nic.kind is DeviceKind.NIC and carries_data(nic) and nic.attributes.get("gdr") != "0"
    ]
    if not gpus or not nics:
        return
    links = tuple(x for x in topology.links if x.a in devices and x.b in devices)
    paths = Paths(Topology(topology.name, tuple(devices.values()), links))
    nearest = {gpu: paths.nearest_nics(gpu) for gpu in gpus}
    # Over C2C the CPU is as near as a switch.
    coherent = {end for link in links if link.kind is LinkKind.C2C for end in (link.a, link.b)}
    far: dict[PathClass, list[str]] = {}
    for gpu, found in nearest.items():
        if found.path_class > _GPU_DIRECT and gpu not in coherent:
            far.setdefault(min(found.path_class, PathClass.SYS), []).append(gpu)
    if far:
        shown = "; ".join(f"{level.name}: {some(gpus)}" for level, gpus in sorted(far.items()))
        yield TopologyFinding(
            "gpudirect",
            f"the nearest NIC is reached only through a CPU ({shown}); NCCL uses GPUDirect RDMA up "
            "to PXB, so data takes the way through host memory",
            f"measure what NCCL_NET_GDR_LEVEL={max(far).name} does; where slots can be chosen, put "
            "NIC and GPU under one PCIe switch",
        )
    used = {nic for found in nearest.values() for nic in found.nics}
    idle = [nic for nic in nics if nic not in used]
    if idle:
        yield TopologyFinding(
            "idle nics",
            f"nearest to no GPU: {some(idle)}; rings and rails will not use them by themselves",
            "leave them to storage, or spread the ranks over the GPUs near them",
        )


def _unequal_nodes(both: Levels) -> Iterator[TopologyFinding]:
    shapes = [
        (len(node.ranks), len(node.nics), sum(nic.nominal for nic in node.nics))
        for node in both.nodes
    ]
    usual = Counter(shapes).most_common(1)[0][0]
    odd = [
        f"{node.name} ({shape[0]} ranks, {shape[1]} NICs, {format_rate(shape[2])})"
        for node, shape in zip(both.nodes, shapes, strict=True)
        if shape != usual
    ]
    if odd:
        yield TopologyFinding(
            "unequal nodes",
            f"most nodes have {usual[0]} ranks and {usual[1]} NICs of {format_rate(usual[2])} "
            f"together; different: {some(odd)}",
            "repair or replace them; until then plan with weighted shards (`topo-ar plan`)",
        )


def _dealt_out(both: Levels) -> Iterator[TopologyFinding]:
    node_of = {rank: i for i, node in enumerate(both.nodes) for rank in node.ranks}
    world = both.world_size
    crossings = sum(node_of[rank] != node_of[(rank + 1) % world] for rank in range(world))
    best = len(both.nodes) if len(both.nodes) > 1 else 0
    if crossings > best:
        yield TopologyFinding(
            "rank order",
            f"a ring in rank order leaves a node {crossings} times where {best} would do",
            "number the ranks node by node (torchrun does; `srun --distribution=block`, "
            "`mpirun --map-by slot`)",
        )


def _oversubscribed(both: Levels) -> Iterator[TopologyFinding]:
    tight = []
    for rack in both.racks:
        inside = sum(nic.nominal for i in rack.nodes for nic in both.nodes[i].nics)
        if rack.uplink.nominal < 0.99 * inside:
            tight.append((inside / rack.uplink.nominal, rack.name))
    if tight:
        ratio = max(tight)[0]
        yield TopologyFinding(
            "uplinks",
            f"the uplinks of {some([name for _, name in tight])} carry up to {ratio:.3g} times "
            "less than the NICs below them",
            "keep a job within a rack, or plan with three levels (`topo-ar plan` does where it "
            "pays)",
        )
