"""The topology of this one machine: NVIDIA GPUs from NVML, everything else from /sys."""

import os
import platform
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from topo_ar.errors import ConfigError
from topo_ar.topology.interfaces import Interface, Kernel, find_interfaces
from topo_ar.topology.kfd import probe_amd_gpus
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
from topo_ar.topology.names import FABRIC, NODE
from topo_ar.topology.nvml import Gpu, conclude
from topo_ar.topology.nvml_answers import NvmlAnswers
from topo_ar.topology.nvml_ask import ask_nvml
from topo_ar.topology.presets import shm_link
from topo_ar.topology.rates import Rates, interconnect_rate, pcie_rates
from topo_ar.topology.sysfs import (
    PciPlace,
    numa_nodes,
    pci_directory,
    pci_link,
    pci_place,
    read_value,
)
from topo_ar.topology.wording import some

_HOST = f"{NODE}/host"
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
# GT/s by generation of PCIe.
_GIGATRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_MOST_LANES = 32
_GPU_VENDORS = ("0x10de", "0x1002")


def probe(
    num_ranks: int | None = None,
    *,
    sysfs: Path = Path("/sys"),
    kernel: Kernel | None = None,
    nvml: NvmlAnswers | None = None,
) -> Topology:
    """Return the topology of this machine. Nothing is measured and nothing needs root.

    Each GPU is a rank. Without GPUs, or where more ranks are asked for than there are GPUs, the
    ranks sit on CPUs and meet in the host's memory. All NICs that are up lead to one switch.

    Parameters
    ----------
    num_ranks : int, optional
        Ranks to place on CPUs; 1 when left out.
    sysfs : Path
        Root of the kernel's description of its devices.
    kernel : Kernel, optional
        Asked for what sysfs does not tell.
    nvml : NvmlAnswers, optional
        Recorded answers of NVML; it is asked when left out.

    Raises
    ------
    ConfigError
        If `num_ranks` is not positive.
    """
    if num_ranks is not None and num_ranks < 1:
        raise ConfigError(f"{num_ranks} ranks are not possible; take at least 1")
    draft = _Draft(sysfs)
    found = conclude(ask_nvml() if nvml is None else nvml, NODE)
    draft.notes += found.notes
    gpus, links = found.gpus, found.links
    if not gpus:
        amd = probe_amd_gpus(sysfs, NODE)
        draft.notes += amd.notes
        links = amd.links
        gpus = tuple(
            Gpu(gpu.device, gpu.busid, f"AMD {gpu.gfx}", None, attributes={"gcn": gpu.gfx})
            for gpu in amd.gpus
        )
    if gpus:
        draft.add_numa_nodes()
    for gpu in gpus:
        draft.add_gpu(gpu)
    draft.devices += links.switches
    draft.links += links.links
    draft.note_flat_tree(len(gpus))
    if len(gpus) < (num_ranks or 1):
        draft.place_on_cpus(num_ranks or 1, len(gpus))
    interfaces = find_interfaces(sysfs, kernel or Kernel())
    draft.notes += interfaces.notes
    draft.add_nics(interfaces.nics)
    if not gpus:
        draft.note_other_gpus()
    return validate(
        Topology(
            "this machine",
            tuple(draft.devices),
            tuple(draft.links),
            tuple(draft.ranks),
            (*draft.notes, *(f"{some(where)}: {what}" for what, where in draft.gaps.items())),
        )
    )


@dataclass(slots=True)
class _Draft:
    sysfs: Path
    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numas: list[int] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    gaps: dict[str, list[str]] = field(default_factory=dict)

    def add(self, device: Device) -> None:
        """Add a device unless it is there."""
        if device.id not in self.ids:
            self.ids.add(device.id)
            self.devices.append(device)

    def add_numa_nodes(self) -> None:
        """Add a CPU device for each NUMA node, all joined."""
        self.numas = numa_nodes(self.sysfs)
        for numa in self.numas:
            self.add(Device(_numa(numa), DeviceKind.CPU, NODE, numa))
        rate = interconnect_rate(*_cpu_model(), Source.SYSFS)
        for i, numa in enumerate(self.numas):
            for other in self.numas[i + 1 :]:
                self.links.append(Link(_numa(numa), _numa(other), LinkKind.UPI, effective=rate))

    def add_gpu(self, gpu: Gpu) -> None:
        """Add a GPU as the next rank, and its way to the CPU."""
        place = pci_place(self.sysfs, pci_directory(self.sysfs, gpu.busid))
        attributes = {"busid": gpu.busid, "name": gpu.name, **gpu.attributes}
        if gpu.sm is not None:
            attributes["sm"] = gpu.sm
        numa = place.numa if place else None
        if numa is None and len(gpu.numa) == 1 and gpu.numa[0] in self.numas:
            numa = gpu.numa[0]
            self._say(f"NUMA node {numa} is NVML's word; /sys does not know", gpu.device)
            place = place and replace(place, numa=numa)
        self.add(Device(gpu.device, DeviceKind.GPU, NODE, numa, attributes))
        self.ranks.append(gpu.device)
        if place is None:
            self._say(
                "not under /sys (a container or WSL), so the PCIe path and the nearest NICs are "
                "not known; shown as through the CPU",
                gpu.device,
            )
        self._attach(gpu.device, place, _pcie_of(gpu))
        count, speed = (attributes.get(name) for name in ("c2c_links", "c2c_megabytes_per_s"))
        if isinstance(count, int) and isinstance(speed, int):
            rate = Figure(count * speed * 1e6, Source.NVML, f"{count} NVLink-C2C x {speed} Mbyte/s")
            self.links.append(
                Link(gpu.device, self._root(gpu.device, place), LinkKind.C2C, rate, count=count)
            )

    def note_flat_tree(self, num_gpus: int) -> None:
        """Say it where a hypervisor shows all devices on one flat bus."""
        bridges = any(device.kind is DeviceKind.PCIE_SWITCH for device in self.devices)
        if num_gpus > 1 and not bridges and "hypervisor" in _cpu_fields().get("flags", "").split():
            self.notes.append(
                "running under a hypervisor that shows a flat PCIe tree: path classes and nearest "
                "NICs may be wrong; give the provider's NCCL topology file to `topo-ar show`"
            )

    def place_on_cpus(self, num_ranks: int, num_gpus: int) -> None:
        """Let all ranks sit on CPUs that share the host's memory."""
        if num_gpus:
            self.notes.append(f"{num_ranks} ranks are more than {num_gpus} GPUs; they sit on CPUs")
        self._add_host()
        self.ranks = [f"{NODE}/cpu{i}" for i in range(num_ranks)]
        for cpu in self.ranks:
            self.add(Device(cpu, DeviceKind.CPU, NODE))
            self.links.append(shm_link(cpu, _HOST, Source.ASSUMED))

    def add_nics(self, nics: tuple[Interface, ...]) -> None:
        """Add the NICs with their way to the CPU and a switch they all lead to."""
        if not nics:
            self.notes.append("no NIC that is up was found")
            return
        self.add(Device(FABRIC, DeviceKind.SWITCH))
        best_rdma = max((nic.rate.value for nic in nics if nic.is_rdma), default=0.0)
        for index, nic in enumerate(nics):
            device = f"{NODE}/nic{index}"
            attributes: dict[str, str | int | float | bool] = {"name": nic.name}
            if nic.rate.value < best_rdma / 2:
                attributes["data"] = False
                self.notes.append(
                    f"{nic.name} carries no data: below half the rate of the best RDMA device"
                )
            if nic.place:
                attributes["busid"] = nic.place.busid
            numa = nic.place.numa if nic.place else None
            self.add(Device(device, DeviceKind.NIC, NODE, numa, attributes))
            self._attach(device, nic.place, Rates())
            if nic.rate.source is Source.ASSUMED:
                self.notes.append(f"{nic.name}: {nic.rate.note}; its rate is assumed")
            self.links.append(
                Link(device, FABRIC, nic.kind, nominal=nic.rate, effective=nic.payload)
            )

    def note_other_gpus(self) -> None:
        """Say it where PCI shows GPUs that nothing else told of."""
        shown = []
        for path in sorted((self.sysfs / "bus" / "pci" / "devices").glob("*")):
            pci_class = read_value(path / "class") or ""
            vendor = read_value(path / "vendor") or ""
            if pci_class.startswith(_GPU_CLASSES) and vendor in _GPU_VENDORS:
                shown.append(path.name)
        if shown:
            self.notes.append(
                f"PCI shows {len(shown)} GPUs that could not be asked ({', '.join(shown)}); "
                "ranks sit on CPUs"
            )

    def _attach(self, device: str, place: PciPlace | None, own: Rates) -> None:
        """Link a device to the bridges above it and to its NUMA node, or to the host.

        `own` is what its own link carries where /sys does not tell.
        """
        way = (place.busid, *place.bridges) if place else ()
        numa = place.numa if place else None
        here = device
        for busid, above in pairwise(way):
            there = f"{NODE}/pci-{above}"
            is_known = there in self.ids
            self.add(Device(there, DeviceKind.PCIE_SWITCH, NODE, numa))
            self._add_pcie(here, there, busid, own if here == device else Rates())
            if is_known:
                return
            here = there
        root = self._root(device, place)
        self._add_pcie(here, root, way[-1] if way else None, own if here == device else Rates())

    def _add_pcie(self, a: str, b: str, busid: str | None, own: Rates) -> None:
        rates, note = pci_link(self.sysfs, busid) if busid else (own, "")
        if rates.nominal is None:
            rates = own
        if note:
            self.notes.append(note)
        self.links.append(Link(a, b, LinkKind.PCIE, rates.nominal, rates.effective))

    def _root(self, device: str, place: PciPlace | None) -> str:
        """Return the CPU device above the last bridge; the host where that is not known."""
        if place is not None and place.numa in self.numas:
            return _numa(place.numa)
        if len(self.numas) == 1:
            return _numa(self.numas[0])
        if place is not None and self.numas:
            self._say("NUMA node not known, taken to be equally far from all", device)
        self._add_host()
        return _HOST

    def _say(self, what: str, device: str) -> None:
        self.gaps.setdefault(what, []).append(device)

    def _add_host(self) -> None:
        if _HOST not in self.ids:
            self.add(Device(_HOST, DeviceKind.HOST, NODE))
            self.links += [Link(_HOST, _numa(numa), LinkKind.UPI) for numa in self.numas]


def _pcie_of(gpu: Gpu) -> Rates:
    """Return what NVML says the GPU's PCIe link is capable of; a slot may be capable of less."""
    speed = _GIGATRANSFERS.get(gpu.pcie[0]) if gpu.pcie else None
    if gpu.pcie is None or speed is None or not 0 < gpu.pcie[1] <= _MOST_LANES:
        return Rates()
    return pcie_rates(speed, gpu.pcie[1], Source.NVML)


def _numa(numa: int | None) -> str:
    return f"{NODE}/numa{numa}"


def _cpu_model() -> tuple[str | None, str | None, int | None]:
    """Return architecture, vendor and model of the CPU as NCCL writes them."""
    arch = {"x86_64": "x86_64", "aarch64": "arm64", "ppc64le": "ppc64"}.get(platform.machine())
    fields = _cpu_fields()
    model = fields.get("model", "")
    return arch, fields.get("vendor_id"), int(model) if model.isdigit() else None


def _cpu_fields() -> dict[str, str]:
    """Return what the kernel says of the first processor."""
    fields = dict[str, str]()
    for line in (read_value(Path(os.sep, "proc", "cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields
