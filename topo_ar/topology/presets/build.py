"""From a row of a table to devices and links; figures are made once and shared by all nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source
from topo_ar.topology.presets.machine import CpuHost, Machine
from topo_ar.topology.rates import Rates, interconnect_rate, nvlink_rates, pcie_rates, xgmi_rates

_HW_LATENCY = "hardware latency in NCCL 2.30.7, src/graph/tuning.cc (ring, Simple)"
_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6
_GIVEN = "as asked for"
_GUESS = "starting value; replace it by a measurement"
_MTU_1500 = "TCP payload of Ethernet frames at MTU 1500: (1500 - 52) / (1500 + 14) of nominal"
_SPARE_NICS = 2


@dataclass(slots=True)
class Parts:
    """What has been built so far."""

    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    cables: list["Cable"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cable:
    """What leads from a NIC to whatever switch the fabric gives it; `rail` counts in its node."""

    nic: str
    rail: int
    kind: LinkKind
    nominal: Figure
    effective: Figure | None
    latency: Figure


class MachineBuilder:
    """Builds nodes of one `machine` that have `num_ranks` ranks and NICs of these nominal rates.

    Left out, there is a rank on every GPU, and the NICs are the machine's own; one rate holds for
    all NICs.

    Raises
    ------
    ConfigError
        If ranks or NICs do not fit the machine.
    """

    def __init__(
        self, machine: Machine, num_ranks: int | None, rates: Sequence[float] | None
    ) -> None:
        self._machine = machine
        self._num_ranks = machine.gpus if num_ranks is None else num_ranks
        if not 1 <= self._num_ranks <= machine.gpus:
            raise ConfigError(
                f"{num_ranks} ranks do not fit a node with {machine.gpus} GPUs; "
                f"take 1 to {machine.gpus}"
            )
        self._nics = _nic_rates(machine, rates)
        self._gpu_bus = _sourced(machine, pcie_rates(machine.pcie, machine.lanes, Source.PRESET))
        self._bus = _sourced(machine, pcie_rates(machine.pcie, 16, Source.PRESET))
        lanes = machine.nics.lanes if machine.nics else None
        self._nic_bus = (
            _sourced(machine, pcie_rates(machine.pcie, lanes, Source.PRESET)) if lanes else Rates()
        )
        self._nvswitch = _link_rates(machine, machine.nvlinks)
        self._pairs = {count: _link_rates(machine, count) for _, _, count in machine.pairs}
        cpu = machine.cpu
        self._sockets = interconnect_rate(cpu.arch, cpu.vendor, cpu.model or None, Source.PRESET)
        self._cpu_attributes = {"arch": cpu.arch, "vendor": cpu.vendor} | (
            {"familyid": "6", "modelid": str(cpu.model)} if cpu.model else {}
        )
        self._gpu_attributes = {"name": machine.gpu} | (
            {"gcn": machine.gcn} if machine.gcn else {"sm": str(machine.sm)} if machine.sm else {}
        )
        self._c2c = _c2c(machine)
        self._half_nvlink = _figure(_NVLINK_S / 2, f"half of the {_HW_LATENCY}")
        self._nvlink = _figure(_NVLINK_S, _HW_LATENCY)
        self._half_pcie = _figure(_PCIE_S / 2, f"half of the {_HW_LATENCY}")
        self._half_network = _figure(_NETWORK_S / 2, f"half of the {_HW_LATENCY}")

    @property
    def num_nics(self) -> int:
        """The data NICs of one node."""
        return len(self._nics)

    def add_to(self, parts: Parts, node: str) -> None:
        """Add a node."""
        if self._machine.nvlinks:
            parts.devices.append(Device(f"{node}/nvswitch", DeviceKind.NVSWITCH, node))
        for tray in range(self._machine.trays):
            self._add_tray(parts, node, tray)
        parts.ranks += [f"{node}/gpu{i}" for i in range(self._num_ranks)]

    def _add_tray(self, parts: Parts, node: str, tray: int) -> None:
        machine = self._machine
        num_cpus = max(machine.cpu_of) + 1
        cpus = [f"{node}/cpu{tray * num_cpus + i}" for i in range(num_cpus)]
        gpus = [f"{node}/gpu{tray * len(machine.at) + i}" for i in range(len(machine.at))]
        where: dict[str, str | int | float | bool] = {"tray": tray} if machine.trays > 1 else {}
        parts.devices += [
            Device(cpu, DeviceKind.CPU, node, attributes={**self._cpu_attributes, **where})
            for cpu in cpus
        ]
        parts.links += [
            Link(a, b, LinkKind.UPI, effective=self._sockets) for a, b in combinations(cpus, 2)
        ]
        places = [cpus[cpu] for cpu in machine.cpu_of]
        if machine.switched:
            switches = [f"{node}/pcie{tray * len(places) + i}" for i in range(len(places))]
            parts.devices += [Device(s, DeviceKind.PCIE_SWITCH, node) for s in switches]
            if machine.c2c is None:
                pairs = zip(switches, places, strict=True)
                parts.links += [self._pcie(switch, cpu, self._bus) for switch, cpu in pairs]
            places = switches
        for gpu, at in zip(gpus, machine.at, strict=True):
            parts.devices.append(
                Device(gpu, DeviceKind.GPU, node, attributes={**self._gpu_attributes, **where})
            )
            if machine.c2c is not None:
                parts.links.append(
                    Link(
                        gpu,
                        cpus[machine.cpu_of[at]],
                        LinkKind.C2C,
                        self._c2c.nominal,
                        self._c2c.effective,
                    )
                )
            if machine.c2c is None or machine.switched:
                parts.links.append(self._pcie(gpu, places[at], self._gpu_bus))
            if machine.nvlinks:
                parts.links.append(
                    self._fast(gpu, f"{node}/nvswitch", machine.nvlinks, self._nvswitch)
                )
        for a, b, count in machine.pairs:
            parts.links.append(self._fast(gpus[a], gpus[b], count, self._pairs[count]))
        spread = machine.nics.at if machine.nics else (0,) * len(self._nics)
        for i, at in enumerate(spread):
            index = tray * len(spread) + i
            if index < len(self._nics):
                self._add_nic(parts, node, index, places[at])

    def _add_nic(self, parts: Parts, node: str, index: int, place: str) -> None:
        nic, nominal, own = f"{node}/nic{index}", self._nics[index], self._machine.nics
        named = own is not None and index < len(own.names)
        if own is not None and own.bridged:
            bridge = f"{node}/pcie-nic{index}"
            parts.devices.append(Device(bridge, DeviceKind.PCIE_SWITCH, node))
            parts.links.append(self._pcie(bridge, place, self._nic_bus))
            place = bridge
        attributes: dict[str, str | int | float | bool] = (
            {"name": own.names[index]} if own is not None and named else {}
        )
        parts.devices.append(Device(nic, DeviceKind.NIC, node, attributes=attributes))
        parts.links.append(self._pcie(nic, place, self._nic_bus))
        kind = own.kind if own is not None else LinkKind.ETHERNET
        parts.cables.append(Cable(nic, index, kind, nominal, None, self._half_network))

    def _pcie(self, a: str, b: str, rates: Rates) -> Link:
        return Link(a, b, LinkKind.PCIE, rates.nominal, rates.effective, self._half_pcie)

    def _fast(self, a: str, b: str, count: int, rates: Rates) -> Link:
        kind = LinkKind.NVLINK if self._machine.gcn is None else LinkKind.XGMI
        latency = self._half_nvlink if b.endswith("/nvswitch") else self._nvlink
        return Link(a, b, kind, rates.nominal, rates.effective, latency, count)


class HostBuilder:
    """Builds nodes without GPUs: ranks on CPUs that share memory.

    Raises
    ------
    ConfigError
        If there is to be no rank.
    """

    def __init__(self, host: CpuHost, num_ranks: int | None, rates: Sequence[float] | None) -> None:
        self._num_ranks = host.ranks if num_ranks is None else num_ranks
        if self._num_ranks < 1:
            raise ConfigError(f"{num_ranks} ranks on a node are not possible; take at least 1")
        self._nics = [
            (_figure(rate, note), _figure(rate * (1500 - 52) / (1500 + 14), _MTU_1500))
            for note, given in (("Ethernet port of 1 Gbit/s", host.nics), (_GIVEN, rates or ()))
            for rate in given
            if (rates is None) == (note != _GIVEN)
        ]
        self._latency = _figure(25e-6, _GUESS)

    @property
    def num_nics(self) -> int:
        """The NICs of one node."""
        return len(self._nics)

    def add_to(self, parts: Parts, node: str) -> None:
        """Add a node."""
        host = f"{node}/host"
        parts.devices.append(Device(host, DeviceKind.HOST, node))
        cpus = [f"{node}/cpu{i}" for i in range(self._num_ranks)]
        parts.devices += [Device(cpu, DeviceKind.CPU, node) for cpu in cpus]
        parts.links += [shm_link(cpu, host, Source.PRESET) for cpu in cpus]
        parts.ranks += cpus
        for i, (nominal, effective) in enumerate(self._nics):
            nic = f"{node}/nic{i}"
            parts.devices.append(Device(nic, DeviceKind.NIC, node))
            # How the NIC sits in the host is not known and never the bottleneck.
            parts.links.append(Link(nic, host, LinkKind.PCIE))
            parts.cables.append(Cable(nic, i, LinkKind.ETHERNET, nominal, effective, self._latency))


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


def _figure(value: float, note: str) -> Figure:
    return Figure(value, Source.PRESET, note)


def _nic_rates(machine: Machine, rates: Sequence[float] | None) -> tuple[Figure, ...]:
    own = () if machine.nics is None else machine.nics.at * machine.trays
    if rates is None:
        if machine.nics is None:
            return ()
        return (_figure(machine.nics.rate, f"{machine.document}: network port"),) * len(own)
    room = len(own) or _SPARE_NICS
    if len(rates) == 1 and own:
        rates = tuple(rates) * room
    if len(rates) > room:
        raise ConfigError(f"{len(rates)} NICs do not fit a node with room for {room}")
    return tuple(_figure(rate, _GIVEN) for rate in rates)


def _c2c(machine: Machine) -> Rates:
    if machine.c2c is None:
        return Rates()
    nominal, effective = machine.c2c
    return Rates(
        _figure(nominal, f"{machine.document}: coherent link of GPU and CPU"),
        None if effective is None else _figure(effective, "links and rate in a dump of NCCL"),
    )


def _link_rates(machine: Machine, count: int) -> Rates:
    """Return the rates of `count` NVLinks or XGMI links of the machine's GPUs."""
    if machine.gcn is None:
        return _sourced(machine, nvlink_rates(machine.sm, count, Source.PRESET))
    rates = _sourced(machine, xgmi_rates(machine.gcn, count, Source.PRESET))
    if machine.link_effective is None:
        return rates
    note = "measured one way between two GPUs of such a machine"
    return Rates(rates.nominal, _figure(count * machine.link_effective, note))


def _sourced(machine: Machine, rates: Rates) -> Rates:
    """Return the rates, the nominal one with the machine's document in its note."""
    if rates.nominal is None:
        return rates
    note = f"{machine.document}: {rates.nominal.note.removesuffix(', data sheet')}"
    return Rates(msgspec.structs.replace(rates.nominal, note=note), rates.effective)
