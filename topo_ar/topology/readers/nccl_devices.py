"""The devices of an NCCL topology file while it is read: collected, then named, then added."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from topo_ar.errors import TopologyError
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
from topo_ar.topology.names import FABRIC
from topo_ar.topology.rates import pcie_rates
from topo_ar.topology.readers.xml_tree import Element
from topo_ar.topology.wording import some

LINKS_KNOWN = "links_known"
"""Attribute of a GPU: false where the file says nothing about NVLink, as hint files do."""

NET_ATTRIBUTES = ("dev", "port", "guid", "maxconn", "coll", "rail", "plane")
"""What is kept of a port beside its name, speed and latency."""

# Names in one note; what is left out of a real machine is fewer.
_SHOWN = 64
# GT/s of a lane; a larger number is no speed.
_FASTEST_LANE = 1000.0
_INFINIBAND_CLASSES = ("0x0207", "0x0c06")


@dataclass(frozen=True, slots=True)
class Pending:
    """A GPU or NIC whose id waits until all are known."""

    kind: DeviceKind
    node: str
    numa: int | None
    cpu: str
    parent: str
    pci: Element | None
    inner: Element | None

    @property
    def busid(self) -> str:
        """The PCI bus id in lower case, empty where the device has no PCI path."""
        return self.pci.attributes["busid"].lower() if self.pci else ""


@dataclass(slots=True)
class Draft:
    """A topology in the making.

    `gaps` collects for each thing that is missing where it is; `peers` are rows of PCIe switches
    that name a peer: node, own id, bus id of the peer.
    """

    name: str
    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    ids: dict[int, str] = field(default_factory=dict)
    gaps: dict[str, list[str]] = field(default_factory=dict)
    peers: list[tuple[str, str, str]] = field(default_factory=list)
    places: dict[str, Element] = field(default_factory=dict)

    def lacks(self, what: str, where: str) -> None:
        """Remember that the file does not say `what` of `where`."""
        self.gaps.setdefault(what, []).append(where)

    def claim(self, device_id: str, element: Element) -> None:
        """Remember where the file describes a device.

        Raises
        ------
        TopologyError
            If it does so twice; the message names both lines.
        """
        if (first := self.places.setdefault(device_id, element)) is not element:
            raise TopologyError(
                f"{element.place}: {device_id} is described in line {first.line} already; "
                "each NUMA node and bus id of a host is there once"
            )

    def gpus(self) -> list[tuple[str, Pending]]:
        """Return each GPU with its id, in file order; call after `name_devices`."""
        pending = enumerate(self.pending)
        return [(self.ids[i], found) for i, found in pending if found.kind is DeviceKind.GPU]

    def topology(self) -> Topology:
        """Return the finished topology; GPUs are ranks as the file numbers them, or by bus id."""
        gpus = self.gpus()
        given = [gpu.inner.integer("rank") if gpu.inner else None for _, gpu in gpus]
        numbers = [rank for rank in given if rank is not None]
        if len(set(numbers)) == len(gpus):
            ranks = [device for _, (device, _) in sorted(zip(numbers, gpus, strict=True))]
        else:
            ranks = [i for i, gpu in sorted(gpus, key=lambda p: (p[1].node, p[1].busid))]
            self.notes.append("the file gives no ranks; GPUs are ranks in order of their bus ids")
        gaps = [f"{what}: {some(where, _SHOWN)}" for what, where in self.gaps.items()]
        return validate(
            Topology(
                name=self.name,
                devices=tuple(self.devices),
                links=tuple(self.links),
                ranks=tuple(ranks),
                notes=(*self.notes, *gaps),
            )
        )


def pci_attributes(pci: Element) -> dict[str, str | int | float | bool]:
    """Return what identifies a PCI device, in lower case."""
    kept = ("busid", "class", "vendor", "device", "subsystem_vendor", "subsystem_device")
    return {name: value.lower() for name in kept if (value := pci.text(name))}


def pcie_link(draft: Draft, pci: Element, device_id: str, parent: str) -> Link:
    """Return the link of a PCI device to the bridge or CPU above it."""
    match = re.match(r"\d+(?:\.\d+)?", pci.text("link_speed") or "")
    speed, width = float(match[0]) if match else 0.0, pci.integer("link_width") or 0
    if not speed <= _FASTEST_LANE:
        speed = 0.0
    if speed > 0 and width > 0:
        rates = pcie_rates(speed, width, Source.FILE)
    else:
        speed, width = speed or 8.0, width if width > 0 else 16
        note = f"PCIe {speed:g} GT/s x{width} assumed, as NCCL does"
        rates = pcie_rates(speed, width, Source.ASSUMED, note)
        draft.lacks(f"link speed or width not in the file, {note}", pci.attributes["busid"])
    return Link(device_id, parent, LinkKind.PCIE, rates.nominal, rates.effective)


def name_devices(draft: Draft) -> None:
    """Give every GPU and NIC its id and add it: by its ``dev``, else by the order of bus ids."""
    taken = {device.id for device in draft.devices}
    order = sorted(range(len(draft.pending)), key=lambda i: draft.pending[i].busid)
    next_free = dict[tuple[str, DeviceKind], int]()
    for index in order:
        found = draft.pending[index]
        described = found.inner if found.kind is DeviceKind.GPU else _first_net(found)
        number = described.integer("dev") if described else None
        key = (found.node, found.kind)
        if number is None:
            number = next_free.get(key, 0)
            next_free[key] = number + 1
        device_id = f"{found.node}/{found.kind.value}{number}"
        if device_id in taken:
            device_id += f"@{found.busid}"
        if device_id in taken:
            device_id = next(n for i in count(1) if (n := f"{device_id}.{i}") not in taken)
        draft.ids[index] = device_id
        taken.add(device_id)
    for index, found in enumerate(draft.pending):
        if found.kind is DeviceKind.GPU:
            _add_gpu(draft, draft.ids[index], found)
        else:
            _add_nic(draft, draft.ids[index], found)
    hints = sum(gpu.inner is None for _, gpu in draft.gpus())
    if hints:
        draft.notes.append(
            f"{hints} GPU-class devices; NVLink is not described, which is not the same as "
            "no NVLink"
        )


def join_peers(draft: Draft) -> None:
    """Join PCIe switches that name each other as peers (rows ``pcilink``), without a rate."""
    known = {device.id for device in draft.devices}
    joined = set[tuple[str, str]]()
    for node, own, busid in draft.peers:
        far = f"{node}/pci-{busid}"
        pair = (min(own, far), max(own, far))
        if far not in known or far == own:
            draft.lacks("peer of a PCIe switch that the file lacks, left out", busid)
        elif pair not in joined:
            joined.add(pair)
            draft.links.append(Link(*pair, LinkKind.PCIE))
            draft.lacks("rate between PCIe switches that are peers not in the file", own)


def _first_net(found: Pending) -> Element | None:
    nets = found.inner.each("net") if found.inner else []
    return nets[0] if nets else None


def _add_gpu(draft: Draft, device_id: str, gpu: Pending) -> None:
    assert gpu.pci is not None
    attributes = pci_attributes(gpu.pci)
    if gpu.inner is None:
        attributes[LINKS_KNOWN] = False
    else:
        for name in ("dev", "sm", "gcn", "arch", "gdr", "mlopart"):
            if value := gpu.inner.text(name):
                attributes[name] = value
    draft.devices.append(Device(device_id, DeviceKind.GPU, gpu.node, gpu.numa, attributes))
    draft.links.append(pcie_link(draft, gpu.pci, device_id, gpu.parent))


def _add_nic(draft: Draft, device_id: str, nic: Pending) -> None:
    attributes = pci_attributes(nic.pci) if nic.pci else {}
    nets = [net for net in (nic.inner.each("net") if nic.inner else []) if net.text("net") != "0"]
    if nets:
        attributes["name"] = ",".join(net.text("name") or "" for net in nets)
        attributes["gdr"] = nets[0].text("gdr") or "0"
        attributes |= _net_attributes(nets)
    draft.devices.append(Device(device_id, DeviceKind.NIC, nic.node, nic.numa, attributes))
    if nic.pci is not None:
        draft.links.append(pcie_link(draft, nic.pci, device_id, nic.parent))
    else:
        draft.lacks("no PCI path in the file, taken to hang on its CPU", device_id)
        draft.links.append(Link(device_id, nic.parent, LinkKind.PCIE))
    if not nets:
        draft.lacks("speed of the port not in the file", device_id)
        return
    if all(device.id != FABRIC for device in draft.devices):
        draft.devices.append(Device(FABRIC, DeviceKind.SWITCH))
    pci_class = str(attributes.get("class", ""))
    infiniband = pci_class.startswith(_INFINIBAND_CLASSES)
    latency = nets[0].number("latency") or 0.0
    draft.links.append(
        Link(
            device_id,
            FABRIC,
            LinkKind.INFINIBAND if infiniband else LinkKind.ETHERNET,
            nominal=_port_rate(draft, device_id, nets),
            # The file's figure is for a message, which crosses two such links.
            latency=Figure(latency * 1e-6 / 2, Source.FILE) if latency > 0 else None,
            count=len(nets),
        )
    )


def _net_attributes(nets: Sequence[Element]) -> dict[str, str | int | float | bool]:
    """Return what identifies the ports of a NIC, one value a port joined by commas."""
    found: dict[str, str | int | float | bool] = {}
    for name in NET_ATTRIBUTES:
        values = [net.text(name) or "" for net in nets]
        if any(values):
            found[name] = ",".join(values)
    if len({net.text("speed") for net in nets}) > 1:
        found["speed"] = ",".join(net.text("speed") or "" for net in nets)
    return found


def _port_rate(draft: Draft, device_id: str, nets: list[Element]) -> Figure:
    """Return the sum of the ports; a port without a speed counts 10 Gbit/s, as in NCCL."""
    speeds = [net.integer("speed") or 0 for net in nets]
    source, note = Source.FILE, f"{'+'.join(map(str, speeds))} Mbit/s"
    if min(speeds) <= 0:
        source, note = Source.ASSUMED, "10 Gbit/s assumed, as NCCL does"
        draft.lacks(f"speed of a port not in the file, {note}", device_id)
    return Figure(sum(s if s > 0 else 10_000 for s in speeds) * 1e6 / 8, source, note)
