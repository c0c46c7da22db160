"""``rocm-smi --showtopo``: hops, kind of link and NUMA node of AMD GPUs, block by block."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology, validate
from topo_ar.topology.names import NODE
from topo_ar.topology.readers.inferred_tree import Leaf, Pair, SmiClass, infer_tree
from topo_ar.topology.wording import some

FORMAT = "rocm-smi-topo"

_BANNER = re.compile(r"ROCm System Management Interface|ROCm SMI Log|between two GPUs")
_TITLE = re.compile(r"\s*={3,} *([^=].*?)? *={3,}\s*$")
_NUMA = re.compile(r"\s*GPU ?\[?(\d{1,4})\]?\s*: *\(Topology\) Numa (Node|Affinity): *(-?\d{1,6})")
_LABEL = re.compile(r"GPU(\d{1,4})")
_WEIGHT, _HOPS, _KIND = "Weight", "Hops", "Link Type"
_BLOCKS = (_WEIGHT, _HOPS, _KIND)
_MOST_GPUS = 256
_LONGEST_TITLE = 300

_Table = dict[Pair, str]


def matches(text: str) -> bool:
    """Return whether `text` comes from rocm-smi."""
    return _BANNER.search(text) is not None or "(Topology) Numa" in text


def read_text(text: str, name: str) -> Topology:
    """Return the GPUs in `text`, which comes from the file `name`; they are ranks.

    Raises
    ------
    TopologyError
        If there is no GPU in a block of the topology, or too many; the message names the file.
    """
    notes: list[str] = []
    tables, numa = _read_blocks(text, notes)
    gpus = sorted({gpu for table in tables.values() for pair in table for gpu in pair} | {*numa})
    if not gpus or len(gpus) > _MOST_GPUS:
        raise TopologyError(
            f"{name}: {len(gpus)} GPUs in the blocks of `rocm-smi --showtopo`; expected 1 to "
            f"{_MOST_GPUS}, so copy its whole output"
        )
    for block in _BLOCKS:
        if block not in tables:
            notes.append(f"the block {block!r} is missing")
    known = {gpu: node for gpu, node in numa.items() if node >= 0}
    if missing := [_id(gpu) for gpu in gpus if gpu not in known]:
        notes.append(f"NUMA node not known: {', '.join(missing)}")
    links, printed = _pairs(gpus, tables, known, notes)
    leaves = [Leaf(_id(gpu), known.get(gpu)) for gpu in gpus]
    tree = infer_tree(NODE, leaves, printed)
    if tree.unplaced:
        notes.append(f"place on PCIe not known: {', '.join(tree.unplaced)}")
    notes += [
        "CPUs and their links are inferred from NUMA nodes; PCIe switches are not in this output",
        "rates and NICs are not in this output; weights are the driver's, no rates",
    ]
    devices = [
        Device(leaf.device, DeviceKind.GPU, NODE, leaf.numa, {"index": gpu})
        for gpu, leaf in zip(gpus, leaves, strict=True)
    ]
    return validate(
        Topology(
            name=name,
            devices=(*tree.devices, *devices),
            links=(*tree.links, *links),
            ranks=tuple(leaf.device for leaf in leaves),
            notes=tuple(notes),
        )
    )


def _id(gpu: int) -> str:
    return f"{NODE}/gpu{gpu}"


def _read_blocks(text: str, notes: list[str]) -> tuple[dict[str, _Table], dict[int, int]]:
    """Return the tables by block, cells by (row, column), and the NUMA node of each GPU."""
    tables: dict[str, _Table] = {}
    numa: dict[int, int] = {}
    table: _Table | None = None
    columns: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if title := _TITLE.match(line[:_LONGEST_TITLE]):
            block = next((b for b in _BLOCKS if (title[1] or "").startswith(b)), None)
            table, columns = tables.setdefault(block, {}) if block else None, []
            if block is None and "between" in (title[1] or ""):
                notes.append(f"line {number}: the block {title[1]!r} is left out")
        elif found := _NUMA.match(line):
            # The node a GPU is part of says more than the nodes it may use.
            if found[2] == "Node" or int(found[1]) not in numa:
                numa[int(found[1])] = int(found[3])
        elif table is None or not words:
            continue
        elif all(_LABEL.fullmatch(word) for word in words) and not columns:
            columns = [int(word[3:]) for word in words]
        elif (label := _LABEL.fullmatch(words[0])) and columns:
            cells = words[1:]
            if len(cells) != len(columns):
                notes.append(
                    f"line {number}: {len(cells)} cells under {len(columns)} columns; "
                    "the row may be cut off"
                )
            for column, cell in zip(columns, cells, strict=False):
                table[int(label[1]), column] = cell
    return {block: table for block, table in tables.items() if table}, numa


def _pairs(
    gpus: Sequence[int],
    tables: Mapping[str, _Table],
    numa: Mapping[int, int],
    notes: list[str],
) -> tuple[list[Link], dict[Pair, SmiClass]]:
    """Return the XGMI links, and the class of the pairs that PCIe joins."""
    kinds, hops = tables.get(_KIND, {}), tables.get(_HOPS, {})
    links: list[Link] = []
    printed: dict[Pair, SmiClass] = {}
    routed, unknown, unsure, nowhere = [], [], [], []
    unequal: dict[str, list[str]] = {}
    for (i, a), (j, b) in combinations(enumerate(gpus), 2):
        pair = f"GPU{a} - GPU{b}"
        said = {cell for way in ((a, b), (b, a)) if (cell := kinds.get(way))}
        if len(said) > 1:
            counts = "PCIe counts" if "PCIE" in said else "neither counts"
            what = f"{' one way, '.join(sorted(said))} the other; {counts}"
            unequal.setdefault(what, []).append(pair)
        steps = {cell for way in ((a, b), (b, a)) if (cell := hops.get(way))}
        if said == {"XGMI"}:
            if not steps <= {"1"}:
                routed.append(pair)
                continue
            if not steps:
                unsure.append(pair)
            links.append(Link(_id(a), _id(b), LinkKind.XGMI))
        elif "PCIE" in said:
            if a in numa and b in numa:
                printed[i, j] = SmiClass.PHB if numa[a] == numa[b] else SmiClass.SYS
            else:
                nowhere.append(pair)
        else:
            unknown.append(pair)
    for pairs, what in (
        *((pairs, what) for what, pairs in unequal.items()),
        (routed, "XGMI of more than one hop, so no link of their own"),
        (unsure, "hops not printed; taken to be joined directly"),
        (unknown, "kind of link not printed; unknown"),
        (nowhere, "PCIe, but how near is unknown without NUMA nodes"),
    ):
        if pairs:
            notes.append(f"{some(pairs, 4)}: {what}")
    if links:
        notes.append("how many XGMI links join a pair is not in this output; one is entered")
    if printed:
        notes.append("pairs joined by PCIe are taken to go through their CPUs")
    return links, printed
