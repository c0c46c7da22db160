"""Several descriptions of one machine made one: what each knows best, and what they contradict."""

from collections.abc import Sequence

from topo_ar.errors import TopologyError
from topo_ar.topology.merge_devices import match_devices
from topo_ar.topology.merge_links import LinkMerger, is_used
from topo_ar.topology.model import DeviceKind, Topology, validate
from topo_ar.topology.readers import Description
from topo_ar.topology.trust import Conflicts, by_trust


def merge_machine(descriptions: Sequence[Description]) -> Topology:
    """Return the topology of one machine that several descriptions tell of.

    Devices are matched by UUID, bus id, GUID, name or number. Where descriptions differ, the more
    trusted one is taken, in the order that `topo_ar.topology.trust` states, and a note says what
    each says.

    Parameters
    ----------
    descriptions : sequence of Description
        One or more, in any order; each of one host.

    Raises
    ------
    TopologyError
        If there are none, one describes several hosts, or they are of hosts with different names.
    """
    if not descriptions:
        raise TopologyError("there is nothing to merge; give one description or more")
    if len(descriptions) == 1:
        return descriptions[0].topology
    ordered = by_trust(descriptions)
    names = [description.topology.name for description in ordered]
    conflicts = Conflicts()
    matched = match_devices(ordered, conflicts)
    links = LinkMerger(ordered, matched, conflicts).links()
    ranked = next((i for i, d in enumerate(ordered) if d.topology.ranks), None)
    ranks = (
        ()
        if ranked is None
        else tuple(matched.of[ranked][rank].id for rank in ordered[ranked].topology.ranks)
    )
    ends = {end for link in links for end in (link.a, link.b)}
    kept = [entry for entry in matched.entries if is_used(entry, ends, ranks)]
    devices = tuple(
        entry.device(
            None if all(d.node is None for d in entry.said.values()) else matched.node,
            names,
            conflicts,
        )
        for entry in kept
    )
    notes = [f"{' + '.join(names)}, the most trusted first"]
    notes += conflicts.notes()
    for index, name in enumerate(names):
        unused = [
            entry.id
            for entry in matched.entries
            if entry not in kept and entry.kind is DeviceKind.PCIE_SWITCH and index in entry.said
        ]
        if unused:
            notes.append(
                f"{len(unused)} PCIe switches of {name} are left out: the way of their "
                "devices to the CPU is taken from another description"
            )
    for name, description in zip(names, ordered, strict=True):
        notes += [f"{name}: {note}" for note in description.topology.notes]
    return validate(Topology(" + ".join(names), devices, tuple(links), ranks, tuple(notes)))
