"""What the kernel tells of PCI devices and NUMA nodes under /sys."""

import re
from dataclasses import dataclass
from pathlib import Path

from topo_ar.topology.model import Source
from topo_ar.topology.rates import Rates, pcie_rates

_BUSID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read_value(path: Path) -> str | None:
    """Return the stripped content of a sysfs file, None where there is none to be had."""
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        # Files of interfaces that are down exist and answer EINVAL.
        return None


def read_integer(path: Path) -> int | None:
    """Return the content of a sysfs file as an integer, None where it is none."""
    try:
        return int(read_value(path) or "", 0)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Where a PCI device sits: its bus id, the bridges above it from near to far, its NUMA node.

    A switch counts as one bridge, a root port as none: the kernel shows a switch as two.
    """

    busid: str
    bridges: tuple[str, ...]
    numa: int | None
    is_virtual_function: bool


def pci_place(sysfs: Path, device: Path) -> PciPlace | None:
    """Return the place of the PCI device that `device` (a sysfs link or directory) belongs to.

    None where there is no PCI device on the way, as for a virtual interface.
    """
    try:
        parts = device.resolve(strict=True).relative_to(sysfs.resolve()).parts
    except (OSError, ValueError):
        return None
    chain = [part for part in parts if _BUSID.fullmatch(part)]
    if not chain:
        return None
    numa = read_integer(pci_directory(sysfs, chain[-1]) / "numa_node")
    return PciPlace(
        busid=chain[-1],
        bridges=tuple(chain[-3::-2]),
        numa=None if numa is None or numa < 0 else numa,
        is_virtual_function=(pci_directory(sysfs, chain[-1]) / "physfn").exists(),
    )


def pci_directory(sysfs: Path, busid: str) -> Path:
    """Return the directory of a PCI device."""
    return sysfs / "bus" / "pci" / "devices" / busid


def pci_link(sysfs: Path, busid: str) -> tuple[Rates, str]:
    """Return the rates of a device's link to the port above it, and a note or "".

    The lesser of what both ends are capable of, not the current speed, which falls when idle. A
    port that claims less than a quarter of its device is an emulated one and left out of account.
    """
    directory = pci_directory(sysfs, busid)
    own = _capability(directory)
    if own is None:
        return Rates(), ""
    ends, note = [own], ""
    try:
        port = _capability(directory.resolve().parent)
    except OSError:
        port = None
    if port is not None:
        if port[0] * port[1] * 4 < own[0] * own[1]:
            note = f"{busid}: the port above claims {port[0]:g} GT/s x{port[1]}; virtual, left out"
        else:
            ends.append(port)
    speed, width = min(end[0] for end in ends), min(end[1] for end in ends)
    return pcie_rates(speed, width, Source.SYSFS), note


def _capability(directory: Path) -> tuple[float, int] | None:
    """Return GT/s and lanes that a PCI function is capable of, None where it does not say."""
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", read_value(directory / "max_link_speed") or "")
    width = read_integer(directory / "max_link_width")
    if speed is None or not width or width == 255:
        return None
    return float(speed[1]), width


def numa_nodes(sysfs: Path) -> list[int]:
    """Return the NUMA nodes that have CPUs; nodes made of GPU memory have none."""
    found = []
    for path in (sysfs / "devices" / "system" / "node").glob("node[0-9]*"):
        if read_value(path / "cpulist"):
            found.append(int(path.name.removeprefix("node")))
    return sorted(found)
