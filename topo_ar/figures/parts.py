"""A topology in JSON by its parts: what is in a node, what hangs below what, which nodes equal."""

from collections import deque
from typing import Any

from topo_ar.errors import ConfigError
from topo_ar.figures.branch import Branch, without_lone_switches
from topo_ar.figures.style import Record

FAST = ("nvlink", "xgmi", "c2c")
NETWORK = ("infiniband", "ethernet")
_MAX_NICS = 16


class Parts:
    """The devices of a topology by id and node, its links by device, its ranks by device.

    Raises
    ------
    ConfigError
        If this is not a topology in JSON.
    """

    def __init__(self, topology: Record) -> None:
        try:
            self.devices: dict[str, dict[str, Any]] = {d["id"]: d for d in topology["devices"]}
            self.links: list[dict[str, Any]] = list(topology["links"])
            self.neighbours: dict[str, list[tuple[str, dict[str, Any]]]] = {
                name: [] for name in self.devices
            }
            for link in self.links:
                self.neighbours[link["a"]].append((link["b"], link))
                self.neighbours[link["b"]].append((link["a"], link))
            self.ranks: dict[str, list[int]] = {}
            for rank, name in enumerate(topology.get("ranks", ())):
                self.ranks.setdefault(name, []).append(rank)
            self.folded: dict[str, list[str]] = {}
            self._place = {name: place for place, name in enumerate(self.devices)}
            self.members: dict[str, list[str]] = {}
            for name, device in self.devices.items():
                if device.get("node") is not None:
                    self.members.setdefault(device["node"], []).append(name)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is not a topology in JSON: {error!r}") from error

    def of(self, node: str, *kinds: str) -> list[str]:
        """Return the devices of a node that are of one of `kinds`."""
        return [name for name in self.members[node] if self.devices[name]["kind"] in kinds]

    def makes(self) -> list[list[str]]:
        """Return the nodes in groups that are drawn alike, the largest group first."""
        groups: dict[object, list[str]] = {}
        for node in self.members:
            groups.setdefault(self._make(node), []).append(node)
        return sorted(groups.values(), key=len, reverse=True)

    def _make(self, node: str) -> object:
        inside = self.members[node]
        place = {name: i for i, name in enumerate(inside)}
        links = sorted(
            (place[name], place.get(far, -1), *_link_make(link))
            for name in inside
            for far, link in self.neighbours[name]
        )
        devices = [(self.devices[name]["kind"], len(self.ranks.get(name, ()))) for name in inside]
        return (tuple(devices), tuple(links))

    def order(self, name: str) -> tuple[int, int]:
        """Return what devices are sorted by: their rank, else their place in the topology."""
        return (min(self.ranks.get(name, [len(self.devices)])), self._place[name])

    def trees(self, node: str) -> list[Branch]:
        """Return the CPUs of a node, or its memory, each with what hangs below over PCIe.

        A GPU without PCIe to a CPU hangs on the one it has another link to, with its switch.
        """
        roots = [Branch(name) for name in self._roots(node)]
        placed = {root.name for root in roots if root.name is not None}
        wanted = set(self.of(node, "pcie_switch", "gpu", "nic", "cpu")) - placed
        self._grow(roots, wanted, placed)
        by_name = {root.name: root for root in roots}
        for gpu in self.of(node, "gpu"):
            links = self.neighbours[gpu]
            own = next((by_name[far] for far, _ in links if far in by_name), None)
            if gpu in placed or own is None:
                continue
            switches = [
                far
                for far, link in links
                if link["kind"] == "pcie" and self.devices[far]["kind"] == "pcie_switch"
            ]
            if switches:
                branch = Branch(switches[0], is_tied=False)
                own.branches.append(branch)
                placed.add(switches[0])
                self._grow([branch], wanted, placed)
            else:
                own.tops.append(gpu)
                placed.add(gpu)
        lost = [name for name in self.of(node, "gpu", "nic") if name not in placed]
        gpus = [name for name in lost if self.devices[name]["kind"] == "gpu"]
        rest = Branch(None, gpus, [name for name in lost if name not in gpus])
        trees = [without_lone_switches(root) for root in roots]
        trees += [rest] if lost else []
        if len(self.of(node, "nic")) > _MAX_NICS:
            for tree in trees:
                self._fold_nics(tree)
        return trees

    def _grow(self, roots: list[Branch], wanted: set[str], placed: set[str]) -> None:
        """Hang on the nearest of `roots` what PCIe or shared memory leads to."""
        waiting = deque(roots)
        while waiting:
            here = waiting.popleft()
            for far, link in self.neighbours[here.name or ""]:
                if far not in wanted or far in placed or link["kind"] not in ("pcie", "shm"):
                    continue
                placed.add(far)
                match self.devices[far]["kind"]:
                    case "pcie_switch":
                        here.branches.append(Branch(far))
                        waiting.append(here.branches[-1])
                    case "nic":
                        here.nics.append(far)
                    case _:
                        here.tops.append(far)

    def _fold_nics(self, branch: Branch) -> None:
        """Let one NIC stand for all of its kind on a branch; `folded` has those it stands for."""
        alike: dict[object, list[str]] = {}
        for nic in branch.nics:
            rates = tuple(
                rate_of(link) for _, link in self.neighbours[nic] if link["kind"] in NETWORK
            )
            data = self.devices[nic].get("attributes", {}).get("data")
            alike.setdefault((rates, data), []).append(nic)
        branch.nics = [names[0] for names in alike.values()]
        self.folded |= {names[0]: names for names in alike.values()}
        for below in branch.branches:
            self._fold_nics(below)

    def _roots(self, node: str) -> list[str]:
        """Return the memory, or the CPUs by NUMA node; a CPU with a rank hangs on the memory."""
        cpus = [
            name
            for name in self.of(node, "cpu")
            if all(link["kind"] != "shm" for _, link in self.neighbours[name])
        ]
        numas = {name: self.devices[name].get("numa") for name in cpus}
        if None not in numas.values():
            cpus.sort(key=lambda name: int(numas[name] or 0))
        return [*self.of(node, "host"), *cpus]


def _link_make(link: dict[str, Any]) -> tuple[str, float, float, int]:
    rates = [(link.get(key) or {}).get("value", -1.0) for key in ("nominal", "effective")]
    return (link["kind"], rates[0], rates[1], link.get("count", 1))


def rate_of(link: dict[str, Any]) -> float | None:
    """Return the nominal rate of a link in bytes/s, the effective one where that is not known."""
    figure = link.get("nominal") or link.get("effective")
    return figure["value"] if figure else None
