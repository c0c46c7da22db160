"""The switches of a network by how far they are from the nodes."""

from topo_ar.topology.model import DeviceKind, Topology


def switch_tiers(topology: Topology) -> tuple[tuple[str, ...], ...]:
    """Return the switches in tiers: those next to a node first, then those next to these, ...

    Switches that reach no node make the last tier of all.
    """
    switches = {device.id for device in topology.devices if device.kind is DeviceKind.SWITCH}
    neighbours: dict[str, list[str]] = {switch: [] for switch in switches}
    near = dict[str, None]()
    for link in topology.links:
        for end, far in ((link.a, link.b), (link.b, link.a)):
            if end in switches and far in switches:
                neighbours[end].append(far)
            elif end in switches:
                near[end] = None
    tiers = []
    seen = set(near)
    tier = list(near)
    while tier:
        tiers.append(tuple(tier))
        above = dict.fromkeys(far for switch in tier for far in neighbours[switch])
        tier = [switch for switch in above if switch not in seen]
        seen.update(tier)
    if alone := tuple(d.id for d in topology.devices if d.id in switches and d.id not in seen):
        tiers.append(alone)
    return tuple(tiers)
