"""Slurm's ``topology.conf``: a tree of switches, or blocks of nodes."""

import re
from collections.abc import Iterator, Mapping, Sequence

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Topology
from topo_ar.topology.readers.hostlist import HostLists
from topo_ar.topology.readers.slurm_tree import Switch, blocks, tree

FORMAT = "slurm-topology-conf"

_KEYS = ("SwitchName", "Switches", "Nodes", "LinkSpeed", "BlockName", "BlockSizes")
_KNOWN = {key.lower(): key for key in _KEYS}
_PAIR = re.compile(r"""(\w+)\s*=\s*("[^"]*"|'[^']*'|[^\s"']+)(?:\s+|$)""")
_LONGEST_LINE = 1_000_000

Entry = Mapping[str, str]


def matches(text: str) -> bool:
    """Return whether a line of `text` describes a switch or a block."""
    pattern = r"^[ \t]*(?:SwitchName|BlockName|BlockSizes)[ \t]*="
    return re.search(pattern, text, re.MULTILINE | re.IGNORECASE) is not None


def read_text(text: str, name: str) -> Topology:
    """Return the switches or blocks in `text`, which comes from the file `name`, and their hosts.

    Raises
    ------
    TopologyError
        If a line cannot be read, or the lines contradict each other; the message names file and
        line.
    """
    notes: list[str] = []
    switches: list[Switch] = []
    block_list: list[Switch] = []
    sizes: list[int] = []
    hosts = HostLists(name)
    has_speed = False
    for number, line in _lines(text):
        entry = _entry(line, f"{name}:{number}", number, notes)
        has_speed = has_speed or "LinkSpeed" in entry
        if "SwitchName" in entry:
            switches.append(_switch(entry, "SwitchName", number, name, hosts))
        elif "BlockName" in entry:
            block_list.append(_switch(entry, "BlockName", number, name, hosts))
        elif "BlockSizes" in entry:
            sizes = block_sizes(entry["BlockSizes"].split(","), f"{name}:{number}")
        elif entry:
            notes.append(f"line {number}: names no switch and no block; it is left out")
    if has_speed:
        notes.append("LinkSpeed is left out: Slurm accepts it and does not use it")
    if switches and block_list:
        raise TopologyError(
            f"{name}:{block_list[0].line}: a block in a file of switches; Slurm's topology/tree "
            "knows SwitchName, topology/block BlockName"
        )
    if not switches and not block_list:
        raise TopologyError(f"{name}: describes no switch and no block")
    if block_list:
        return blocks(block_list, sizes, name, notes)
    return tree(switches, name, notes)


def block_sizes(sizes: Sequence[str], place: str) -> list[int]:
    """Return the sizes of blocks in nodes; `place` is file and line.

    Raises
    ------
    TopologyError
        If one is no whole number from 1 on.
    """
    for size in sizes:
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", size.strip()):
            raise TopologyError(
                f"{place}: BlockSizes holds {size[:40]!r}; expected numbers of nodes such as 18,72"
            )
    return [int(size) for size in sizes]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers, without comments, and joined after a backslash."""
    joined, first = "", 0
    for number, line in enumerate(text.split("\n"), 1):
        line = line.split("#", 1)[0].rstrip()
        first = first or number
        if line.endswith("\\") and len(joined) < _LONGEST_LINE:
            joined += line[:-1]
            continue
        if (joined + line).strip():
            yield first, joined + line
        joined, first = "", 0
    if joined.strip():
        yield first, joined


def _entry(line: str, place: str, number: int, notes: list[str]) -> dict[str, str]:
    """Return the known keys of a line with their values."""
    entry: dict[str, str] = {}
    if re.match(r"\s*include\s", line, re.IGNORECASE):
        notes.append(f"line {number}: another file is included; it is left out")
        return entry
    line, end = line.strip(), 0
    while end < len(line):
        found = _PAIR.match(line, end)
        if found is None:
            raise TopologyError(
                f"{place}: {line[end : end + 60]!r} cannot be read; expected KEY=VALUE, such as "
                "SwitchName=leaf1 Nodes=node[01-16]"
            )
        key = _KNOWN.get(found[1].lower())
        if key is None:
            notes.append(f"line {number}: {found[1][:40]} is not known and left out")
        elif key in entry:
            raise TopologyError(f"{place}: {key} is there twice; give it once a line")
        else:
            entry[key] = found[2].strip("\"'")
        end = found.end()
    return entry


def _switch(entry: Entry, key: str, number: int, name: str, hosts: HostLists) -> Switch:
    place = f"{name}:{number}"
    own = entry[key]
    if not own or re.search(r"[\[\],]", own):
        raise TopologyError(f"{place}: {key}={own[:60]} names no single one; give each its line")
    below, nodes = entry.get("Switches", ""), entry.get("Nodes", "")
    if not below and not nodes:
        what = "Nodes" if key == "BlockName" else "Switches or Nodes"
        raise TopologyError(f"{place}: {key}={own} has nothing below it; expected {what}")
    return Switch(own, number, hosts.expand(below, number), hosts.expand(nodes, number))
