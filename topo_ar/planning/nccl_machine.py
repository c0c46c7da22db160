"""A topology as NCCL's search sees it."""

import re
from dataclasses import replace

from topo_ar.errors import PlanError, TopologyError
from topo_ar.planning.nccl_search import NcclMachine, nccl_job, nvlink_bytes_per_s
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.model import Device, DeviceKind, LinkKind, Topology
from topo_ar.topology.ports import links_by_device

# NVLink SHARP came with Hopper's switches.
_FIRST_NVLS = 90


def nccl_machine(topology: Topology, known: Levels | None = None) -> NcclMachine:
    """Return the equal nodes of `topology` in NCCL's terms; `known` are its levels, if at hand.

    NVLinks count at NCCL's rate for their generation, NICs at the smaller of cable and PCIe link.
    NVLS is taken to work where GPUs of compute capability 90 or more meet at an NVSwitch.

    Raises
    ------
    PlanError
        If a rank sits on no NVIDIA GPU of known compute capability, or the nodes are not alike.
    """
    devices = {device.id: device for device in topology.devices}
    links = links_by_device(topology.links)
    gpus = [devices[rank] for rank in topology.ranks]
    capability = min((_capability(gpu) for gpu in gpus), default=0)
    nodes = (known or levels(topology)).nodes
    shapes = {(len(node.ranks), tuple(nic.nominal for nic in node.nics)) for node in nodes}
    if len(shapes) > 1:
        raise PlanError(
            "the nodes differ in ranks or NICs, and NCCL's model is for equal nodes; "
            "leave out the odd ones"
        )
    (ranks_per_node, nics) = shapes.pop()
    counts = [
        sum(link.count for link in links.get(gpu.id, ()) if link.kind is LinkKind.NVLINK)
        for gpu in gpus
    ]
    nvlink = min(counts) > 0
    rate = min(node.intra.nominal for node in nodes)
    if nvlink:
        rate = min(counts) * nvlink_bytes_per_s(capability)
    switched = any(device.kind is DeviceKind.NVSWITCH for device in topology.devices)
    return NcclMachine(
        len(nodes),
        ranks_per_node,
        capability,
        rate,
        nics if len(nodes) > 1 else (),
        nvlink=nvlink,
        nvls=nvlink and switched and capability >= _FIRST_NVLS,
    )


def nccl_machine_of(topology: Topology, known: Levels | None = None) -> NcclMachine | None:
    """Return what `nccl_machine` does, None where NCCL's model says nothing of it."""
    try:
        return _searched(nccl_machine(topology, known))
    except (PlanError, TopologyError):
        return None


def _searched(machine: NcclMachine) -> NcclMachine | None:
    try:
        nccl_job(machine)
    except PlanError:
        return None
    return machine


def changed(machine: NcclMachine, before: Levels, after: Levels) -> NcclMachine | None:
    """Return `machine` when its levels change from `before` to `after`; the slowest node counts.

    None where NCCL's model says nothing of what it has become.
    """
    slowest = min(after.nodes, key=lambda node: sum(nic.nominal for nic in node.nics))
    ports = [min(node.intra.nominal for node in each.nodes) for each in (before, after)]
    return _searched(
        replace(
            machine,
            num_nodes=len(after.nodes),
            gpu_bytes_per_s=machine.gpu_bytes_per_s * ports[1] / ports[0],
            nic_bytes_per_s=tuple(n.nominal for n in slowest.nics) if len(after.nodes) > 1 else (),
        )
    )


def _capability(device: Device) -> int:
    found = device.attributes.get("sm")
    # RCCL writes a number of its own under sm.
    is_amd = "gcn" in device.attributes
    if device.kind is not DeviceKind.GPU or is_amd or not re.fullmatch("[0-9]{2,4}", str(found)):
        raise PlanError(
            f"the compute capability of {device.id} is not known, and NCCL's model needs it; "
            "give the GPU the attribute sm, such as 90"
        )
    return int(str(found))
