"""NCCL's topology XML, version 1, and RCCL's, version 2 (XGMI instead of NVLink).

Dumps (``NCCL_TOPO_DUMP_FILE``) and the hint files of clouds are read. A hint file names PCI
devices only: its GPUs are known by class and say nothing about NVLink.
"""

from collections.abc import Iterator

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Source, Topology
from topo_ar.topology.rates import interconnect_rate
from topo_ar.topology.readers.nccl_devices import (
    Draft,
    Pending,
    join_peers,
    name_devices,
    pci_attributes,
    pcie_link,
)
from topo_ar.topology.readers.nccl_gpu_links import GpuRow, read_gpu_links
from topo_ar.topology.readers.xml_tree import Element, parse
from topo_ar.topology.wording import some

FORMAT = "nccl-xml"

_KNOWN = {
    "system": {"version", "name"},
    "cpu": {"numaid", "host_hash", "affinity", "arch", "vendor", "familyid", "modelid"},
    "pci": {
        *("busid", "class", "vendor", "device", "subsystem_vendor", "subsystem_device"),
        *("link_speed", "link_width"),
    },
    "gpu": {"dev", "sm", "rank", "gdr", "mlopart", "keep", "gcn", "arch"},
    "nvlink": {"target", "count", "tclass"},
    "xgmi": {"target", "count", "tclass"},
    "c2c": {"bw", "count"},
    "pcilink": {"target"},
    "nic": set[str](),
    "net": {
        *("name", "dev", "latency", "speed", "port", "guid", "maxconn", "gdr", "coll", "rail"),
        *("plane", "net", "gin", "rma", "keep"),
    },
}
_GPU_CLASSES = ("0x03", "0x12")
_NIC_CLASSES = ("0x02", "0x0c06")
_NVSWITCH_CLASS = "0x068000"
_MOST_CPUS = 1024


def matches(text: str) -> bool:
    """Return whether `text` looks like XML, of which NCCL's is the only kind known."""
    return text.lstrip("\ufeff \t\r\n").startswith("<")


def read_text(text: str, name: str) -> Topology:
    """Return the topology in `text`, which comes from the file `name`.

    Raises
    ------
    TopologyError
        If `text` is no XML, another kind of XML, or of another version; the message names file
        and line.
    """
    root = parse(text, name)
    if root.tag == "graphs":
        raise TopologyError(
            f"{root.place}: <graphs> is the result of NCCL's channel search, not a topology; "
            "give the file that NCCL_TOPO_DUMP_FILE writes"
        )
    if root.tag != "system":
        raise TopologyError(f"{root.place}: <{root.tag}> is no known root; NCCL's is <system>")
    _require_version(root)
    draft = Draft(name)
    draft.notes += _unknown_parts(root)
    nodes = dict[str, str]()
    cpus: dict[str, list[tuple[str, Element]]] = {}
    for index, cpu in enumerate(root.each("cpu")):
        node = nodes.setdefault(cpu.attributes.get("host_hash", ""), f"node{len(nodes)}")
        cpus.setdefault(node, []).append((_add_cpu(draft, cpu, index, node), cpu))
    if not cpus:
        raise TopologyError(f"{root.place}: <system> holds no <cpu>, so there is no machine in it")
    for together in cpus.values():
        _join_cpus(draft, together)
    name_devices(draft)
    join_peers(draft)
    rows = [GpuRow(i, gpu.node, gpu.cpu, gpu.busid, gpu.inner) for i, gpu in draft.gpus()]
    found = read_gpu_links(rows)
    draft.devices += found.switches
    draft.links += found.links
    draft.notes += found.notes
    return draft.topology()


def _require_version(root: Element) -> None:
    version = root.text("version")
    amd = any(e.tag == "xgmi" or "gcn" in e.attributes for e in _walk(root))
    if version == "1" or (version == "2" and amd):
        return
    known = "1, or 2 for a file of RCCL with AMD GPUs" if version == "2" else "1 (NCCL), 2 (RCCL)"
    raise TopologyError(
        f"{root.place}: attribute version of <system>: found {version or 'none'}, known is {known}"
    )


def _walk(element: Element) -> Iterator[Element]:
    yield element
    for child in element.children:
        yield from _walk(child)


def _unknown_parts(root: Element) -> list[str]:
    """Say which elements and attributes are left out, each kind once with its lines."""
    where: dict[str, list[str]] = {}
    for element in _walk(root):
        known = _KNOWN.get(element.tag)
        if known is None:
            where.setdefault(f"element <{element.tag}> is not known", []).append(str(element.line))
        elif unknown := sorted(element.attributes.keys() - known):
            what = f"<{element.tag}> has unknown {some(unknown)}"
            where.setdefault(what, []).append(str(element.line))
    return [f"line {some(lines)}: {what}; left out" for what, lines in where.items()]


def _add_cpu(draft: Draft, cpu: Element, index: int, node: str) -> str:
    """Add a CPU with all that hangs on it; return its id."""
    numa = cpu.integer("numaid")
    numa = None if numa is None or numa < 0 else numa
    device_id = f"{node}/numa{numa}" if numa is not None else f"{node}/cpu{index}"
    if numa is None:
        draft.lacks("NUMA node not known, taken to be as far from all others", f"cpu {index}")
    if missing := [name for name in ("arch", "vendor") if cpu.text(name) is None]:
        draft.notes.append(f"cpu {index}: {', '.join(missing)} not in the file")
    kept = ("arch", "vendor", "familyid", "modelid", "affinity")
    draft.devices.append(
        Device(device_id, DeviceKind.CPU, node, numa, {k: v for k in kept if (v := cpu.text(k))})
    )
    draft.claim(device_id, cpu)
    for pci in cpu.each("pci"):
        _add_pci(draft, pci, node, numa, device_id, device_id)
    for nic in cpu.each("nic"):
        draft.pending.append(Pending(DeviceKind.NIC, node, numa, device_id, device_id, None, nic))
    return device_id


def _add_pci(
    draft: Draft, pci: Element, node: str, numa: int | None, cpu: str, parent: str
) -> None:
    busid = (pci.text("busid") or "").lower()
    if not busid:
        raise TopologyError(f"{pci.place}: <pci> has no busid; each PCI device needs one")
    pci_class = (pci.text("class") or "").lower()
    gpus, nics, below = pci.each("gpu"), pci.each("nic"), pci.each("pci")
    if gpus or (pci_class.startswith(_GPU_CLASSES) and not below and not nics):
        kind, inner = DeviceKind.GPU, gpus[0] if gpus else None
    elif nics or (pci_class.startswith(_NIC_CLASSES) and not below):
        kind, inner = DeviceKind.NIC, nics[0] if nics else None
    elif pci_class.startswith(_NVSWITCH_CLASS):
        draft.lacks("NVSwitch, joined with the node's others into one device", busid)
        return
    else:
        _add_bridge(draft, pci, node, numa, cpu, parent)
        return
    parts = gpus[1:] if kind is DeviceKind.GPU else []
    if parts:
        draft.lacks("one PCI device with several GPUs (MLOPart), which share its links", busid)
    if len(nics) > 1 or (gpus and nics):
        draft.lacks("several functions in one PCI device, only the first is read", busid)
    for each in (inner, *parts):
        draft.pending.append(Pending(kind, node, numa, cpu, parent, pci, each))


def _add_bridge(
    draft: Draft, pci: Element, node: str, numa: int | None, cpu: str, parent: str
) -> None:
    busid = pci.attributes["busid"].lower()
    device_id = f"{node}/pci-{busid}"
    draft.claim(device_id, pci)
    if pci.text("class") is None:
        draft.lacks("PCI device without a class, what it is cannot be told", busid)
    draft.devices.append(Device(device_id, DeviceKind.PCIE_SWITCH, node, numa, pci_attributes(pci)))
    draft.links.append(pcie_link(draft, pci, device_id, parent))
    for child in pci.each("pci"):
        _add_pci(draft, child, node, numa, cpu, device_id)
    for row in pci.each("pcilink"):
        draft.peers.append((node, device_id, (row.text("target") or "").lower()))


def _join_cpus(draft: Draft, cpus: list[tuple[str, Element]]) -> None:
    """Join all CPUs of a host with each other, as NCCL does."""
    if len(cpus) > _MOST_CPUS:
        raise TopologyError(
            f"{cpus[_MOST_CPUS][1].place}: more than {_MOST_CPUS} <cpu> of one host; each is a "
            "NUMA node, of which Linux knows no more"
        )
    for i, (a, cpu) in enumerate(cpus):
        for b, other in cpus[i + 1 :]:
            weaker = cpu if cpu.text("vendor") is None or cpu.text("arch") is None else other
            rate = interconnect_rate(
                weaker.text("arch"), weaker.text("vendor"), weaker.integer("modelid"), Source.FILE
            )
            draft.links.append(Link(a, b, LinkKind.UPI, effective=rate))
