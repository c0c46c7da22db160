"""The ways between the GPUs of a node, and to its NICs, as JSON objects.

Their keys are described with :func:`topo_ar.topology.summary.summarize`.
"""

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

from topo_ar.topology.model import Device, DeviceKind, Link, Topology
from topo_ar.topology.paths import Path, Paths

Json = dict[str, Any]


class Ways:
    """The pairs of GPUs, and the nearest NICs, of single nodes.

    Parameters
    ----------
    topology : Topology
        A sound topology.
    nodes : sequence of str
        The nodes that will be asked for; the others are left out of the search.
    """

    def __init__(self, topology: Topology, nodes: Sequence[str]) -> None:
        wanted = {None, *nodes}
        devices = tuple(device for device in topology.devices if device.node in wanted)
        kept = {device.id for device in devices}
        links = tuple(link for link in topology.links if link.a in kept and link.b in kept)
        self._ranks = {device: rank for rank, device in enumerate(topology.ranks)}
        topology = Topology(topology.name, devices, links)
        self._paths = Paths(topology)
        self._linked = {end for link in topology.links for end in (link.a, link.b)}
        self._links: dict[tuple[str, str], list[Link]] = {}
        for link in topology.links:
            self._links.setdefault((link.a, link.b), []).append(link)
            self._links.setdefault((link.b, link.a), []).append(link)

    def gpu_pairs(self, devices: Sequence[Device]) -> list[Json]:
        """Return an object for each pair of GPUs of a node, in order of their ranks."""
        gpus = [device for device in devices if device.kind is DeviceKind.GPU]
        gpus.sort(key=lambda gpu: self._ranks.get(gpu.id, len(self._ranks)))
        return [self._pair(a, b) for a, b in combinations(gpus, 2)]

    def nearest_nics(self, devices: Sequence[Device]) -> dict[str, Json]:
        """Return an object for each device of a node that holds a rank."""
        found = {}
        for device in devices:
            if device.id not in self._ranks:
                continue
            nearest = self._paths.nearest_nics(device.id)
            nics = list(nearest.nics)
            way = self._paths.between(device.id, nics[0]) if nics else None
            found[device.id] = {
                "nics": nics,
                "path_class": nearest.path_class.name,
                "nvidia_class": self._paths.nvidia_class(device.id, nics[0]) if nics else None,
                "bandwidth": way.bandwidth if way else None,
                "narrowest_link": self._narrowest(way) if way else None,
            }
        return found

    def _pair(self, a: Device, b: Device) -> Json:
        path = self._paths.between(a.id, b.id)
        linked = {a.id, b.id} <= self._linked
        described = linked and all(gpu.attributes.get("links_known") is not False for gpu in (a, b))
        return {
            "a": a.id,
            "b": b.id,
            "link_count": self._paths.fast_links(a.id, b.id) if described else None,
            # A GPU of which no link is told is not known to be cut off.
            "path_class": path.path_class.name if linked else None,
            "nvidia_class": self._paths.nvidia_class(a.id, b.id),
            "p2p": _p2p(a, b),
            "bandwidth": path.bandwidth,
            "narrowest_link": self._narrowest(path),
            "devices": list(path.devices),
        }

    def _narrowest(self, path: Path) -> Json | None:
        """Return the link of a way that has the way's rate."""
        if path.bandwidth is None:
            return None
        for a, b in pairwise(path.devices):
            by_kind: dict[str, list[Link]] = {}
            for link in self._links.get((a, b), ()):
                by_kind.setdefault(link.kind.value, []).append(link)
            for kind, links in by_kind.items():
                figures = [link.effective or link.nominal for link in links]
                total = sum(figure.value for figure in figures if figure)
                if math.isclose(total, path.bandwidth):
                    count = sum(link.count for link in links)
                    return {"a": a, "b": b, "kind": kind, "count": count}
        return None


def _p2p(a: Device, b: Device) -> str | None:
    """Return the status of peer access, the worse of both ways; devices say ``gpu1=OK,...``."""
    found = set()
    for here, far in ((a, b), (b, a)):
        said = str(here.attributes.get("p2p", "")).split(",")
        name = f"{far.id.rsplit('/', 1)[-1]}="
        found |= {entry.removeprefix(name) for entry in said if entry.startswith(name)}
    return next((status for status in sorted(found) if status != "OK"), "OK") if found else None
