"""Slurm's ``topology.yaml``: several topologies, of which the default one is read."""

import re
from typing import Any

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Topology
from topo_ar.topology.readers.hostlist import HostLists
from topo_ar.topology.readers.slurm_conf import block_sizes
from topo_ar.topology.readers.slurm_tree import Switch, blocks, tree

FORMAT = "slurm-topology-yaml"

_KINDS = ("tree", "block", "flat")
_DEEPEST, _MOST_EVENTS = 32, 250_000

Node = Any
"""A node of PyYAML, which knows its line."""


def matches(text: str) -> bool:
    """Return whether `text` is a list in which a topology begins."""
    return re.search(r"^[ \t]*-[ \t]+topology[ \t]*:", text, re.MULTILINE) is not None


def read_text(text: str, name: str) -> Topology:
    """Return the default topology in `text`, which comes from the file `name`.

    Raises
    ------
    TopologyError
        If `text` is no YAML, uses anchors, or the default topology is flat or of an unknown kind;
        the message names file and, where it can, the line.
    """
    reader = _Reader(name)
    choices = [reader.mapping(each) for each in reader.sequence(_load(text, name))]
    if not choices:
        raise TopologyError(f"{name}: holds no topology; each starts with '- topology: NAME'")
    names = [reader.text(each["topology"]) if "topology" in each else "?" for each in choices]
    chosen = next(
        (i for i, each in enumerate(choices) if reader.flag(each.get("cluster_default"))), None
    )
    if chosen is None:
        chosen = 0
        reader.notes.append(f"no topology is the cluster's default; {names[0]}, the first, is read")
    reader.notes += [
        f"topology {other} ({_kind(each)}) is left out; {names[chosen]} is read"
        for i, (other, each) in enumerate(zip(names, choices, strict=True))
        if i != chosen
    ]
    return _read(reader, choices[chosen], names, chosen)


def _kind(topology: dict[str, Node]) -> str:
    rest = [key for key in topology if key not in ("topology", "cluster_default")]
    return " and ".join(rest) or "nothing"


def _read(reader: "_Reader", topology: dict[str, Node], names: list[str], chosen: int) -> Topology:
    own = names[chosen]
    kinds = [kind for kind in _KINDS if kind in topology]
    if len(kinds) != 1 or kinds == ["flat"]:
        others = ", ".join(n for i, n in enumerate(names) if i != chosen) or "none"
        why = (
            "is flat, so nothing is described"
            if kinds == ["flat"]
            else f"holds {_kind(topology)}, where one of {', '.join(_KINDS)} is known"
        )
        raise TopologyError(f"{reader.file}: topology {own} {why}; others in the file: {others}")
    body = reader.mapping(topology[kinds[0]])
    if kinds == ["tree"]:
        switches = reader.switches(body, "switches", "switch")
        return tree(switches, reader.file, reader.notes)
    sizes = reader.sequence(body["block_sizes"]) if "block_sizes" in body else []
    place = reader.place(sizes[0]) if sizes else ""
    numbers = block_sizes([reader.text(size) for size in sizes], place)
    return blocks(reader.switches(body, "blocks", "block"), numbers, reader.file, reader.notes)


class _Reader:
    """Takes PyYAML's nodes apart; what is not of the expected kind is refused with its line."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.notes: list[str] = []
        self._hosts = HostLists(file)

    def place(self, node: Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"

    def mapping(self, node: Node) -> dict[str, Node]:
        if node.id != "mapping":
            raise TopologyError(f"{self.place(node)}: found a {node.id}, expected keys and values")
        found: dict[str, Node] = {}
        for key, value in node.value:
            if self.text(key) in found:
                raise TopologyError(f"{self.place(key)}: {self.text(key)[:60]!r} is there twice")
            found[self.text(key)] = value
        return found

    def sequence(self, node: Node) -> list[Node]:
        if node.id != "sequence":
            raise TopologyError(f"{self.place(node)}: found a {node.id}, expected a list")
        return list(node.value)

    def text(self, node: Node) -> str:
        if node.id != "scalar":
            raise TopologyError(f"{self.place(node)}: found a {node.id}, expected a word")
        return str(node.value)

    def flag(self, node: Node | None) -> bool:
        return node is not None and self.text(node).lower() in ("true", "yes", "on")

    def switches(self, body: dict[str, Node], key: str, kind: str) -> list[Switch]:
        """Return the list of switches or blocks under `key`."""
        if key not in body:
            raise TopologyError(f"{self.file}: a {kind} list without {key!r}; see topology.yaml(5)")
        found = []
        for node in self.sequence(body[key]):
            entry = self.mapping(node)
            line = node.start_mark.line + 1
            if kind not in entry:
                raise TopologyError(f"{self.place(node)}: an entry without {kind!r}, its name")
            known = {kind, "nodes", "children"}
            if unknown := [other for other in entry if other not in known]:
                self.notes.append(f"line {line}: {', '.join(unknown)[:60]} is left out")
            below, nodes = (
                self._hosts.expand(self.text(entry[part]), line) if part in entry else []
                for part in ("children", "nodes")
            )
            found.append(Switch(self.text(entry[kind]), line, below, nodes))
        return found


def _load(text: str, name: str) -> Node:
    """Return the root node of `text`; anchors are refused, for what they stand for may be huge."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for count, event in enumerate(yaml.parse(text, Loader=loader)):
            line = event.start_mark.line + 1
            if getattr(event, "anchor", None) is not None:
                raise TopologyError(
                    f"{name}:{line}: anchors and aliases are not read; write the list out"
                )
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or count > _MOST_EVENTS:
                raise TopologyError(f"{name}:{line}: is nested too deeply, or too long")
        root = yaml.compose(text, Loader=loader)
    except (yaml.YAMLError, UnicodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        raise TopologyError(f"{name}{line}: cannot be read as YAML: {problem}") from None
    if root is None:
        raise TopologyError(f"{name}: holds no topology; each starts with '- topology: NAME'")
    return root
