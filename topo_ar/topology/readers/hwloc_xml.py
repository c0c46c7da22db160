"""hwloc's XML of one machine, as ``lstopo --of xml`` writes it, versions 2 and 3.

hwloc reads the current speed of a PCIe link, which falls when the link is idle. It does not tell
the rate of a port, and of NVLink only where NVML was asked.
"""

import re
from dataclasses import dataclass, field

from topo_ar.errors import TopologyError
from topo_ar.topology.gpu_links import nvswitch
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
from topo_ar.topology.rates import Rates, interconnect_rate
from topo_ar.topology.readers.hwloc_nics import judge_nics
from topo_ar.topology.readers.hwloc_nvlink import read_nvlinks
from topo_ar.topology.readers.hwloc_pci import (
    PciFunction,
    bits,
    compute_capability,
    could_compute,
    find_functions,
    info,
    port_speeds,
    widest_below,
)
from topo_ar.topology.readers.xml_tree import Element, parse
from topo_ar.topology.wording import some

FORMAT = "hwloc-xml"

_HEAD = 8192
# Names in one note; what is left out of a real machine is fewer.
_SHOWN = 64
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FIRST_TAG = re.compile(r"<([A-Za-z_][\w.-]*)")
# hwloc names its own grammar, which need not be read; any other is refused by the parser.
_GRAMMAR = re.compile(r'<!DOCTYPE topology SYSTEM "hwloc2?\.dtd">')
_ARCHITECTURES = {"x86_64": "x86_64", "ppc64le": "ppc64", "aarch64": "arm64"}


def matches(text: str) -> bool:
    """Return whether `text` is XML whose root is ``<topology>``."""
    if not text.lstrip("\ufeff \t\r\n").startswith("<"):
        return False
    first = _FIRST_TAG.search(_COMMENT.sub("", text[:_HEAD]))
    return first is not None and first[1] == "topology"


def read_text(text: str, name: str) -> Topology:
    """Return the topology in `text`, which comes from the file `name`.

    Raises
    ------
    TopologyError
        If `text` is no XML, of hwloc 1, or lacks what every export has; the message names file and
        line.
    """
    root = parse(_GRAMMAR.sub("", text, count=1), name)
    version = root.text("version") or ""
    if not version.startswith(("2.", "3.")):
        raise TopologyError(
            f"{root.place}: version of <topology> is {version or 'not given'}, known are 2 and 3; "
            "write the file with `lstopo --of xml` of hwloc 2 or later"
        )
    machine = next((o for o in root.each("object") if o.text("type") == "Machine"), None)
    if machine is None:
        raise TopologyError(f"{root.place}: holds no object of type Machine")
    draft = _Draft(name, root, machine)
    draft.add_cpus()
    functions = find_functions(machine, is_mask=version.startswith("3."))
    draft.ports, draft.widest = port_speeds(machine), widest_below(functions)
    draft.add_gpus(functions)
    draft.add_nvlinks(functions)
    draft.add_nics(functions)
    return draft.topology()


@dataclass(slots=True)
class _Draft:
    name: str
    root: Element
    machine: Element
    devices: dict[str, Device] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gaps: dict[str, list[str]] = field(default_factory=dict)
    numas: tuple[int, ...] = ()
    objects: dict[tuple[str, str], str] = field(default_factory=dict)
    capabilities: dict[str, int | None] = field(default_factory=dict)
    ports: dict[str, float] = field(default_factory=dict)
    widest: dict[str, float] = field(default_factory=dict)

    def topology(self) -> Topology:
        """Return the finished topology."""
        gaps = [f"{what}: {some(where, _SHOWN)}" for what, where in self.gaps.items()]
        return validate(
            Topology(
                self.name,
                tuple(self.devices.values()),
                tuple(self.links),
                tuple(self.ranks),
                (*self.notes, *gaps),
            )
        )

    def add_cpus(self) -> None:
        """Add a CPU device for each NUMA node that has cores, all joined."""
        machine_info = info(self.root) | info(self.machine)
        arch = _ARCHITECTURES.get(machine_info.get("Architecture", ""))
        described: list[tuple[str, str | None, int | None]] = []
        for place, memory in _memories(self.machine, self.machine):
            number = memory.integer("os_index")
            if number is None or number < 0:
                raise TopologyError(f"{memory.place}: a NUMANode needs an os_index of 0 or more")
            device_id = _numa(number)
            if device_id in self.devices:
                raise TopologyError(f"{memory.place}: there are two NUMA nodes {number}")
            if not bits(memory, "cpuset"):
                self.gaps.setdefault("NUMA node without CPUs, left out", []).append(str(number))
                continue
            cpu = machine_info | info(place)
            kept = (("vendor", "CPUVendor"), ("modelid", "CPUModelNumber"), ("name", "CPUModel"))
            attributes = {ours: cpu[theirs] for ours, theirs in kept if theirs in cpu}
            if arch:
                attributes["arch"] = arch
            self.devices[device_id] = Device(
                device_id, DeviceKind.CPU, NODE, number, {**attributes}
            )
            self.numas += (number,)
            for element in (place, memory):
                key = (element.text("type") or "", element.text("gp_index") or "")
                self.objects.setdefault(key, device_id)
            vendor, model = attributes.get("vendor"), attributes.get("modelid", "")
            described.append(
                (device_id, vendor, int(model) if re.fullmatch("[0-9]{1,9}", model) else None)
            )
        if not described:
            raise TopologyError(f"{self.machine.place}: the machine has no NUMA node with CPUs")
        for i, (a, vendor, model_number) in enumerate(described):
            for b, _, _ in described[i + 1 :]:
                rate = interconnect_rate(arch, vendor, model_number, Source.FILE)
                self.links.append(Link(a, b, LinkKind.UPI, effective=rate))

    def add_gpus(self, functions: list[PciFunction]) -> None:
        """Add the GPUs for computing, as the driver numbers them, else in order of bus ids."""
        shown = [function for function in functions if function.is_display]
        asked = any(function.told for function in shown)
        gpus = [f for f in shown if could_compute(f, drivers_were_asked=asked)]
        for function in shown:
            if function not in gpus:
                what = "display, no GPU for computing, left out"
                self.gaps.setdefault(what, []).append(
                    f"{function.busid} ({function.vendor}:{function.device})"
                )
        gpus.sort(key=lambda gpu: gpu.busid)
        numbers = [gpu.told.index for gpu in gpus if gpu.told and gpu.told.index is not None]
        order = "the driver's numbers"
        if len(set(numbers)) < len(gpus):
            numbers, order = list(range(len(gpus))), "their bus ids"
        for number, gpu in sorted(zip(numbers, gpus, strict=True), key=lambda pair: pair[0]):
            self._add_gpu(f"{NODE}/gpu{number}", gpu)
        if gpus:
            self.notes.append(f"the file gives no ranks; GPUs are ranks in order of {order}")

    def _add_gpu(self, device_id: str, gpu: PciFunction) -> None:
        attributes = gpu.attributes
        if gpu.model:
            attributes["name"] = gpu.model
        told = gpu.told.info if gpu.told else {}
        if uuid := told.get("NVIDIAUUID") or told.get("AMDUUID"):
            attributes["uuid"] = uuid
        if gpu.told and gpu.told.index is not None:
            attributes["index"] = gpu.told.index
        self.capabilities[device_id] = compute_capability(gpu)
        if sm := self.capabilities[device_id]:
            attributes["sm"] = sm
        self._add_function(device_id, DeviceKind.GPU, gpu, attributes)
        self.ranks.append(device_id)
        for element in (gpu.element, *gpu.element.each("object")):
            key = (element.text("type") or "", element.text("gp_index") or "")
            self.objects[key] = device_id

    def add_nvlinks(self, functions: list[PciFunction]) -> None:
        """Add the links of the distance matrix, and one device for all NVSwitches."""
        switches = [function for function in functions if function.is_nvswitch]
        together = nvswitch(NODE)
        if switches:
            attributes: dict[str, str | int | float | bool] = {"switches": len(switches)}
            self.devices[together] = Device(together, DeviceKind.NVSWITCH, NODE, None, attributes)
            self.notes.append(
                f"{len(switches)} NVSwitches ({_by_numa(switches)}) are taken as one that joins "
                "all GPUs: hwloc does not tell of links between switches"
            )
        for switch in switches:
            self.objects["PCIDev", switch.element.text("gp_index") or ""] = together
        found = read_nvlinks(self.root, self.objects, self.capabilities)
        if found is not None:
            self.links += found[0]
            self.notes += found[1]
        elif self.ranks:
            for device_id in self.ranks:
                self.devices[device_id].attributes["links_known"] = False
            self.notes.append(
                f"{len(self.ranks)} GPUs; NVLink is not described, which is not the same as "
                "no NVLink"
            )

    def add_nics(self, functions: list[PciFunction]) -> None:
        """Add the network cards: those that carry data first, each group by bus id."""
        for number, nic in enumerate(judge_nics(functions)):
            device_id = f"{NODE}/nic{number}"
            attributes = nic.attributes
            if nic.reason is not None:
                attributes["data"] = False
                self.gaps.setdefault(f"carries no data, {nic.reason}", []).append(
                    f"{device_id} ({nic.name})"
                )
            self._add_function(device_id, DeviceKind.NIC, nic.function, attributes)
            if nic.gigabits is None:
                if nic.reason is None:
                    what = "rate of the port not in the file"
                    self.gaps.setdefault(what, []).append(f"{device_id} ({nic.name})")
                continue
            self.devices.setdefault(FABRIC, Device(FABRIC, DeviceKind.SWITCH))
            note = f"{nic.gigabits} Gbit/s, by the PCI id of the card"
            rate = Figure(nic.gigabits * 1e9 / 8, Source.FILE, note)
            self.links.append(Link(device_id, FABRIC, LinkKind.ETHERNET, nominal=rate))

    def _add_function(
        self,
        device_id: str,
        kind: DeviceKind,
        function: PciFunction,
        attributes: dict[str, str | int | float | bool],
    ) -> None:
        """Add a device with its way over PCIe switches to its CPU."""
        local = [numa for numa in function.numas if numa in self.numas]
        numa = local[0] if len(local) == 1 else None
        self.devices[device_id] = Device(device_id, kind, NODE, numa, attributes)
        if function.speed is None:
            self.gaps.setdefault("PCIe speed not in the file", []).append(device_id)
        here, speed = device_id, function.speed
        for busid in function.bridges:
            above = f"{NODE}/pci-{busid}"
            self.links.append(_pcie(here, above, speed))
            if above in self.devices:
                return
            bridge = {"busid": busid, "class": "0x060400"}
            self.devices[above] = Device(above, DeviceKind.PCIE_SWITCH, NODE, numa, {**bridge})
            here, speed = above, self._uplink(busid)
        self.links.append(_pcie(here, self._memory(device_id, local), speed))

    def _uplink(self, busid: str) -> float | None:
        """Return the speed of a switch's uplink, None where an emulated port makes it up."""
        speed, below = self.ports.get(busid), self.widest.get(busid, 0.0)
        if speed is not None and speed * 4 < below * 1.001:
            what = (
                f"uplink at {speed / 1e9:.1f} GB/s above a device at {below / 1e9:.1f} GB/s, "
                "taken for an emulated bridge, so its rate is not known"
            )
            self.gaps.setdefault(what, []).append(busid)
            return None
        return speed

    def _memory(self, device_id: str, local: list[int]) -> str:
        """Return the CPU that a device hangs on, or one memory for all that may be it."""
        if len(local) == 1:
            return _numa(local[0])
        among = tuple(local) or self.numas
        if len(among) == 1:
            return _numa(among[0])
        what = "NUMA node not known, taken to be as far from all it may be"
        self.gaps.setdefault(what, []).append(device_id)
        host = f"{NODE}/host"
        if among != self.numas:
            host += "-numa" + "-".join(map(str, among))
        if host not in self.devices:
            self.devices[host] = Device(host, DeviceKind.HOST, NODE)
            self.links += [Link(host, _numa(numa), LinkKind.UPI) for numa in among]
        return host


def _memories(element: Element, place: Element) -> list[tuple[Element, Element]]:
    """Return each NUMA node below `element` with the package it belongs to."""
    found = []
    for child in element.each("object"):
        kind = child.text("type")
        if kind == "NUMANode":
            found.append((place, child))
        found += _memories(child, child if kind == "Package" else place)
    return found


def _numa(number: int) -> str:
    return f"{NODE}/numa{number}"


def _by_numa(functions: list[PciFunction]) -> str:
    counts: dict[str, int] = {}
    for function in functions:
        where = f"NUMA node {function.numas[0]}" if len(function.numas) == 1 else "unknown place"
        counts[where] = counts.get(where, 0) + 1
    return ", ".join(f"{count} at {where}" for where, count in counts.items())


def _pcie(a: str, b: str, speed: float | None) -> Link:
    rates = Rates() if speed is None else current_pcie_rates(speed)
    return Link(a, b, LinkKind.PCIE, rates.nominal, rates.effective)


def current_pcie_rates(speed: float) -> Rates:
    """Return the rates of a PCIe link that runs at `speed` bytes/s of its line code's payload.

    Effective is NCCL's ``width * rate / 80`` GB/s: three quarters of an 8b/10b link (generations 1
    and 2, whose lanes carry a multiple of 0.25 GB/s), 0.7617 of a 128b/130b one.
    """
    is_8b10b = abs(speed / 0.25e9 - round(speed / 0.25e9)) < 1e-6
    share = 0.75 if is_8b10b else (7.5 / 80) / (128 / 130 / 8)
    note = "current speed, may be idle" if is_8b10b else "current speed"
    return Rates(
        Figure(speed, Source.FILE, note),
        Figure(speed * share, Source.FILE, f"{note}, as NCCL 2.30.7 counts"),
    )
