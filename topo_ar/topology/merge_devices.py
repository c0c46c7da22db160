"""The devices of several descriptions of one machine, matched and made one each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from topo_ar.errors import TopologyError
from topo_ar.topology.busid import normal_busid
from topo_ar.topology.model import Device, DeviceKind
from topo_ar.topology.names import NODE
from topo_ar.topology.readers import Description
from topo_ar.topology.trust import Conflicts

# What tells two devices of a kind apart, the surest first.
_KEYS = {
    DeviceKind.GPU: ("uuid", "busid", "index", "dev"),
    DeviceKind.NIC: ("guid", "busid", "name"),
    DeviceKind.PCIE_SWITCH: ("busid",),
}
# Which number a GPU has may depend on who counts, so an equal number proves nothing by itself.
_SURE = ("uuid", "busid", "guid")
# Other names for the same thing, and what depends on who wrote the file.
_NOT_COMPARED = frozenset({"host_bridge", "data", "affinity", "cpus", "arch", "name", "gdr"})


@dataclass(slots=True)
class Entry:
    """One device of the machine, and what each description calls it."""

    id: str
    kind: DeviceKind
    said: dict[int, Device] = field(default_factory=dict)

    def device(self, node: str | None, names: Sequence[str], conflicts: Conflicts) -> Device:
        """Return the device with the attributes of all; the most trusted is believed."""
        attributes: dict[str, str | int | float | bool] = {}
        origin: dict[str, int] = {}
        numa: int | None = None
        for index, device in sorted(self.said.items()):
            if numa is None:
                numa, origin["numa"] = device.numa, index
            elif device.numa is not None and device.numa != numa:
                self._differ("numa", numa, origin["numa"], device.numa, index, names, conflicts)
            for key, value in device.attributes.items():
                if key == "data" and index != min(self.said):
                    if value is False and attributes.get("data", True) is not False:
                        a, b = names[min(self.said)], names[index]
                        what = f"carries no data in {b}, which {a} does not say; {a} is taken"
                        conflicts.add(self.id, what)
                    continue
                if key not in attributes:
                    attributes[key], origin[key] = value, index
                elif key not in _NOT_COMPARED and not _alike(attributes[key], value):
                    mine = attributes[key]
                    self._differ(key, mine, origin[key], value, index, names, conflicts)
        if any("links_known" not in device.attributes for device in self.said.values()):
            attributes.pop("links_known", None)
        return Device(self.id, self.kind, node, numa, attributes)

    def _differ(
        self,
        key: str,
        mine: object,
        mine_from: int,
        other: object,
        other_from: int,
        names: Sequence[str],
        conflicts: Conflicts,
    ) -> None:
        a, b = names[mine_from], names[other_from]
        conflicts.add(self.id, f"{key} is {mine} in {a}, {other} in {b}; {a} is taken")


def _alike(a: object, b: object) -> bool:
    left, right = str(a).lower(), str(b).lower()
    is_class = left.startswith("0x") and (left.startswith(right) or right.startswith(left))
    return left == right or is_class or _busid(left) == _busid(right)


def _busid(text: str) -> str:
    return normal_busid(text) if ":" in text else text


@dataclass(frozen=True, slots=True)
class Matched:
    """All devices of the machine, and for each description the entry of each of its ids."""

    node: str
    entries: tuple[Entry, ...]
    of: tuple[dict[str, Entry], ...]


def match_devices(descriptions: Sequence[Description], conflicts: Conflicts) -> Matched:
    """Match the devices of `descriptions`, the most trusted first.

    GPUs go by UUID, bus id, then number; NICs by GUID, bus id, then name; CPUs by NUMA node; PCIe
    switches by bus id; all else by name.

    Raises
    ------
    TopologyError
        If a description holds several hosts, or they are of hosts with different names.
    """
    node = _one_node(descriptions)
    entries: list[Entry] = []
    taken: dict[str, Entry] = {}
    of: list[dict[str, Entry]] = []
    for index, description in enumerate(descriptions):
        topology = description.topology
        ids = {
            device.id: entry
            for device in topology.devices
            if (entry := _surely(device, entries, index)) is not None
        }
        for device in topology.devices:
            entry = ids.get(device.id)
            if entry and entry.kind is not device.kind is not DeviceKind.PCIE_SWITCH:
                # What one file has as a PCI device of some kind, another knows to be a GPU.
                entry.kind = device.kind
                entry.id = _free_id(_local(device, node), device.kind, taken)
                taken[entry.id] = entry
        for device in topology.devices:
            if device.id in ids:
                continue
            entry = _likely(device, entries, index)
            if entry is None:
                entry = Entry(_free_id(_local(device, node), device.kind, taken), device.kind)
                taken[entry.id] = entry
                entries.append(entry)
                if device.kind is DeviceKind.GPU and any(map(_has_gpu, of)):
                    conflicts.add(entry.id, f"only in {topology.name}")
            entry.said[index] = device
            ids[device.id] = entry
        of.append(ids)
    return Matched(node, tuple(entries), tuple(of))


def is_of_unknown_kind(entry: Entry) -> bool:
    """Return whether all that is known is that there is a PCI device, as in some hint files."""
    return entry.kind is DeviceKind.PCIE_SWITCH and all(map(_is_unknown, entry.said.values()))


def _is_unknown(device: Device) -> bool:
    known = device.kind is not DeviceKind.PCIE_SWITCH or "class" in device.attributes
    return not known and "busid" in device.attributes


def _has_gpu(ids: dict[str, Entry]) -> bool:
    return any(entry.kind is DeviceKind.GPU for entry in ids.values())


def _one_node(descriptions: Sequence[Description]) -> str:
    names = list[str]()
    for description in descriptions:
        nodes = {d.node for d in description.topology.devices if d.node is not None}
        if len(nodes) > 1:
            raise TopologyError(
                f"{description.topology.name!r} describes {len(nodes)} nodes; descriptions of one "
                "machine are merged, so give one of a single host"
            )
        names += nodes
    named = list(dict.fromkeys(name for name in names if name != NODE))
    if len(named) > 1:
        raise TopologyError(
            f"the descriptions are of different hosts ({', '.join(named)}); "
            "give those of one machine, or a fabric file that joins them"
        )
    return named[0] if named else NODE


def _local(device: Device, node: str) -> str:
    if device.node is None:
        return device.id
    return f"{node}/{device.id.removeprefix(f'{device.node}/')}"


def _free_id(wanted: str, kind: DeviceKind, taken: dict[str, Entry]) -> str:
    if wanted not in taken:
        return wanted
    stem = wanted.rstrip("0123456789") if kind in (DeviceKind.GPU, DeviceKind.NIC) else f"{wanted}-"
    return next(name for n in range(len(taken) + 1) if (name := f"{stem}{n}") not in taken)


def _surely(device: Device, entries: Sequence[Entry], index: int) -> Entry | None:
    """Return the entry that a bus id or the like proves to be this device, and note it there."""
    free = [
        e
        for e in entries
        if index not in e.said
        and (e.kind is device.kind or is_of_unknown_kind(e) or _is_unknown(device))
    ]
    for key in _KEYS.get(device.kind, ()):
        for entry in free:
            if key in _SURE and _equal(device, entry, key):
                entry.said[index] = device
                return entry
    return None


def _likely(device: Device, entries: Sequence[Entry], index: int) -> Entry | None:
    """Return the entry that goes by this device's number or name and is not another for sure."""
    free = [
        e
        for e in entries
        if e.kind is device.kind and index not in e.said and not _contradict(device, e)
    ]
    for key in _KEYS.get(device.kind, ()):
        for entry in free:
            if _equal(device, entry, key):
                return entry
    named = _last(device.id).startswith("pci-")
    if device.kind is DeviceKind.NIC or (device.kind is DeviceKind.PCIE_SWITCH and not named):
        return None
    for entry in free:
        if device.kind is DeviceKind.CPU and device.numa is not None:
            if any(other.numa == device.numa for other in entry.said.values()):
                return entry
        elif _last(entry.id) == _last(device.id):
            return entry
    return None


def _last(device_id: str) -> str:
    return device_id.rpartition("/")[2]


def _values(entry: Entry, key: str) -> Iterator[str]:
    for device in entry.said.values():
        if key in device.attributes:
            yield _key_value(device, key)


def _key_value(device: Device, key: str) -> str:
    value = str(device.attributes[key]).lower()
    return normal_busid(value) if key == "busid" else value


def _equal(device: Device, entry: Entry, key: str) -> bool:
    return key in device.attributes and _key_value(device, key) in _values(entry, key)


def _contradict(device: Device, entry: Entry) -> bool:
    """Return whether a sure key tells the two apart."""
    return any(
        key in device.attributes
        and (known := set(_values(entry, key)))
        and _key_value(device, key) not in known
        for key in _SURE
    )
