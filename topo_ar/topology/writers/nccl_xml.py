"""NCCL's topology XML (version 1), RCCL's (version 2) where there are AMD GPUs.

The file is for ``NCCL_TOPO_FILE`` and for other tools that read NCCL's dumps. NCCL's parser is
plain: strings of at most 255 characters without entities, 16 attributes, 640 children, 256
elements (NCCL 2.30.7, ``src/graph/xml.h``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Device, DeviceKind, LinkKind, Topology
from topo_ar.topology.writers.nccl_host import Element, Host, Whole
from topo_ar.topology.writers.written import Written

FORMAT = "nccl-xml"
SUFFIXES: tuple[str, ...] = (".xml",)

_MAX_TEXT = 255
_MAX_CHILDREN = 640
_MAX_ELEMENTS = 256
_NO_ENTITIES = frozenset("<>&\"'")


def write_text(topology: Topology) -> Written:
    """Return `topology` as NCCL's XML; several nodes are told apart by ``host_hash``.

    Raises
    ------
    TopologyError
        If no device belongs to a node, or the one node has more parts than NCCL reads.
    """
    members: dict[str, list[Device]] = {}
    for device in topology.devices:
        if device.node is not None:
            members.setdefault(device.node, []).append(device)
    if not members:
        raise TopologyError(
            f"topology {topology.name!r} has no node, and NCCL's XML describes nothing else; "
            "write GraphML or JSON"
        )
    sheet = _Sheet()
    amd = any(link.kind is LinkKind.XGMI for link in topology.links) or any(
        "gcn" in device.attributes for device in topology.devices
    )
    root = Element("system", {"version": "2" if amd else "1"})
    whole = Whole(topology)
    for index, devices in enumerate(members.values()):
        host = Host(whole, devices, f"0x{index + 1:x}" if len(members) > 1 else "")
        root.children += host.elements()
        sheet.gaps += host.gaps
    sheet.add(root, 0)
    if len(members) == 1 and sheet.num_elements > _MAX_ELEMENTS:
        raise TopologyError(
            f"topology {topology.name!r} has {sheet.num_elements} parts; NCCL reads at most "
            f"{_MAX_ELEMENTS} elements; write JSON or GraphML"
        )
    left_out = dict.fromkeys([*_unsaid(topology, len(members)), *sheet.gaps])
    return Written("\n".join([*sheet.lines, ""]), tuple(left_out))


def _unsaid(topology: Topology, num_nodes: int) -> Iterator[str]:
    """Yield what a whole topology has and no file of NCCL's."""
    kinds = {device.id: device.kind for device in topology.devices}
    if num_nodes > 1:
        yield (
            f"{num_nodes} nodes are in the file; NCCL_TOPO_FILE takes the own node only, so write "
            "one node for use with NCCL"
        )
    switches = sum(kind is DeviceKind.SWITCH for kind in kinds.values())
    if switches > 1:
        yield (
            f"the network is left out: {switches} switches and the links between them; a NIC "
            "keeps the speed of its port"
        )
    others = [rank for rank, device in enumerate(topology.ranks) if kinds[device] != "gpu"]
    if others:
        yield f"{len(others)} ranks without a GPU are left out"
    rated = {
        link.kind.value
        for link in topology.links
        if link.kind in (LinkKind.NVLINK, LinkKind.XGMI, LinkKind.UPI)
        and any(f and f.source not in ("file", "assumed") for f in (link.nominal, link.effective))
    }
    if rated:
        yield (
            f"rates of {', '.join(sorted(rated))} are left out: NCCL has its own by GPU and CPU, "
            "and the file only counts links"
        )
    network = (LinkKind.INFINIBAND, LinkKind.ETHERNET)
    if any(link.latency and link.kind not in network for link in topology.links):
        yield "latencies inside a node are left out"
    if any(link.effective and link.kind in network for link in topology.links):
        yield "effective rates of the network are left out"
    unused = [d.id for d in topology.devices if d.attributes.get("data") is False]
    if unused:
        yield (
            f"NCCL takes every NIC for data; {', '.join(unused[:8])} should not be used: "
            "set NCCL_IB_HCA"
        )


@dataclass(slots=True)
class _Sheet:
    """The lines of the file; `gaps` say which values NCCL's parser could not read."""

    lines: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    num_elements: int = 0

    def add(self, element: Element, depth: int) -> None:
        self.num_elements += 1
        if len(element.children) > _MAX_CHILDREN:
            self.gaps.append(
                f"<{element.tag}> has {len(element.children)} children; NCCL reads {_MAX_CHILDREN}"
            )
        indent = "  " * depth
        shown = "".join(
            f' {name}="{value}"'
            for name, value in element.attributes.items()
            if self._is_plain(element.tag, name, value)
        )
        if not element.children:
            self.lines.append(f"{indent}<{element.tag}{shown}/>")
            return
        self.lines.append(f"{indent}<{element.tag}{shown}>")
        for child in element.children:
            self.add(child, depth + 1)
        self.lines.append(f"{indent}</{element.tag}>")

    def _is_plain(self, tag: str, name: str, value: str) -> bool:
        if len(value) <= _MAX_TEXT and not _NO_ENTITIES & set(value):
            return True
        self.gaps.append(f"{name} of <{tag}> is left out: NCCL cannot read {value[:40]!r}")
        return False
