"""Ranks of one node that are joined more closely than the whole node: hives, pairs, sockets."""

from collections.abc import Callable, Mapping, Sequence

from topo_ar.topology.model import Device, Link, LinkKind
from topo_ar.topology.ports import FAST_KINDS, NETWORK_KINDS, payload_of

Links = Mapping[str, Sequence[Link]]


def hives(ranks: Sequence[str], links: Links) -> list[list[int]]:
    """Return the positions in `ranks` that NVLink or XGMI alone join; one list where all are."""
    component = _components(ranks, links, lambda link: link.kind in FAST_KINDS)
    return _grouped(ranks, component)


def sockets(
    ranks: Sequence[str], links: Links, devices: Mapping[str, Device]
) -> tuple[list[list[int]], list[float]]:
    """Return the positions in `ranks` by CPU socket, and what leaves each socket in bytes/s.

    Both are empty where the ranks share a socket, sockets are not joined, or a rate is not known.
    """
    inner = [kind for kind in LinkKind if kind not in NETWORK_KINDS | FAST_KINDS | {LinkKind.UPI}]
    node = devices[ranks[0]].node

    def stays(link: Link) -> bool:
        return link.kind in inner and devices[link.a].node == devices[link.b].node == node

    component = _components(ranks, links, stays)
    groups = _grouped(ranks, component)
    leaving: dict[int, float] = {component[ranks[group[0]]]: 0.0 for group in groups}
    for device, own in component.items():
        for link in links.get(device, ()):
            far = link.b if link.a == device else link.a
            if link.kind is not LinkKind.UPI or component.get(far) == own:
                continue
            figure = payload_of(link)
            if figure is None:
                return [], []
            leaving[own] += figure.value
    if len(groups) < 2 or not all(leaving.values()):
        return [], []
    return groups, list(leaving.values())


def _components(
    ranks: Sequence[str], links: Links, follow: Callable[[Link], bool]
) -> dict[str, int]:
    """Return for each device that a rank reaches over links to `follow` the first such rank."""
    component: dict[str, int] = {}
    for position, rank in enumerate(ranks):
        if rank in component:
            continue
        component[rank] = position
        pending = [rank]
        while pending:
            here = pending.pop()
            for link in links.get(here, ()):
                far = link.b if link.a == here else link.a
                if far not in component and follow(link):
                    component[far] = position
                    pending.append(far)
    return component


def _grouped(ranks: Sequence[str], component: Mapping[str, int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for position, rank in enumerate(ranks):
        groups.setdefault(component[rank], []).append(position)
    return list(groups.values())
