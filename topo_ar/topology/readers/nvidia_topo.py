"""The matrix of ``nvidia-smi topo -m``: how near GPUs and NICs are to each other.

The matrix prints classes, not devices. The PCIe tree is inferred from them, and NVLinks are
counted, but neither has a rate.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

from topo_ar.errors import TopologyError
from topo_ar.topology.gpu_links import nvswitch
from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology, validate
from topo_ar.topology.names import NODE
from topo_ar.topology.readers.inferred_tree import Leaf, Pair, SmiClass, infer_tree
from topo_ar.topology.readers.smi_matrix import Matrix, find_header, plain_lines, read_matrix
from topo_ar.topology.wording import some

FORMAT = "nvidia-smi-topo"

_FAILURES = re.compile(
    r"Failed to run topology matrix|Failed to initialize NVML|NVIDIA-SMI has failed"
    r"|No devices were found|Connection traversing",
    re.IGNORECASE,
)
_WORDS = {**{level.name: level for level in SmiClass}, "SOC": SmiClass.SYS}
# No GPU so far has more NVLinks; where a row counts more, the pairs share them over a switch.
_MOST_NVLINKS = 18
# nvidia-smi cuts long lists of CPUs; complete ones of this length exist, so this is a suspicion.
_LONG_CPU_LIST = 20


def matches(text: str) -> bool:
    """Return whether `text` has such a matrix, its legend or what the tool says instead of it."""
    return find_header(plain_lines(text)) is not None or _FAILURES.search(text) is not None


def read_text(text: str, name: str) -> Topology:
    """Return the machine in `text`, which comes from the file `name`; GPUs are ranks.

    Raises
    ------
    TopologyError
        If there is no matrix, or it is no matrix of one machine; the message names the file and
        quotes what the tool said instead.
    """
    lines = plain_lines(text)
    start = find_header(lines)
    if start is None:
        said = next(line.strip() for line in lines if line.strip())
        raise TopologyError(
            f"{name}: holds no matrix; the tool says {said[:100]!r}; run `topo-ar probe` on the "
            "machine, or give the file that NCCL_TOPO_DUMP_FILE writes"
        )
    matrix = read_matrix(lines, start, name)
    ids = _ids(matrix.devices, name)
    names = dict(re.findall(r"^[ \t]*(NIC\d+):[ \t]*(\S+)", "\n".join(lines), re.MULTILINE))
    notes = [*matrix.notes]
    printed, nvlinks = _pairs(matrix, notes)
    leaves = [_leaf(device, ids[device], matrix) for device in matrix.devices]
    tree = infer_tree(NODE, leaves, printed)
    devices = [*tree.devices]
    for device, leaf in zip(matrix.devices, leaves, strict=True):
        affinity = matrix.rows[device].affinity if device in matrix.rows else {}
        devices.append(_device(device, leaf, affinity, names, tree.host_bridges, notes))
    gpus = [ids[device] for device in matrix.devices if _is_gpu(device)]
    switches, links = _nvlinks([leaf.device for leaf in leaves], nvlinks, notes)
    farther: dict[tuple[SmiClass, SmiClass], list[str]] = {}
    for (a, b), level in tree.farther:
        pair = f"{matrix.devices[a]} - {matrix.devices[b]}"
        farther.setdefault((printed[a, b], level), []).append(pair)
    notes += [
        f"{some(pairs, 4)}: {said.name} is printed, which fits no tree together with the other "
        f"pairs; {kept.name} is kept"
        for (said, kept), pairs in farther.items()
    ]
    if tree.unplaced:
        notes.append(f"place on PCIe not known: {', '.join(tree.unplaced)}")
    if nics := [d for d in devices if d.kind is DeviceKind.NIC]:
        notes.append("the rates of the NICs' ports are not in the matrix")
        if nameless := [d.id for d in nics if "name" not in d.attributes]:
            notes.append(f"names not in the legend: {some(nameless, 16)}")
    else:
        notes.append("the matrix names no NIC; it lists RDMA verbs devices only")
    notes.append("CPUs, PCIe switches and their links are inferred from the classes of the pairs")
    return validate(
        Topology(
            name=name,
            devices=(*devices, *switches),
            links=(*tree.links, *links),
            ranks=tuple(gpus),
            notes=tuple(notes),
        )
    )


def _ids(devices: Sequence[str], name: str) -> dict[str, str]:
    """Return the id of each column: GPUs and NICs by their number, other NICs by their order."""
    ids = {}
    for device in devices:
        if _is_gpu(device) or re.fullmatch(r"NIC\d{1,6}", device):
            ids[device] = f"{NODE}/{device[:3].lower()}{int(device[3:])}"
    others = [device for device in devices if device not in ids]
    ids |= {device: f"{NODE}/nic{i}" for i, device in enumerate(others)}
    if len(set(ids.values())) < len(devices):
        raise TopologyError(f"{name}: two columns are the same device; columns are {devices}")
    return ids


def _is_gpu(device: str) -> bool:
    return re.fullmatch(r"GPU\d{1,6}", device) is not None


def _pairs(matrix: Matrix, notes: list[str]) -> tuple[dict[Pair, SmiClass], dict[Pair, int]]:
    """Return the PCIe class, or else the number of NVLinks, of each pair that is printed."""
    printed: dict[Pair, SmiClass] = {}
    nvlinks: dict[Pair, int] = {}
    unknown: dict[str, list[str]] = {}
    unequal: dict[tuple[str, str], list[str]] = {}
    grid = matrix.grid()
    for a, b in combinations(range(len(matrix.devices)), 2):
        ends = (matrix.devices[a], matrix.devices[b])
        pair = " - ".join(ends)
        cells = [cell for cell in (grid[a][b], grid[b][a]) if cell]
        known = [read for cell in cells if (read := _read(cell, ends)) is not None]
        if len(known) < len(cells) or not cells:
            odd = [cell for cell in cells if _read(cell, ends) is None]
            what = f"{odd[0][:40]!r} is no class" if odd else "no class is printed"
            unknown.setdefault(what, []).append(pair)
        if len(known) == 2 and known[0] != known[1]:
            unequal.setdefault((cells[0], cells[1]), []).append(pair)
        if not known:
            continue
        level, links = max(known)
        if links:
            nvlinks[a, b] = -links
        else:
            printed[a, b] = SmiClass(level)
    notes += [
        f"{some(pairs, 4)}: {there} one way, {back} the other; the worse counts"
        for (there, back), pairs in unequal.items()
    ]
    notes += [f"{what}: {some(pairs, 4)}; unknown" for what, pairs in unknown.items()]
    return printed, nvlinks


def _read(cell: str, ends: tuple[str, str]) -> tuple[int, int] | None:
    """Return (class, 0) or (0, minus the NVLinks), so that the greater is the worse; or None."""
    if cell in _WORDS:
        return _WORDS[cell], 0
    match = re.fullmatch(r"NV([1-9]\d{0,2})", cell)
    gpus = all(map(_is_gpu, ends))
    return (0, -int(match[1])) if match and gpus else None


def _leaf(device: str, device_id: str, matrix: Matrix) -> Leaf:
    row = matrix.rows.get(device)
    if row is None or not _is_gpu(device):
        return Leaf(device_id)
    numa = row.affinity.get("NUMA Affinity", "")
    cpus = row.affinity.get("CPU Affinity", "")
    return Leaf(
        device_id,
        int(numa) if re.fullmatch(r"\d{1,6}", numa) else None,
        cpus if re.fullmatch(r"[\d,-]+", cpus) else "",
    )


def _device(
    device: str,
    leaf: Leaf,
    affinity: Mapping[str, str],
    names: Mapping[str, str],
    host_bridges: Mapping[str, str],
    notes: list[str],
) -> Device:
    attributes: dict[str, str | int | float | bool] = {}
    if leaf.device in host_bridges:
        attributes["host_bridge"] = host_bridges[leaf.device]
    if not _is_gpu(device):
        nic = names.get(device, "") if re.fullmatch(r"NIC\d+", device) else device
        if nic:
            attributes["name"] = nic
        return Device(leaf.device, DeviceKind.NIC, NODE, None, attributes)
    attributes["index"] = int(device.removeprefix("GPU"))
    if leaf.cpus:
        attributes["cpus"] = leaf.cpus
        if len(leaf.cpus) >= _LONG_CPU_LIST or leaf.cpus[-1] in ",-":
            notes.append(f"{leaf.device}: CPU list {leaf.cpus!r} is possibly cut off by nvidia-smi")
    numa = affinity.get("NUMA Affinity", "")
    if leaf.numa is None:
        attributes |= {"numa_affinity": numa} if re.fullmatch(r"[\d,-]+", numa) else {}
    memory = affinity.get("GPU NUMA ID", "")
    if re.fullmatch(r"\d{1,6}", memory):
        attributes["gpu_numa"] = int(memory)
    return Device(leaf.device, DeviceKind.GPU, NODE, leaf.numa, attributes)


def _nvlinks(
    ids: Sequence[str], counts: Mapping[Pair, int], notes: list[str]
) -> tuple[list[Device], list[Link]]:
    """Return the NVLinks: pair by pair, or over one switch an island where a GPU has too few."""
    if not counts:
        notes.append("no pair has NVLink in this matrix; `topo -mp` leaves NVLink out")
        return [], []
    notes.append("the matrix counts NVLinks without a rate; `nvidia-smi nvlink -s` prints rates")
    peers: dict[int, dict[int, int]] = {}
    for (a, b), count in counts.items():
        peers.setdefault(a, {})[b] = count
        peers.setdefault(b, {})[a] = count
    switches: list[Device] = []
    links: list[Link] = []
    for island in _islands(peers):
        most = max(sum(peers[gpu].values()) for gpu in island)
        if most > _MOST_NVLINKS:
            name = nvswitch(NODE) + (str(len(switches)) if switches else "")
            switches.append(Device(name, DeviceKind.NVSWITCH, NODE))
            links += [
                Link(ids[gpu], name, LinkKind.NVLINK, count=max(peers[gpu].values()))
                for gpu in island
            ]
            notes += _unswitched(island, peers, ids)
            continue
        links += [
            Link(ids[a], ids[b], LinkKind.NVLINK, count=count)
            for (a, b), count in counts.items()
            if a in island
        ]
        alike = {count for gpu in island for count in peers[gpu].values()}
        if len(alike) == 1 and all(len(peers[gpu]) == len(island) - 1 > 1 for gpu in island):
            notes.append(
                f"NVLinks of {', '.join(ids[gpu] for gpu in island)} are taken to join pairs, "
                f"{most} a GPU; behind an NVSwitch each GPU would have {min(alike)} in all"
            )
    return switches, links


def _islands(peers: Mapping[int, Mapping[int, int]]) -> list[list[int]]:
    islands: list[list[int]] = []
    seen = set[int]()
    for gpu in sorted(peers):
        pending, island = [gpu], []
        while pending:
            here = pending.pop()
            if here not in seen:
                seen.add(here)
                island.append(here)
                pending += peers[here]
        if island:
            islands.append(sorted(island))
    return islands


def _unswitched(
    island: Sequence[int], peers: Mapping[int, Mapping[int, int]], ids: Sequence[str]
) -> list[str]:
    """Name the pairs that one NVSwitch would join with another number of links than printed."""
    odd: dict[tuple[int, int], list[str]] = {}
    own = {gpu: max(peers[gpu].values()) for gpu in island}
    for i, a in enumerate(island):
        for b in island[i + 1 :]:
            if (found := peers[a].get(b, 0)) != (over := min(own[a], own[b])):
                odd.setdefault((found, over), []).append(f"{ids[a]} - {ids[b]}")
    return [
        f"{some(pairs, 4)}: {found} NVLinks are printed, {over} follow from the other pairs over "
        "their NVSwitch"
        for (found, over), pairs in odd.items()
    ]
