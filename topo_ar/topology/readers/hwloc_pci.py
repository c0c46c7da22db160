"""The PCI functions of an hwloc XML file: what each is, and where it hangs.

``osdev_type`` is a number of a list in files of version 2 and a mask of bits in version 3.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from topo_ar.errors import TopologyError
from topo_ar.topology.busid import normal_busid
from topo_ar.topology.readers.xml_tree import Element

# What an OS device may be, by its number in version 2 and its bit in version 3.
_LISTED = ("storage", "gpu", "network", "openfabrics", "dma", "coprocessor", "memory")
_BITS = ("storage", "memory", "gpu", "coprocessor", "network", "openfabrics", "dma")
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
# Whose numbers count first: CUDA_VISIBLE_DEVICES may change those of CUDA.
_GPU_DRIVERS = ("nvml", "rsmi", "cuda")

# First and last PCI device id of NVIDIA's data-centre chips, and their compute capability.
_COMPUTE_CAPABILITIES = (
    (0x15F0, 0x15FF, 60),
    (0x1D80, 0x1DFF, 70),
    (0x20B0, 0x20FF, 80),
    (0x2200, 0x22FF, 86),
    (0x2300, 0x23FF, 90),
    (0x2900, 0x29FF, 100),
)
# Gbit/s of the ports of Amazon's Elastic Fabric Adapter, by PCI device id.
# Groups of 32 bits in a bitmap: more CPUs than any machine has.
_MOST_GROUPS = 4096
_EFA_GIGABITS = {"efa0": 100, "efa1": 100, "efa3": 400}


@dataclass(frozen=True, slots=True)
class OsDevice:
    """What the operating system makes of a PCI function: a name such as ``mlx5_0``, and kinds."""

    name: str
    kinds: frozenset[str]
    info: dict[str, str]

    @property
    def index(self) -> int | None:
        """The number that NVML or ROCm SMI gives a GPU."""
        match = re.fullmatch(r"(?:nvml|rsmi)(\d{1,6})", self.name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class PciFunction:
    """A PCI device: class and ids in lower-case hex, its link's current speed in bytes/s.

    `ports` are the bus ids of all PCI bridges above it, from the root down; `numas` the NUMA nodes
    it is local to as far as the file says.
    """

    element: Element
    busid: str
    pci_class: str
    vendor: str
    device: str
    speed: float | None
    ports: tuple[str, ...]
    host_bridge: str
    numas: tuple[int, ...]
    os_devices: tuple[OsDevice, ...]

    @property
    def bridges(self) -> tuple[str, ...]:
        """The switches above it from near to far; a switch is two bridges, a root port none."""
        return self.ports[-2::-2]

    @property
    def is_nvswitch(self) -> bool:
        """Whether this is an NVSwitch; one that is in reset shows no PCI ids."""
        bridge = self.vendor == "10de" and self.pci_class == "0680"
        return bridge or self.element.text("subtype") == "NVSwitch"

    @property
    def is_display(self) -> bool:
        """Whether this is a GPU or another thing that makes pictures."""
        return self.pci_class.startswith(("03", "12"))

    @property
    def is_network(self) -> bool:
        """Whether this is an Ethernet or InfiniBand card."""
        return self.pci_class in ("0200", "0207", "0c06")

    @cached_property
    def told(self) -> OsDevice | None:
        """What the driver of a GPU says of it; OpenCL's devices may sit on wrong functions."""
        for driver in _GPU_DRIVERS:
            for device in self.os_devices:
                if device.name.startswith(driver):
                    return device
        return None

    @property
    def model(self) -> str | None:
        """The name of a GPU."""
        told = self.told.info.get("GPUModel") if self.told else None
        others = (device.info.get("GPUModel") for device in self.os_devices)
        return told or info(self.element).get("PCIDevice") or next(filter(None, others), None)

    @cached_property
    def attributes(self) -> dict[str, str | int | float | bool]:
        """What identifies the function, spelled as in sysfs."""
        attributes: dict[str, str | int | float | bool] = {
            "busid": self.busid,
            "class": f"0x{self.pci_class}00",
            "vendor": f"0x{self.vendor}",
            "device": f"0x{self.device}",
        }
        if self.host_bridge:
            attributes["host_bridge"] = self.host_bridge
        return attributes


def could_compute(function: PciFunction, *, drivers_were_asked: bool) -> bool:
    """Return whether a display-class function is a GPU for computing.

    Cards of NVIDIA and AMD without a screen are; a card of NVIDIA with one is where the driver
    names it, or names none at all.
    """
    if function.vendor == "10de":
        wanted = function.pci_class == "0302" or not drivers_were_asked
        return wanted or function.told is not None
    return function.vendor == "1002" and function.pci_class in ("0302", "0380", "1200")


def compute_capability(function: PciFunction) -> int | None:
    """Return the compute capability of an NVIDIA GPU, 80 for 8.0, None where it is not known."""
    number = int(function.device, 16) if function.vendor == "10de" else -1
    for first, last, capability in _COMPUTE_CAPABILITIES:
        if first <= number <= last:
            return capability
    return None


def is_efa(function: PciFunction) -> bool:
    """Return whether the card is an Elastic Fabric Adapter."""
    return function.vendor == "1d0f" and function.device.startswith("efa")


def port_gigabits(function: PciFunction) -> int | None:
    """Return the Gbit/s of a card whose PCI id tells it."""
    return _EFA_GIGABITS.get(function.device) if is_efa(function) else None


def is_rdma(function: PciFunction) -> bool:
    """Return whether the card does RDMA as far as the file says."""
    openfabrics = any("openfabrics" in device.kinds for device in function.os_devices)
    return openfabrics or function.pci_class in ("0207", "0c06") or is_efa(function)


def find_functions(machine: Element, *, is_mask: bool) -> list[PciFunction]:
    """Return all PCI devices below `machine` that are no bridges, in file order."""
    return list(_below(machine, (), "", (), is_mask=is_mask))


def _below(
    element: Element,
    numas: tuple[int, ...],
    host_bridge: str,
    ports: tuple[str, ...],
    *,
    is_mask: bool,
) -> Iterator[PciFunction]:
    for child in element.each("object"):
        kind = child.text("type")
        if kind == "PCIDev":
            yield _function(child, numas, host_bridge, ports, is_mask=is_mask)
        elif kind == "Bridge":
            busid = child.text("pci_busid")
            # The bridge between CPU and PCI has no bus id of its own, but names its buses.
            root = host_bridge or (child.text("bridge_pci") or "").partition("-")[0]
            way = (*ports, normal_busid(busid)) if busid else ports
            yield from _below(child, numas, root.replace("[", ""), way, is_mask=is_mask)
        else:
            local = bits(child, "nodeset")
            yield from _below(child, local or numas, host_bridge, ports, is_mask=is_mask)


def _function(
    element: Element,
    numas: tuple[int, ...],
    host_bridge: str,
    ports: tuple[str, ...],
    *,
    is_mask: bool,
) -> PciFunction:
    busid, pci_type = element.text("pci_busid"), _PCI_TYPE.match(element.text("pci_type") or "")
    if busid is None or pci_type is None:
        raise TopologyError(
            f"{element.place}: a PCIDev needs pci_busid and pci_type, which starts like "
            "'0302 [10de:20b0]'"
        )
    gigabytes = element.number("pci_link_speed") or 0.0
    return PciFunction(
        element=element,
        busid=normal_busid(busid),
        pci_class=pci_type[1].lower(),
        vendor=pci_type[2].lower(),
        device=pci_type[3].lower(),
        speed=gigabytes * 1e9 if 0 < gigabytes < math.inf else None,
        ports=ports,
        host_bridge=host_bridge,
        numas=numas,
        os_devices=tuple(
            _os_device(child, is_mask=is_mask)
            for child in element.each("object")
            if child.text("type") == "OSDev"
        ),
    )


def _os_device(element: Element, *, is_mask: bool) -> OsDevice:
    number = element.integer("osdev_type") or 0
    if is_mask:
        kinds = {name for bit, name in enumerate(_BITS) if number >> bit & 1}
    else:
        kinds = set(_LISTED[number : number + 1]) if number >= 0 else set()
    name = element.text("name") or ""
    return OsDevice(name, frozenset(kinds), info(element))


def info(element: Element) -> dict[str, str]:
    """Return the ``<info>`` rows of an object."""
    return {
        name: value
        for row in element.each("info")
        if (name := row.text("name")) and (value := row.text("value"))
    }


def bits(element: Element, name: str) -> tuple[int, ...]:
    """Return the bits that are set in a bitmap such as ``0x0000ffff,,0x1``, lowest first.

    Raises
    ------
    TopologyError
        If the attribute is no bitmap; the message names file and line.
    """
    text = element.text(name) or ""
    groups = [group.strip().removeprefix("0x").zfill(8) for group in text.split(",")]
    # An infinite set begins with 0xf...f; what is beyond the machine does not count.
    digits = "".join(group for group in groups if "..." not in group)
    odd = set(digits) - set("0123456789abcdefABCDEF") or any(len(group) > 8 for group in groups)
    if odd or len(groups) > _MOST_GROUPS:
        raise TopologyError(
            f"{element.place}: {name}={text[:40]!r} is no bitmap such as 0x0000ffff,0x1"
        )
    binary = bin(int(digits or "0", 16))[2:]
    return tuple(i for i, digit in enumerate(reversed(binary)) if digit == "1")


def port_speeds(machine: Element) -> dict[str, float]:
    """Return the current speed in bytes/s of each PCI bridge's link to what is above it."""
    speeds: dict[str, float] = {}
    pending = [machine]
    while pending:
        element = pending.pop()
        pending += element.each("object")
        busid = element.text("pci_busid")
        if element.text("type") == "Bridge" and busid:
            speeds[normal_busid(busid)] = (element.number("pci_link_speed") or 0.0) * 1e9
    return {busid: speed for busid, speed in speeds.items() if 0 < speed < math.inf}


def widest_below(functions: Sequence[PciFunction]) -> dict[str, float]:
    """Return for each bridge the highest current speed of a device below it, in bytes/s."""
    widest: dict[str, float] = {}
    for function in functions:
        for port in function.ports:
            widest[port] = max(widest.get(port, 0.0), function.speed or 0.0)
    return widest
