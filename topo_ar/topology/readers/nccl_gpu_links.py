"""NVLink, XGMI and C2C rows of a GPU in NCCL's XML, turned into links.

A row is one GPU's view: a target and a number of links. Rows of both ends must agree; a far end
that is the GPU itself, or hidden, is no peer.
"""

from collections import Counter
from dataclasses import dataclass

from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source
from topo_ar.topology.rates import Rates, nvlink_rates, xgmi_rates
from topo_ar.topology.readers.xml_tree import Element

_GPU_CLASSES = ("0x03", "0x12")
_CPU_CLASS = "0x068001"


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A GPU as the file has it; `element` is None in a hint file."""

    device: str
    node: str
    cpu: str
    busid: str
    element: Element | None


def connect_gpus(
    gpus: list[GpuRow], links: list[Link], devices: list[Device], notes: list[str]
) -> None:
    """Append the links that the rows of `gpus` describe, NVSwitches they need, and notes."""
    seen = Counter[tuple[str, str, LinkKind]]()
    by_busid = {(gpu.node, gpu.busid): gpu for gpu in gpus}
    for gpu in gpus:
        for row in gpu.element.children if gpu.element else []:
            if row.tag in ("nvlink", "xgmi"):
                far = _far_end(gpu, row, by_busid, notes)
                if far is not None:
                    seen[gpu.device, far, LinkKind(row.tag)] += row.integer("count") or 0
            elif row.tag == "c2c":
                links.append(_c2c_link(gpu, row))
    by_device = {gpu.device: gpu for gpu in gpus}
    for (a, b, kind), count in seen.items():
        peer = b in by_device
        back = seen.get((b, a, kind))
        if peer and back is not None and a > b:
            continue
        if peer and back != count:
            notes.append(_disagreement(a, b, kind, count, back))
            count = min(count, back) if back else count
        if count < 1:
            continue
        if not peer and all(device.id != b for device in devices):
            devices.append(Device(b, DeviceKind.NVSWITCH, by_device[a].node))
        rates = min(
            (_rates(by_device[end], kind, count) for end in (a, b) if end in by_device),
            key=lambda rates: rates.nominal.value if rates.nominal else 0.0,
        )
        links.append(Link(a, b, kind, rates.nominal, rates.effective, count=count))
        if rates.nominal is None:
            notes.append(f"{a} - {b}: rate of {kind.value} not known for this GPU")
    notes.extend(_missing_links(gpus, seen))


def _far_end(
    gpu: GpuRow, row: Element, by_busid: dict[tuple[str, str], GpuRow], notes: list[str]
) -> str | None:
    """Return the device a row leads to, or None where it leads to no other device of the file."""
    target = (row.text("target") or "").lower()
    tclass = (row.text("tclass") or "").lower()
    count = row.integer("count") or 0
    if target == gpu.busid:
        notes.append(
            f"{gpu.device}: {count} {row.tag} links name the GPU itself as far end; left out, "
            "so its links are not known"
        )
        return None
    peer = by_busid.get((gpu.node, target))
    if peer is not None:
        return peer.device
    if tclass.startswith(_CPU_CLASS):
        return gpu.cpu
    if target and not _is_sentinel(target) and tclass.startswith(_GPU_CLASSES):
        notes.append(f"{gpu.device}: {count} {row.tag} links to {target}, which the file lacks")
        return None
    if not tclass.startswith("0x0680"):
        notes.append(
            f"{gpu.device}: {count} {row.tag} links end where the file does not look; "
            "taken to be an NVSwitch"
        )
    return f"{gpu.node}/nvswitch"


def _is_sentinel(busid: str) -> bool:
    return not set(busid) - set("f:.0") and busid.startswith("ffff")


def _rates(gpu: GpuRow, kind: LinkKind, count: int) -> Rates:
    assert gpu.element is not None
    if kind is LinkKind.XGMI:
        return xgmi_rates(gpu.element.text("gcn"), count, Source.FILE)
    return nvlink_rates(gpu.element.integer("sm"), count, Source.FILE)


def _c2c_link(gpu: GpuRow, row: Element) -> Link:
    """Return the C2C link of a GPU to its CPU; ``bw`` is MB/s for each of ``count`` links."""
    count = row.integer("count") or 1
    megabytes = row.number("bw")
    rate = Figure(megabytes * count * 1e6, Source.FILE) if megabytes and megabytes > 0 else None
    return Link(gpu.device, gpu.cpu, LinkKind.C2C, effective=rate, count=max(count, 1))


def _disagreement(a: str, b: str, kind: LinkKind, count: int, back: int | None) -> str:
    if back is None:
        return f"{a} - {b}: {count} {kind.value} links reported by {a} only"
    return f"{a} - {b}: {count} {kind.value} links from one end, {back} from the other; fewer count"


def _missing_links(gpus: list[GpuRow], seen: Counter[tuple[str, str, LinkKind]]) -> list[str]:
    """Name each GPU that shows no link while others of its node do."""
    totals = Counter[str]()
    for (device, _, _), count in seen.items():
        totals[device] += count
    notes = []
    for gpu in gpus:
        others = [totals[other.device] for other in gpus if other.node == gpu.node]
        if totals[gpu.device] == 0 and max(others) > 0:
            notes.append(
                f"{gpu.device}: 0 links in the file, its neighbours have up to {max(others)}; "
                "it may be missing rather than absent, and the GPU counts as PCIe only"
            )
    return notes
