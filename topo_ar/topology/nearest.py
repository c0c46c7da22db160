"""The NICs nearest to each rank of a node, searched once for all nodes of equal shape."""

from collections.abc import Mapping, Sequence

from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology

_Shape = tuple[object, ...]


class NearestPlaces:
    """Nearest NICs by position, for one node after the other.

    Parameters
    ----------
    links : mapping
        The links of each device of the topology.
    """

    def __init__(self, links: Mapping[str, Sequence[Link]]) -> None:
        self._links = links
        self._known: dict[_Shape, tuple[tuple[int, ...], ...]] = {}

    def of(
        self, members: Sequence[Device], ranks: Sequence[str], nics: Sequence[str]
    ) -> tuple[tuple[int, ...], ...]:
        """Return for each rank the positions in `nics` that are nearest to it, all that tie.

        Parameters
        ----------
        members : sequence of Device
            All devices of the node.
        ranks, nics : sequence of str
            Devices that hold a rank, and NICs, of the node.

        Returns
        -------
        tuple of tuple of int
            Empty where every rank has all NICs alike.
        """
        if len(nics) < 2:
            return ()
        place = {device.id: i for i, device in enumerate(members)}
        inside = [
            (place[device.id], place[link.b], link.kind)
            for device in members
            for link in self._links.get(device.id, ())
            if link.a == device.id and link.b in place
        ]
        shape: _Shape = (
            tuple(device.kind for device in members),
            tuple(inside),
            tuple(place[rank] for rank in ranks),
            tuple(place[nic] for nic in nics),
        )
        if shape not in self._known:
            self._known[shape] = _search(members, inside, ranks, nics)
        return self._known[shape]


def _search(
    members: Sequence[Device],
    inside: Sequence[tuple[int, int, LinkKind]],
    ranks: Sequence[str],
    nics: Sequence[str],
) -> tuple[tuple[int, ...], ...]:
    from topo_ar.topology.paths import Paths

    everything = tuple(range(len(nics)))
    links = tuple(Link(members[a].id, members[b].id, kind) for a, b, kind in inside)
    wanted = set(nics)
    devices = [
        device for device in members if device.kind is not DeviceKind.NIC or device.id in wanted
    ]
    kept = {device.id for device in devices}
    links = tuple(link for link in links if {link.a, link.b} <= kept)
    paths = Paths(Topology("node", tuple(devices), links))
    position = {nic: i for i, nic in enumerate(nics)}
    found = tuple(
        tuple(position[nic] for nic in paths.nearest_nics(rank).nics) or everything
        for rank in ranks
    )
    return () if all(places == everything for places in found) else found
