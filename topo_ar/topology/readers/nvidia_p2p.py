"""``nvidia-smi topo -p2p``: whether each GPU may access the memory of each other one.

It describes no devices but the GPUs and no links: a status is kept as the attribute ``p2p`` of a
GPU, ``gpu1=OK,gpu2=GNS``.
"""

import re
from itertools import combinations

from topo_ar.topology.model import Device, DeviceKind, Topology, validate
from topo_ar.topology.names import NODE
from topo_ar.topology.readers.smi_matrix import Matrix, find_header, plain_lines, read_matrix
from topo_ar.topology.wording import some

FORMAT = "nvidia-smi-p2p"

_WORDS = {
    "OK": "works",
    "CNS": "is not supported by the chipset",
    "GNS": "is not supported by the GPU",
    "TNS": "is not supported by the topology",
    "DR": "is disabled by a registry key",
    "NS": "is not supported",
    "U": "is unknown",
}


def matches(text: str) -> bool:
    """Return whether `text` holds a matrix of such words."""
    lines = plain_lines(text)
    start = find_header(lines)
    if start is None:
        return False
    cells = [cell for line in lines[start + 1 : start + 3] for cell in line.split()[1:]]
    return any(cell in _WORDS for cell in cells) and all(c in _WORDS or c == "X" for c in cells)


def read_text(text: str, name: str) -> Topology:
    """Return the GPUs in `text`, which comes from the file `name`; they are ranks.

    Raises
    ------
    TopologyError
        If it is no matrix of one machine; the message names file and line.
    """
    lines = plain_lines(text)
    matrix = read_matrix(lines, find_header(lines) or 0, name)
    gpus = [device for device in matrix.devices if re.fullmatch(r"GPU\d{1,6}", device)]
    notes = [
        *matrix.notes,
        *_notes(matrix),
        "the output does not say which access was asked for (read, write, NVLink, atomics, PCIe)",
        "a status of OK is the driver's word, no proof that data arrives",
        "links, CPUs, PCIe, NUMA nodes and NICs are not in this output",
    ]
    devices = [
        Device(
            f"{NODE}/gpu{index}",
            DeviceKind.GPU,
            NODE,
            None,
            {"index": index, **_status(gpu, matrix)},
        )
        for gpu in gpus
        for index in [int(gpu.removeprefix("GPU"))]
    ]
    ranks = tuple(device.id for device in devices)
    return validate(Topology(name, tuple(devices), (), ranks, tuple(notes)))


def _status(gpu: str, matrix: Matrix) -> dict[str, str]:
    row = matrix.rows.get(gpu)
    cells = zip(matrix.devices, row.cells, strict=False) if row else ()
    known = [f"{far.lower()}={cell}" for far, cell in cells if cell in _WORDS]
    return {"p2p": ",".join(known)} if known else {}


def _notes(matrix: Matrix) -> list[str]:
    """Name the pairs without access, those that differ by direction, and what is not known."""
    by_status: dict[str, list[str]] = {}
    unequal: dict[tuple[str, str], list[str]] = {}
    grid = matrix.grid()
    for a, b in combinations(range(len(matrix.devices)), 2):
        pair = f"{matrix.devices[a]} - {matrix.devices[b]}"
        there, back = grid[a][b], grid[b][a]
        if there and back and there != back:
            unequal.setdefault((there, back), []).append(pair)
        elif (status := there or back) != "OK":
            by_status.setdefault(status, []).append(pair)
    notes = [
        f"access {some(pairs, 4)}: {there} one way, {back} the other"
        for (there, back), pairs in unequal.items()
    ]
    for status, pairs in by_status.items():
        what = _WORDS.get(status, f"is unknown ({status[:40]!r})" if status else "is not printed")
        notes.append(f"access between {some(pairs, 4)} {what}")
    return notes
