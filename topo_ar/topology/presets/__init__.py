"""Machines known by name, n of them joined by a fabric.

Figures are one way. Nominal rates are data sheets; effective rates of NVLink, XGMI, PCIe and the
CPU interconnect are the constants NCCL 2.30.7 and RCCL plan with. Each figure's note names its
document; what is not verified is said in the topology's notes.
"""

from collections.abc import Sequence

from topo_ar.errors import ConfigError
from topo_ar.topology.model import Topology, validate
from topo_ar.topology.presets import amd, clouds, nvidia, others
from topo_ar.topology.presets.build import HostBuilder, MachineBuilder, Parts
from topo_ar.topology.presets.build import shm_link as shm_link
from topo_ar.topology.presets.fabric import FABRICS as FABRICS
from topo_ar.topology.presets.fabric import Fabric
from topo_ar.topology.presets.machine import Machine

_MACHINES: dict[str, Machine] = {
    **nvidia.MACHINES,
    **clouds.MACHINES,
    **amd.MACHINES,
    **others.MACHINES,
}
PRESETS = (*_MACHINES, *others.HOSTS)


def preset(
    name: str,
    nodes: int = 1,
    ranks_per_node: int | None = None,
    nic: float | Sequence[float] | None = None,
    *,
    fabric: str = "non-blocking",
    oversubscription: float | None = None,
    nodes_per_leaf: int | None = None,
) -> Topology:
    """Return `nodes` equal machines called `name`, joined by a fabric.

    Parameters
    ----------
    name : str
        One of ``PRESETS``, such as ``dgx-h100``, ``aws-p5`` or ``cpu-host``.
    nodes : int
        How many machines; ranks are numbered node by node. For ``gb200-nvl72`` and its like a node
        is a whole NVLink domain.
    ranks_per_node : int, optional
        Ranks on each node; for GPU machines at most the number of GPUs, the first of which are
        taken.
    nic : float or sequence of float, optional
        Nominal bytes/s of one NIC, or one value for each NIC of a node; the machine's own when
        left out.
    fabric : {"non-blocking", "rail-optimised", "leaf-spine"}
        One switch; or a leaf switch for the NICs of equal number of a group of nodes; or a leaf
        switch for all NICs of a group of nodes.
    oversubscription : float, optional
        What the NICs of a leaf switch carry together, over what its uplinks carry; 1 when left
        out.
    nodes_per_leaf : int, optional
        Nodes of a group; what fits the lower half of a switch with 64 ports when left out.

    Raises
    ------
    ConfigError
        If the name is unknown (known ones are listed), a count or a rate cannot be used, or
        several nodes have no NIC.

    Examples
    --------
    >>> len(preset("dgx-h100", nodes=4).ranks)
    32
    >>> preset("dgx-h100", nodes=64, fabric="rail-optimised").devices[-1].id
    'leaf1-rail7'
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; known are {', '.join(PRESETS)}")
    if nodes < 1:
        raise ConfigError(f"nodes is {nodes}; a preset needs at least 1 node")
    rates = None if nic is None else (nic,) if isinstance(nic, int | float) else tuple(nic)
    for rate in rates or ():
        if not 0 < rate < float("inf"):
            raise ConfigError(f"a NIC of {rate} bytes/s is not possible; give a positive rate")
    network = Fabric(fabric, oversubscription, nodes_per_leaf)
    machine = _MACHINES.get(name)
    builder = (
        HostBuilder(others.HOSTS[name], ranks_per_node, rates)
        if machine is None
        else MachineBuilder(machine, ranks_per_node, rates)
    )
    if nodes > 1 and not builder.num_nics:
        raise ConfigError(f"{name} has no NIC, so {nodes} of them share nothing; give one with nic")
    parts = Parts()
    cables = []
    for index in range(nodes):
        before = len(parts.cables)
        builder.add_to(parts, f"node{index}")
        cables.append(parts.cables[before:])
    notes = [network.join(parts, cables)] if parts.cables else []
    notes += machine.notes if machine else ()
    return validate(
        Topology(name, tuple(parts.devices), tuple(parts.links), tuple(parts.ranks), tuple(notes))
    )
