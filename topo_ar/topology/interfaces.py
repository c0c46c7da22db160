"""The network interfaces and RDMA devices of this machine that can carry data, and the others."""

import fcntl
import json
import re
import shutil
import socket
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from topo_ar.topology.model import Figure, LinkKind, Source
from topo_ar.topology.sysfs import PciPlace, pci_place, read_integer, read_value

_SIOCGIFADDR = 0x8915
_ETHERNET_TYPE, _INFINIBAND_TYPE = 1, 32
_TC_SECONDS = 5
_ASSUMED = Figure(10e9 / 8, Source.ASSUMED, "no speed is reported; 10 Gbit/s, as NCCL assumes")


@dataclass(frozen=True, slots=True)
class Interface:
    """A NIC: its name, kind and place, and what one direction of its port carries in bytes/s.

    `payload` is what TCP gets at the interface's MTU, None where the rate itself is assumed.
    """

    name: str
    kind: LinkKind
    place: PciPlace | None
    rate: Figure
    payload: Figure | None
    is_rdma: bool


@dataclass(frozen=True, slots=True)
class Interfaces:
    """The NICs that can carry data, and for each other interface why it cannot."""

    nics: tuple[Interface, ...]
    notes: tuple[str, ...]


class Kernel:
    """What sysfs does not tell of an interface; the tests of a made-up sysfs replace it."""

    def has_ipv4(self, name: str) -> bool:
        """Return whether the interface has an IPv4 address."""
        request = struct.pack("256s", name.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                return False
        return True

    def shaped_rate(self, name: str) -> float | None:
        """Return the rate of a token bucket (tbf) on the interface in bytes/s, None without one."""
        tc = shutil.which("tc") or shutil.which("tc", path="/usr/sbin:/sbin")
        if tc is None:
            return None
        command = [tc, "-j", "qdisc", "show", "dev", name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TC_SECONDS, check=True
            )
            rates = [q["options"]["rate"] for q in json.loads(done.stdout) if q["kind"] == "tbf"]
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
            return None
        return float(min(rates)) if rates else None


def find_interfaces(sysfs: Path, kernel: Kernel) -> Interfaces:
    """Return the NICs under `sysfs`, RDMA devices first, each kind in order of names."""
    notes: list[str] = []
    nics = [
        nic
        for path in _listing(sysfs / "class" / "infiniband")
        if (nic := _rdma(sysfs, path, notes)) is not None
    ]
    cards = {nic.place.busid: nic.name for nic in nics if nic.place}
    paths = _listing(sysfs / "class" / "net")
    for path in paths:
        reason = _why_not(path, kernel, paths)
        place = pci_place(sysfs, path / "device")
        if reason is None and place is not None and place.busid in cards:
            reason = f"it is the same card as {cards[place.busid]}"
        if reason is not None:
            notes.append(f"interface {path.name} is left out: {reason}")
        else:
            nics.append(_netdev(path, place, kernel))
    return Interfaces(tuple(nics), tuple(notes))


def _listing(directory: Path) -> list[Path]:
    """Return the entries of a directory, numbers in names in their order."""
    try:
        found = list(directory.iterdir())
    except OSError:
        return []
    return sorted(
        (path for path in found if path.is_dir()),
        key=lambda path: [
            (int(part), "") if part.isdigit() else (-1, part)
            for part in re.split(r"(\d+)", path.name)
        ],
    )


def _rdma(sysfs: Path, path: Path, notes: list[str]) -> Interface | None:
    place = pci_place(sysfs, path / "device")
    ports = [_rdma_port(port) for port in _listing(path / "ports")]
    active = [port for port in ports if port is not None]
    if place is not None and place.is_virtual_function:
        reason = "it is a virtual function of another card"
    elif not active:
        reason = "no port of it is active"
    else:
        gigabits = sum(rate for rate, _ in active)
        rate = Figure(gigabits * 1e9 / 8, Source.SYSFS, f"{gigabits:g} Gbit/s")
        kind = active[0][1]
        return Interface(path.name, kind, place, rate, None, is_rdma=True)
    notes.append(f"RDMA device {path.name} is left out: {reason}")
    return None


def _rdma_port(port: Path) -> tuple[float, LinkKind] | None:
    """Return Gbit/s and link layer of an active port, such as ``400 Gb/sec (4X NDR)``."""
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", read_value(port / "rate") or "")
    if "ACTIVE" not in (read_value(port / "state") or "") or rate is None:
        return None
    ethernet = read_value(port / "link_layer") == "Ethernet"
    return float(rate[1]), LinkKind.ETHERNET if ethernet else LinkKind.INFINIBAND


def _why_not(path: Path, kernel: Kernel, others: list[Path]) -> str | None:
    """Return why an interface carries no data between hosts, None if it may."""
    if read_integer(path / "type") not in (_ETHERNET_TYPE, _INFINIBAND_TYPE):
        return "it is a loopback or a tunnel"
    if (path / "tun_flags").exists():
        return "it is a tunnel"
    if (path / "bridge").exists():
        return "it is a bridge; its ports count"
    if (path / "device" / "physfn").exists():
        return "it is a virtual function of another card"
    if read_value(path / "operstate") != "up":
        return "it is not up"
    master = (path / "master").resolve() if (path / "master").exists() else None
    if master is not None and (master / "bonding").exists():
        return f"it is part of {master.name}"
    bridged = master is not None and (path / "device").exists() and kernel.has_ipv4(master.name)
    if not bridged and not kernel.has_ipv4(path.name):
        return "it has no IPv4 address"
    below = next((o.name for o in others if (path / f"lower_{o.name}").exists()), None)
    if below and kernel.has_ipv4(below) and not (path / "bonding").exists():
        return f"it sits on {below}, which counts"
    return None


def _netdev(path: Path, place: PciPlace | None, kernel: Kernel) -> Interface:
    shaped = kernel.shaped_rate(path.name)
    megabits = read_integer(path / "speed") or 0
    virtual = not (path / "device").exists() and not (path / "bonding").exists()
    # A token bucket counts the Ethernet header; a cable also preamble, checksum and gap.
    overhead = 14
    if shaped is not None:
        rate = Figure(shaped, Source.SYSFS, "tbf")
    elif megabits > 0:
        source = Source.ASSUMED if virtual else Source.SYSFS
        said = f"{megabits} Mbit/s"
        rate = Figure(
            megabits * 1e6 / 8, source, f"a virtual interface says {said}" if virtual else said
        )
        overhead = 38
    else:
        rate = _ASSUMED
    mtu = read_integer(path / "mtu") or 1500
    payload = None
    if rate.source is not Source.ASSUMED and mtu > 52:
        share = (mtu - 52) / (mtu + overhead)
        payload = Figure(rate.value * share, rate.source, f"TCP payload at MTU {mtu}, {rate.note}")
    infiniband = read_integer(path / "type") == _INFINIBAND_TYPE
    kind = LinkKind.INFINIBAND if infiniband else LinkKind.ETHERNET
    return Interface(path.name, kind, place, rate, payload, is_rdma=False)
