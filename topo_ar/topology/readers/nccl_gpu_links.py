"""NVLink, XGMI and C2C rows of a GPU in NCCL's XML.

A row is one GPU's view: a target and a number of links. A far end that is the GPU itself, or
hidden, is no peer.
"""

from collections import Counter
from dataclasses import dataclass

from topo_ar.topology.gpu_links import (
    Counts,
    GpuLinks,
    GpuModel,
    connect_gpus,
    is_sentinel,
    nvswitch,
)
from topo_ar.topology.model import Figure, Link, LinkKind, Source
from topo_ar.topology.readers.xml_tree import Element

_GPU_CLASSES = ("0x03", "0x12")
_CPU_CLASS = "0x068001"
_NVSWITCH_CLASS = "0x0680"


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A GPU as the file has it; `element` is None in a hint file."""

    device: str
    node: str
    cpu: str
    busid: str
    element: Element | None


def read_gpu_links(gpus: list[GpuRow]) -> GpuLinks:
    """Return the links, NVSwitches and notes that the rows of `gpus` give."""
    counts: Counts = Counter()
    notes: list[str] = []
    c2c: list[Link] = []
    # Of several GPUs in one PCI device the first stands for the device.
    by_busid = {(gpu.node, gpu.busid): gpu for gpu in reversed(gpus)}
    for gpu in gpus:
        for row in gpu.element.children if gpu.element else []:
            if row.tag in ("nvlink", "xgmi"):
                far = _far_end(gpu, row, by_busid, notes)
                if far is not None:
                    counts[gpu.device, far, LinkKind(row.tag)] += row.integer("count") or 0
            elif row.tag == "c2c":
                c2c.append(_c2c_link(gpu, row))
    found = connect_gpus(
        {gpu.device: _model(gpu) for gpu in gpus},
        counts,
        Source.FILE,
        [gpu.device for gpu in gpus if gpu.element],
    )
    return GpuLinks((*found.links, *c2c), found.switches, (*notes, *found.notes))


def _model(gpu: GpuRow) -> GpuModel:
    if gpu.element is None:
        return GpuModel(gpu.node)
    return GpuModel(gpu.node, gpu.element.integer("sm"), gpu.element.text("gcn"))


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
    if target and not is_sentinel(target) and tclass.startswith(_GPU_CLASSES):
        notes.append(f"{gpu.device}: {count} {row.tag} links to {target}, which the file lacks")
        return None
    if not tclass.startswith(_NVSWITCH_CLASS):
        notes.append(
            f"{gpu.device}: {count} {row.tag} links end where the file does not look; "
            "taken to be an NVSwitch"
        )
    return nvswitch(gpu.node)


def _c2c_link(gpu: GpuRow, row: Element) -> Link:
    """Return the C2C link of a GPU to its CPU; ``bw`` is MB/s for each of ``count`` links."""
    count = row.integer("count") or 1
    megabytes = row.number("bw")
    rate = Figure(megabytes * count * 1e6, Source.FILE) if megabytes and megabytes > 0 else None
    return Link(gpu.device, gpu.cpu, LinkKind.C2C, effective=rate, count=max(count, 1))
