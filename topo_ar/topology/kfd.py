"""The AMD GPUs of a machine and their XGMI links, as the kernel's compute driver describes them.

``/sys/class/kfd/kfd/topology/nodes/N`` holds a file ``properties`` for every CPU and GPU, and one
for each of its links below ``io_links`` (and ``p2p_links`` on newer kernels). Link type 11 is XGMI
and 2 is PCIe (the kernel's ``kfd_crat.h``); user-space libraries number them otherwise. The driver
shows parallel links of a pair as one and does not say how many they are.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from topo_ar.topology.gpu_links import NO_LINKS, Counts, GpuLinks, GpuModel, connect_gpus
from topo_ar.topology.model import LinkKind, Source
from topo_ar.topology.sysfs import read_value

_XGMI = 11
_NODES = ("class", "kfd", "kfd", "topology", "nodes")


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """A GPU by its number among GPUs; `gfx` is its architecture, such as ``gfx942``."""

    device: str
    busid: str
    gfx: str


@dataclass(frozen=True, slots=True)
class AmdGpus:
    """All GPUs in the driver's order, and the XGMI links between them."""

    gpus: tuple[AmdGpu, ...] = ()
    links: GpuLinks = NO_LINKS
    notes: tuple[str, ...] = ()


def probe_amd_gpus(sysfs: Path, node: str) -> AmdGpus:
    """Return the AMD GPUs under `sysfs`; none where the driver is not loaded.

    Raises nothing: what cannot be read is said in a note.
    """
    numbers: dict[int, AmdGpu] = {}
    notes = []
    for directory in _numbered(sysfs.joinpath(*_NODES)):
        properties = _properties(directory / "properties")
        if not properties.get("simd_count"):
            continue
        if "location_id" not in properties:
            notes.append(
                f"KFD node {directory.name} is a GPU without a bus id; it is left out (its "
                "properties may be hidden from this container)"
            )
            continue
        number = int(directory.name)
        numbers[number] = AmdGpu(f"{node}/gpu{len(numbers)}", _busid(properties), _gfx(properties))
    counts: Counts = Counter()
    for number, gpu in numbers.items():
        for directory in _numbered(sysfs.joinpath(*_NODES, str(number), "io_links")):
            link = _properties(directory / "properties")
            far = numbers.get(link.get("node_to", -1))
            if link.get("type") == _XGMI and far is not None:
                counts[gpu.device, far.device, LinkKind.XGMI] += 1
    models = {gpu.device: GpuModel(node, gcn=gpu.gfx) for gpu in numbers.values()}
    links = connect_gpus(models, counts, Source.SYSFS, list(models))
    if links.links:
        notes.append("XGMI: parallel links of a pair count once; the driver does not tell them")
    return AmdGpus(tuple(numbers.values()), links, (*notes, *links.notes))


def _numbered(directory: Path) -> list[Path]:
    try:
        found = [path for path in directory.iterdir() if path.name.isdigit()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))


def _properties(path: Path) -> dict[str, int]:
    """Return the file's lines ``name number``; empty where it cannot be read."""
    found = {}
    for line in (read_value(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[name] = int(value)
    return found


def _busid(properties: dict[str, int]) -> str:
    location = properties["location_id"]
    domain = properties.get("domain", 0)
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7:x}"


def _gfx(properties: dict[str, int]) -> str:
    """Return the architecture: 90402 in the file is major 9, minor 4, stepping 2, ``gfx942``."""
    version = properties.get("gfx_target_version", 0)
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
