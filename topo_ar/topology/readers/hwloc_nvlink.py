"""hwloc's ``NVLinkBandwidth`` distances: MB/s from each GPU to GPUs, NVSwitches and CPUs.

The matrix has no link from switch to switch, so the switches of a machine are one device here, as
they are in NCCL; otherwise the two boards of a DGX-2 would be two islands.
"""

import math
import re
from collections.abc import Mapping, Sequence

from topo_ar.topology.model import Figure, Link, LinkKind, Source
from topo_ar.topology.rates import nvlink_rates
from topo_ar.topology.readers.xml_tree import Element

_NAME = "NVLinkBandwidth"
_WHOLE = re.compile(r"[0-9]{1,15}")


def read_nvlinks(
    root: Element, devices: Mapping[tuple[str, str], str], capabilities: Mapping[str, int | None]
) -> tuple[list[Link], list[str]] | None:
    """Return the links and what is doubtful about them, None where the file has no such distances.

    Parameters
    ----------
    root : Element
        The ``<topology>``.
    devices : mapping
        The device of each object, by its type and ``gp_index``.
    capabilities : mapping
        The compute capability of each GPU, by device id.
    """
    for matrix in (*root.each("distances2hetero"), *root.each("distances2")):
        if matrix.text("name") == _NAME:
            return _read(matrix, devices, capabilities)
    return None


def _read(
    matrix: Element, devices: Mapping[tuple[str, str], str], capabilities: Mapping[str, int | None]
) -> tuple[list[Link], list[str]]:
    common = matrix.text("type") or ""
    names = _words(matrix, "indexes")
    values = _words(matrix, "u64values")
    size = len(names)
    if len(values) != size * size or not all(map(_WHOLE.fullmatch, values)):
        return [], [
            f"line {matrix.line}: {_NAME} holds {len(values)} values for {size} objects, "
            f"{size * size} whole numbers are needed; left out, so NVLink is not known"
        ]
    ends = [_device(name, common, devices) for name in names]
    notes = [
        f"line {matrix.line}: {_NAME} names {name}, which is no GPU, NVSwitch or CPU; left out"
        for name, end in zip(names, ends, strict=True)
        if end is None
    ]
    megabytes: dict[tuple[str, str], int] = {}
    for i, a in enumerate(ends):
        for j, b in enumerate(ends):
            value = int(values[i * size + j])
            if a is not None and b is not None and a != b and value:
                megabytes[a, b] = megabytes.get((a, b), 0) + value
    links = []
    for (a, b), there in megabytes.items():
        back = megabytes.get((b, a), 0)
        if back and a > b:
            continue
        if back != there:
            notes.append(f"{a} - {b}: {there} MB/s one way, {back} the other; the smaller counts")
        links.append(_link(a, b, min(there, back) or there, capabilities, notes))
    return links, notes


def _words(matrix: Element, tag: str) -> list[str]:
    return [word for row in matrix.each(tag) for word in "".join(row.pieces).split()]


def _device(name: str, common: str, devices: Mapping[tuple[str, str], str]) -> str | None:
    kind, _, index = name.rpartition(":")
    return devices.get((kind or common, index))


def _link(
    a: str, b: str, megabytes: int, capabilities: Mapping[str, int | None], notes: list[str]
) -> Link:
    known: Sequence[int] = [sm for end in (a, b) if (sm := capabilities.get(end)) is not None]
    sm = min(known, default=None)
    nominal = Figure(megabytes * 1e6, Source.FILE, f"{megabytes} MB/s, {_NAME} of hwloc")
    one = nvlink_rates(sm, 1, Source.FILE).nominal
    count = megabytes * 1e6 / one.value if one else math.nan
    if not one or round(count) < 1 or abs(count - round(count)) > 0.01:
        notes.append(f"{a} - {b}: {megabytes} MB/s; how many NVLinks that is cannot be told")
        return Link(a, b, LinkKind.NVLINK, nominal)
    effective = nvlink_rates(sm, round(count), Source.FILE).effective
    return Link(a, b, LinkKind.NVLINK, nominal, effective, count=round(count))
