"""Machines known by name, n of them behind one non-blocking switch.

Figures are one way. Nominal rates are data sheets; effective rates of NVLink, PCIe and the CPU
interconnect are the constants NCCL 2.30.7 plans with. Each figure's note names its document.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from topo_ar.errors import ConfigError
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    LinkKind,
    Source,
    Topology,
    validate,
)

FABRIC = "fabric"

_NCCL = "constant of NCCL 2.30.7, src/graph/topo.h"
_HW_LATENCY = "half of the hardware latency in NCCL 2.30.7, src/graph/tuning.cc (ring, Simple)"
_GIVEN = "as asked for"
_GUESS = "starting value; replace it by a measurement"
_MTU_1500 = "TCP payload of Ethernet frames at MTU 1500: (1500 - 52) / (1500 + 14) of nominal"


def preset(
    name: str,
    nodes: int = 1,
    ranks_per_node: int | None = None,
    nic: float | Sequence[float] | None = None,
) -> Topology:
    """Return `nodes` equal machines called `name`, joined by one non-blocking switch.

    Parameters
    ----------
    name : str
        ``dgx-a100``, ``dgx-h100`` (8 GPUs each) or ``cpu-host`` (4 ranks on CPUs).
    nodes : int
        How many machines; ranks are numbered node by node.
    ranks_per_node : int, optional
        Ranks on each node; for GPU machines at most the number of GPUs, the first of which are
        taken.
    nic : float or sequence of float, optional
        Nominal bytes/s of one NIC, or one value for each NIC of a node; the machine's own when
        left out.

    Raises
    ------
    ConfigError
        If the name is unknown (known ones are listed), or a count or a rate cannot be used.

    Examples
    --------
    >>> len(preset("dgx-h100", nodes=4).ranks)
    32
    """
    machine = _MACHINES.get(name)
    if machine is None:
        raise ConfigError(f"there is no preset {name!r}; known are {', '.join(PRESETS)}")
    if nodes < 1:
        raise ConfigError(f"nodes is {nodes}; a preset needs at least 1 node")
    rates = None if nic is None else (nic,) if isinstance(nic, int | float) else tuple(nic)
    for rate in rates or ():
        if not 0 < rate < float("inf"):
            raise ConfigError(f"a NIC of {rate} bytes/s is not possible; give a positive rate")
    job = _Job()
    job.devices.append(Device(FABRIC, DeviceKind.SWITCH))
    for index in range(nodes):
        job.ranks += machine(job, f"node{index}", ranks_per_node, rates)
    job.notes.append("the network between the nodes is taken to be one non-blocking switch")
    return validate(
        Topology(name, tuple(job.devices), tuple(job.links), tuple(job.ranks), tuple(job.notes))
    )


@dataclass(slots=True)
class _Job:
    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Dgx:
    """What tells one DGX from another; rates in bytes/s."""

    document: str
    num_nvlinks: int
    nvlink_nccl: float
    pcie_gen: int
    pcie_nominal: float
    pcie_nccl: float
    upi_nccl: float
    gpus_per_cpu: int
    gpus_per_switch: int
    nic_nominal: float
    nic_names: tuple[str, ...]


_DGX_A100 = _Dgx(
    document="DGX A100 data sheet",
    num_nvlinks=12,
    nvlink_nccl=20.0e9,
    pcie_gen=4,
    pcie_nominal=31.5e9,
    pcie_nccl=24e9,
    upi_nccl=16e9,
    gpus_per_cpu=2,
    gpus_per_switch=2,
    nic_nominal=25e9,
    nic_names=(),
)
_DGX_H100 = _Dgx(
    document="DGX H100 user guide",
    num_nvlinks=18,
    nvlink_nccl=20.6e9,
    pcie_gen=5,
    pcie_nominal=63e9,
    pcie_nccl=48e9,
    upi_nccl=22e9,
    gpus_per_cpu=4,
    gpus_per_switch=1,
    nic_nominal=50e9,
    # Table 6 of the guide: the HCA nearest to GPU 0 .. 7; the others are for storage.
    nic_names=("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"),
)
_NUM_GPUS = 8
_NVLINK_NOMINAL = 25e9


def _figure(value: float, note: str) -> Figure:
    return Figure(value, Source.PRESET, note)


def _dgx(
    spec: _Dgx, job: _Job, node: str, num_ranks: int | None, rates: tuple[float, ...] | None
) -> list[str]:
    num_ranks = _NUM_GPUS if num_ranks is None else num_ranks
    if not 1 <= num_ranks <= _NUM_GPUS:
        raise ConfigError(
            f"{num_ranks} ranks do not fit a node with {_NUM_GPUS} GPUs; take 1 to {_NUM_GPUS}"
        )
    if rates is not None and len(rates) == 1:
        rates *= _NUM_GPUS
    if rates is not None and len(rates) > _NUM_GPUS:
        raise ConfigError(f"{len(rates)} NICs do not fit a node with room for {_NUM_GPUS}")
    port = _figure(spec.nic_nominal, f"{spec.document}: InfiniBand port")
    nics = [port] * _NUM_GPUS if rates is None else [_figure(rate, _GIVEN) for rate in rates]
    nvswitch = f"{node}/nvswitch"
    job.devices.append(Device(nvswitch, DeviceKind.NVSWITCH, node))
    cpus = [f"{node}/cpu{i}" for i in range(_NUM_GPUS // spec.gpus_per_cpu)]
    job.devices += [Device(cpu, DeviceKind.CPU, node) for cpu in cpus]
    upi = _figure(spec.upi_nccl, _NCCL)
    job.links += [
        Link(a, b, LinkKind.UPI, effective=upi) for i, a in enumerate(cpus) for b in cpus[i + 1 :]
    ]
    for i in range(_NUM_GPUS // spec.gpus_per_switch):
        switch = f"{node}/pcie{i}"
        job.devices.append(Device(switch, DeviceKind.PCIE_SWITCH, node))
        cpu = cpus[i * spec.gpus_per_switch // spec.gpus_per_cpu]
        job.links.append(_pcie(spec, switch, cpu))
    for k in range(_NUM_GPUS):
        switch = f"{node}/pcie{k // spec.gpus_per_switch}"
        job.devices.append(Device(f"{node}/gpu{k}", DeviceKind.GPU, node))
        job.links += [_pcie(spec, f"{node}/gpu{k}", switch), _nvlink(spec, node, k)]
        if k < len(nics):
            _add_dgx_nic(spec, job, node, k, switch, nics[k])
    return [f"{node}/gpu{k}" for k in range(num_ranks)]


def _pcie(spec: _Dgx, a: str, b: str) -> Link:
    return Link(
        a,
        b,
        LinkKind.PCIE,
        nominal=_figure(spec.pcie_nominal, f"{spec.document}: PCIe gen{spec.pcie_gen} x16"),
        effective=_figure(spec.pcie_nccl, _NCCL),
        latency=_figure(5.7e-6 / 2, _HW_LATENCY),
    )


def _nvlink(spec: _Dgx, node: str, gpu: int) -> Link:
    n = spec.num_nvlinks
    return Link(
        f"{node}/gpu{gpu}",
        f"{node}/nvswitch",
        LinkKind.NVLINK,
        nominal=_figure(n * _NVLINK_NOMINAL, f"{spec.document}: {n} NVLinks x 25 GB/s"),
        effective=_figure(n * spec.nvlink_nccl, f"{n} x {_NCCL}"),
        latency=_figure(3.4e-6 / 2, _HW_LATENCY),
        count=n,
    )


def _add_dgx_nic(
    spec: _Dgx, job: _Job, node: str, index: int, switch: str, nominal: Figure
) -> None:
    nic, bridge = f"{node}/nic{index}", f"{node}/pcie-nic{index}"
    attributes: dict[str, str | int | float | bool] = {}
    if spec.nic_names:
        attributes["name"] = spec.nic_names[index]
    job.devices += [
        Device(bridge, DeviceKind.PCIE_SWITCH, node),
        Device(nic, DeviceKind.NIC, node, attributes=attributes),
    ]
    job.links += [
        _pcie(spec, bridge, switch),
        _pcie(spec, nic, bridge),
        Link(
            nic,
            FABRIC,
            LinkKind.INFINIBAND,
            nominal=nominal,
            latency=_figure(14e-6 / 2, _HW_LATENCY),
        ),
    ]


def _cpu_host(
    job: _Job, node: str, num_ranks: int | None, rates: tuple[float, ...] | None
) -> list[str]:
    num_ranks = 4 if num_ranks is None else num_ranks
    if num_ranks < 1:
        raise ConfigError(f"{num_ranks} ranks on a node are not possible; take at least 1")
    host = f"{node}/host"
    job.devices.append(Device(host, DeviceKind.HOST, node))
    cpus = [f"{node}/cpu{i}" for i in range(num_ranks)]
    job.devices += [Device(cpu, DeviceKind.CPU, node) for cpu in cpus]
    job.links += [shm_link(cpu, host, Source.PRESET) for cpu in cpus]
    note = "Ethernet port of 1 Gbit/s" if rates is None else _GIVEN
    for i, rate in enumerate((125e6,) if rates is None else rates):
        nic = f"{node}/nic{i}"
        job.devices.append(Device(nic, DeviceKind.NIC, node))
        job.links += [
            # How the NIC sits in the host is not known and never the bottleneck.
            Link(nic, host, LinkKind.PCIE),
            Link(
                nic,
                FABRIC,
                LinkKind.ETHERNET,
                nominal=_figure(rate, note),
                effective=_figure(rate * (1500 - 52) / (1500 + 14), _MTU_1500),
                latency=_figure(25e-6, _GUESS),
            ),
        ]
    return cpus


def shm_link(cpu: str, host: str, source: Source) -> Link:
    """Return the link of a rank without a GPU to its host's memory, with values to start from.

    The nominal rate is a ceiling: a memory channel DDR4-3200 (25.6 GB/s, JESD79-4).
    """
    return Link(
        cpu,
        host,
        LinkKind.SHM,
        nominal=Figure(25.6e9, source, "one memory channel DDR4-3200, JESD79-4"),
        effective=Figure(4e9, source, _GUESS),
        latency=Figure(10e-6, source, _GUESS),
    )


_Machine = Callable[[_Job, str, int | None, tuple[float, ...] | None], list[str]]


def _dgx_a100(
    job: _Job, node: str, num_ranks: int | None, rates: tuple[float, ...] | None
) -> list[str]:
    return _dgx(_DGX_A100, job, node, num_ranks, rates)


def _dgx_h100(
    job: _Job, node: str, num_ranks: int | None, rates: tuple[float, ...] | None
) -> list[str]:
    return _dgx(_DGX_H100, job, node, num_ranks, rates)


_MACHINES: dict[str, _Machine] = {
    "dgx-a100": _dgx_a100,
    "dgx-h100": _dgx_h100,
    "cpu-host": _cpu_host,
}
PRESETS = tuple(_MACHINES)
