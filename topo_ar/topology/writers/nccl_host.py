"""One node as the tree of elements that NCCL's XML has: CPUs, PCIe below, GPUs and NICs in it."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from topo_ar.topology.busid import normal_busid
from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source, Topology
from topo_ar.topology.ports import links_by_device
from topo_ar.topology.rates import pcie_rates
from topo_ar.topology.readers.nccl_devices import LINKS_KNOWN, NET_ATTRIBUTES

_CLASSES = {
    DeviceKind.GPU: "0x030200",
    DeviceKind.NIC: "0x020000",
    DeviceKind.PCIE_SWITCH: "0x060400",
}
_NETWORK = (LinkKind.INFINIBAND, LinkKind.ETHERNET)
_INFINIBAND_CLASS = "0x020700"
_NVSWITCH_CLASS = "0x068000"
_CPU_CLASS = "0x068001"
_HIDDEN = "ffffffff:ff:ff.0"
_SPEEDS = (64.0, 32.0, 16.0, 8.0, 5.0, 2.5)
_WIDTHS = (16, 8, 4, 2, 1, 12, 32)


@dataclass(slots=True)
class Element:
    """An element to write."""

    tag: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list)


class Whole:
    """What the nodes of a topology are written from: its devices and links, looked up once."""

    def __init__(self, topology: Topology) -> None:
        self.kinds = {device.id: device.kind for device in topology.devices}
        self.ranks = {device: rank for rank, device in enumerate(topology.ranks)}
        self.links = links_by_device(topology.links)


class Host:
    """The devices of one node and how they hang together over PCIe.

    `gaps` say what had to be made up, once `elements` was called.
    """

    def __init__(self, whole: Whole, devices: Sequence[Device], host_hash: str) -> None:
        self.gaps: list[str] = []
        self._hash = host_hash
        self._devices = {device.id: device for device in devices}
        self._kinds = whole.kinds
        self._place = {device.id: place for place, device in enumerate(devices)}
        self._ranks = whole.ranks
        self._links = {name: whole.links.get(name, []) for name in self._devices}
        self._roots = [device for device in devices if self._is_root(device)]
        self._children: dict[str, list[str]] = {}
        self._up: dict[str, Link] = {}
        self._grow()
        self._busids = self._name_busids()

    def elements(self) -> list[Element]:
        """Return the ``<cpu>`` elements in the order of the topology."""
        numas = self._number_cpus()
        elements = [
            Element("cpu", self._cpu(root, numas[root.id]), list(self._below(root.id)))
            for root in self._roots
        ]
        if orphans := self._children.get(""):
            self.gaps.append(
                f"no PCIe path is known for {', '.join(orphans[:8])}; written below a CPU of "
                "unknown NUMA node"
            )
            attributes = {"numaid": "-1"} | ({"host_hash": self._hash} if self._hash else {})
            elements.append(Element("cpu", attributes, list(self._below(""))))
        return elements

    def _is_root(self, device: Device) -> bool:
        if device.kind is DeviceKind.HOST:
            return True
        kinds = {link.kind for link in self._links[device.id]}
        return device.kind is DeviceKind.CPU and LinkKind.SHM not in kinds

    def _grow(self) -> None:
        """Hang every PCIe device below the nearest CPU; what no CPU reaches goes below ``""``."""
        waiting = deque(root.id for root in self._roots)
        placed = set(waiting)
        while waiting:
            here = waiting.popleft()
            for link in self._links[here]:
                far = link.b if link.a == here else link.a
                fits = far in self._devices and self._devices[far].kind in _CLASSES
                if link.kind is LinkKind.PCIE and fits and far not in placed:
                    placed.add(far)
                    self._children.setdefault(here, []).append(far)
                    self._up[far] = link
                    if self._devices[far].kind is DeviceKind.PCIE_SWITCH:
                        waiting.append(far)
        ends = (DeviceKind.GPU, DeviceKind.NIC)
        for name, device in self._devices.items():
            if device.kind in ends and name not in placed:
                self._children.setdefault("", []).append(name)
        for children in self._children.values():
            children.sort(key=self._first_leaf)

    def _first_leaf(self, name: str) -> int:
        """Return the place of the first GPU or NIC in a subtree, which is the file's order."""
        below = self._children.get(name)
        return min(map(self._first_leaf, below)) if below else self._place[name]

    def _name_busids(self) -> dict[str, str]:
        known = {
            name: normal_busid(str(device.attributes["busid"]))
            for name, device in self._devices.items()
            if "busid" in device.attributes
        }
        taken = set(known.values())
        free = (
            busid
            for domain in range(0xF000, 0xFFFF)
            for bus in range(256)
            if (busid := f"{domain:04x}:{bus:02x}:00.0") not in taken
        )
        nameless = [
            name
            for name, device in self._devices.items()
            if device.kind in _CLASSES and name not in known and not self._hangs_on_cpu(name)
        ]
        if nameless:
            self.gaps.append(
                f"bus ids of {len(nameless)} devices are not known and made up, so NCCL will not "
                "find these devices on a machine"
            )
        return known | dict(zip(nameless, free, strict=False))

    def _hangs_on_cpu(self, name: str) -> bool:
        """Return whether this is a NIC of which no PCI path is known; it needs no bus id."""
        device, up = self._devices[name], self._up.get(name)
        if device.kind is not DeviceKind.NIC or "busid" in device.attributes:
            return False
        if up is None:
            return True
        above = up.b if up.a == name else up.a
        on_root = self._kinds[above] in (DeviceKind.CPU, DeviceKind.HOST)
        return on_root and up.nominal is None and up.effective is None

    def _number_cpus(self) -> dict[str, str]:
        unknown = [root.id for root in self._roots if root.numa is None]
        numas = {root.id: str(root.numa) for root in self._roots if root.numa is not None}
        if len(unknown) == 1:
            return numas | {unknown[0]: "-1" if numas else "0"}
        free = (str(n) for n in range(len(self._roots)) if str(n) not in numas.values())
        if unknown:
            self.gaps.append("NUMA nodes of the CPUs are not known and made up")
        return numas | dict(zip(unknown, free, strict=False))

    def _cpu(self, cpu: Device, numa: str) -> dict[str, str]:
        attributes = {"numaid": numa}
        if self._hash:
            attributes["host_hash"] = self._hash
        attributes |= _kept(cpu, ("affinity", "arch", "vendor", "familyid", "modelid"))
        if "arch" not in attributes or "vendor" not in attributes:
            self.gaps.append("arch and vendor of the CPUs are not known")
        return attributes

    def _below(self, parent: str) -> Iterator[Element]:
        for name in self._children.get(parent, ()):
            device = self._devices[name]
            if self._hangs_on_cpu(name):
                yield Element("nic", {}, self._nets(device))
                continue
            element = Element("pci", {"busid": self._busids[name], **self._pci(device)})
            match device.kind:
                case DeviceKind.GPU if device.attributes.get(LINKS_KNOWN) is not False:
                    element.children.append(self._gpu(device))
                case DeviceKind.NIC if nets := self._nets(device):
                    element.children.append(Element("nic", {}, nets))
                case DeviceKind.PCIE_SWITCH:
                    element.children += [*self._below(name), *self._peers(name)]
            yield element

    def _pci(self, device: Device) -> dict[str, str]:
        attributes = _kept(device, ("class",))
        if not attributes and (
            device.kind in (DeviceKind.GPU, DeviceKind.NIC) or "busid" not in device.attributes
        ):
            attributes = {"class": self._class(device)}
        names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
        return attributes | _kept(device, names) | self._lanes(device.id)

    def _class(self, device: Device) -> str:
        kinds = {link.kind for link in self._links[device.id]}
        if device.kind is DeviceKind.NIC and LinkKind.INFINIBAND in kinds:
            return _INFINIBAND_CLASS
        return _CLASSES[device.kind]

    def _lanes(self, name: str) -> dict[str, str]:
        """Return speed and width; NCCL takes empty ones for generation 3 and 16 lanes."""
        up = self._up.get(name)
        figure = (up.nominal or up.effective) if up else None
        if up is None or figure is None:
            self.gaps.append("PCIe rates that are not known are left open; NCCL takes gen3 x16")
            return {"link_speed": "", "link_width": "0"}
        fits = list(_generations(figure, nominal=up.nominal is not None))
        if fits:
            speed, width = fits[0]
            if figure.source is not Source.ASSUMED:
                return {"link_speed": f"{speed:.1f} GT/s PCIe", "link_width": str(width)}
            # Only what was assumed is left open again.
            text, width = (f"{speed:.1f} GT/s PCIe", 0) if width == 16 else ("", width)
            return {"link_speed": text, "link_width": str(width)}
        self.gaps.append(
            f"{figure.value / 1e9:.4g} GB/s of {name} fits no PCIe generation and width; left out"
        )
        return {"link_speed": "", "link_width": "0"}

    def _gpu(self, gpu: Device) -> Element:
        attributes = _kept(gpu, ("dev", "sm", "gcn", "arch"))
        attributes.setdefault("dev", str(gpu.attributes.get("index", self._position(gpu))))
        if gpu.id in self._ranks:
            attributes["rank"] = str(self._ranks[gpu.id])
        attributes |= _kept(gpu, ("gdr", "mlopart"))
        if not {"sm", "gcn"} & attributes.keys():
            self.gaps.append("compute capabilities of the GPUs are not known")
        return Element("gpu", attributes, list(self._gpu_links(gpu)))

    def _position(self, device: Device) -> int:
        """Return how many devices of its kind the node lists before `device`."""
        alike = [name for name, other in self._devices.items() if other.kind is device.kind]
        return alike.index(device.id)

    def _gpu_links(self, gpu: Device) -> Iterator[Element]:
        for link in self._links[gpu.id]:
            far = link.b if link.a == gpu.id else link.a
            count = {"count": str(link.count)}
            if link.kind in (LinkKind.NVLINK, LinkKind.XGMI):
                if far not in self._devices:
                    self.gaps.append(f"{link.kind.value} of {gpu.id} to another node is left out")
                    continue
                yield Element(link.kind.value, self._far_end(far) | count)
            elif link.kind is LinkKind.C2C:
                rate = link.effective or link.nominal
                each = {"bw": f"{rate.value / link.count / 1e6:.12g}"} if rate else {}
                yield Element("c2c", each | count)

    def _far_end(self, far: str) -> dict[str, str]:
        device = self._devices[far]
        if device.kind is DeviceKind.GPU:
            return {"target": self._busids[far], "tclass": self._pci(device)["class"]}
        target = str(device.attributes.get("busid", _HIDDEN))
        is_switch = device.kind is DeviceKind.NVSWITCH
        return {"target": target, "tclass": _NVSWITCH_CLASS if is_switch else _CPU_CLASS}

    def _nets(self, nic: Device) -> list[Element]:
        links = [link for link in self._links[nic.id] if link.kind in _NETWORK]
        if not links:
            return []
        num_ports = sum(link.count for link in links)
        rates = [link.nominal for link in links]
        total = sum(rate.value for rate in rates if rate) * 8 / 1e6
        assumed = any(rate is None or rate.source is Source.ASSUMED for rate in rates)
        speed = "0" if assumed else f"{total / num_ports:.0f}"
        latency = max((link.latency.value for link in links if link.latency), default=0.0)
        nets = []
        for port in range(num_ports):
            name = nic.id.rsplit("/", 1)[-1]
            attributes = {"name": name, "dev": str(self._position(nic)), "speed": speed}
            for name in ("name", *NET_ATTRIBUTES, "speed"):
                values = str(nic.attributes.get(name, "")).split(",")
                if port < len(values) and values[port]:
                    attributes[name] = values[port]
            if latency:
                # NCCL's figure is for a message, which crosses two such links.
                attributes["latency"] = f"{2 * latency * 1e6:.9g}"
            nets.append(Element("net", attributes | _kept(nic, ("gdr",))))
        return nets

    def _peers(self, switch: str) -> Iterator[Element]:
        """Yield a row for each PCIe switch joined to this one without being above or below it."""
        for link in self._links[switch]:
            far = link.b if link.a == switch else link.a
            if (
                link.kind is LinkKind.PCIE
                and self._kinds[far] is DeviceKind.PCIE_SWITCH
                and link not in (self._up.get(switch), self._up.get(far))
            ):
                yield Element("pcilink", {"target": self._busids[far]})


def _generations(figure: Figure, *, nominal: bool) -> Iterator[tuple[float, int]]:
    """Yield the speeds and widths of PCIe with this rate; the one its note names comes first."""
    fits = []
    for width, speed in product(_WIDTHS, _SPEEDS):
        rates = pcie_rates(speed, width, Source.FILE)
        same = rates.nominal if nominal else rates.effective
        if same is not None and abs(same.value - figure.value) < 1e-3 * figure.value:
            fits.append((same.note != figure.note, (speed, width)))
    yield from (found for _, found in sorted(fits, key=lambda fit: fit[0]))


def _kept(device: Device, names: Sequence[str]) -> dict[str, str]:
    return {name: str(device.attributes[name]) for name in names if name in device.attributes}
