"""InfiniBand fabrics as ``ibnetdiscover`` prints them: switches, hosts with their NICs, cables."""

from collections import Counter
from collections.abc import Iterable

from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    LinkKind,
    Source,
    Topology,
    validate,
)
from topo_ar.topology.readers.ib_hosts import Adapter, find_hosts
from topo_ar.topology.readers.ib_records import HEADER, Port, Record, Records, read_records, slower

FORMAT = "ibnetdiscover"

_End = tuple[str, int]


def matches(text: str) -> bool:
    """Return whether `text` has a line such as ``Switch 65 "S-..."``."""
    return HEADER.search(text) is not None


def read_text(text: str, name: str) -> Topology:
    """Return the fabric in `text`, which comes from the file `name`; it has no ranks."""
    records = read_records(text)
    switches = [record for record in records.nodes.values() if record.is_switch]
    reducers = [record for record in records.nodes.values() if record.is_aggregation_node]
    others = [r for r in records.nodes.values() if not r.is_switch and not r.is_aggregation_node]
    adapters, notes = find_hosts(others)
    ids = _switch_ids(switches) | _adapter_ids(adapters)
    cables, doubts = _cables(records)
    links = [*_links(cables, ids), *_inside(adapters, ids)]
    devices = (
        *_switches(switches, reducers, _tiers(cables, records), ids),
        *_hosts(adapters),
        *(_nic(adapter, ids) for adapter in adapters),
    )
    summary = (
        f"{len(switches)} switches, {len(others)} channel adapters, {_count(cables, ids)} links"
    )
    if reducers:
        summary += f"; {len(reducers)} aggregation nodes (SHARP) in switches, which are no hosts"
    if others and not cables:
        summary += "; the discovery reached no switch, as with a port that is down"
    return validate(Topology(name, devices, tuple(links), (), (summary, *notes, *doubts)))


def _switch_ids(switches: list[Record]) -> dict[str, str]:
    """Return an id for each switch: the name somebody gave it where that is its own."""
    names = [_plain_name(switch) for switch in switches]
    # A name that is another switch's id would be two switches in one.
    uses = Counter([*names, *(switch.id for switch in switches)])
    return {
        switch.id: name if name and uses[name] == 1 else switch.id
        for switch, name in zip(switches, names, strict=True)
    }


def _plain_name(switch: Record) -> str:
    """Return ``leaf-1`` of ``MF0;leaf-1:MQM9700/U1``, as managed switches call themselves."""
    name = switch.name.partition(";")[2] or switch.name
    return name.partition(":")[0].replace("/", "-").strip()


def _adapter_ids(adapters: list[Adapter]) -> dict[str, str]:
    """Return an id for each adapter; only together with a host is its name its own."""
    return {
        adapter.record.id: f"{adapter.host}/"
        + (adapter.device if adapter.is_named else adapter.record.id)
        for adapter in adapters
    }


def _cables(records: Records) -> tuple[dict[tuple[_End, _End], list[str]], list[str]]:
    """Return the rates that each cable's ends tell, and what is doubtful."""
    cables: dict[tuple[_End, _End], list[str]] = {}
    dangling: list[str] = []
    for record in records.nodes.values():
        for port in record.ports:
            if port.peer in records.nodes and port.peer != record.id:
                ends = _ends(record, port)
                cables.setdefault(ends, []).append(port.rate)
            else:
                dangling.append(port.peer)
    single = sum(len(rates) == 1 for rates in cables.values())
    unequal = sum(len(set(filter(None, rates))) > 1 for rates in cables.values())
    untold = sum(not any(rates) for rates in cables.values())
    doubts = [
        (single, f"{single} links are told by one end only"),
        (unequal, f"{unequal} links are told with different rates by their ends; the lower counts"),
        (untold, f"{untold} links have no rate in the file"),
        (dangling, f"{len(dangling)} ports lead to nodes the file lacks{_first(dangling)}"),
        (
            records.repeated,
            f"{len(records.repeated)} nodes are there twice, their ports taken together"
            f"{_first(records.repeated)}",
        ),
        (
            records.unread,
            f"{len(records.unread)} lines could not be read"
            f"{_first(f'line {n}: {text[:60]}' for n, text in records.unread)}",
        ),
    ]
    return cables, [note for wrong, note in doubts if wrong]


def _first(names: Iterable[str]) -> str:
    return next((f", the first is {name!r}" for name in names), "")


def _ends(record: Record, port: Port) -> tuple[_End, _End]:
    ends = ((record.id, port.number), (port.peer, port.peer_port))
    return ends if ends[0] < ends[1] else (ends[1], ends[0])


def _count(cables: dict[tuple[_End, _End], list[str]], ids: dict[str, str]) -> int:
    return sum(a in ids and b in ids for (a, _), (b, _) in cables)


def _links(cables: dict[tuple[_End, _End], list[str]], ids: dict[str, str]) -> list[Link]:
    """Return one link for each pair of devices; parallel cables add up."""
    pairs: dict[tuple[str, str], list[Figure | None]] = {}
    for ((a, _), (b, _)), rates in cables.items():
        if a in ids and b in ids:
            pairs.setdefault((a, b), []).append(slower(rates))
    return [
        Link(ids[a], ids[b], LinkKind.INFINIBAND, _sum(figures), count=len(figures))
        for (a, b), figures in pairs.items()
    ]


def _sum(figures: list[Figure | None]) -> Figure | None:
    known = [figure for figure in figures if figure is not None]
    if len(known) < len(figures):
        return None
    if len(known) == 1:
        return known[0]
    notes = list(dict.fromkeys(figure.note for figure in known))
    value = sum(figure.value for figure in known)
    return Figure(value, Source.FILE, f"{len(known)} links, {' and '.join(notes)} each")


def _tiers(cables: dict[tuple[_End, _End], list[str]], records: Records) -> dict[str, int]:
    """Return how many switches lie between a switch and the nearest host, itself included."""
    neighbours: dict[str, list[str]] = {}
    for (a, _), (b, _) in cables:
        neighbours.setdefault(a, []).append(b)
        neighbours.setdefault(b, []).append(a)
    tier = {
        record.id: 0
        for record in records.nodes.values()
        if not record.is_switch and not record.is_aggregation_node
    }
    frontier = list(tier)
    while frontier:
        reached = []
        for here in frontier:
            for far in neighbours.get(here, ()):
                if far not in tier and records.nodes[far].is_switch:
                    tier[far] = tier[here] + 1
                    reached.append(far)
        frontier = reached
    return tier


def _switches(
    switches: list[Record], reducers: list[Record], tiers: dict[str, int], ids: dict[str, str]
) -> list[Device]:
    with_sharp = {port.peer for reducer in reducers for port in reducer.ports}
    devices = []
    for switch in switches:
        attributes: dict[str, str | int | float | bool] = {"ports": switch.num_ports}
        if switch.guid:
            attributes["guid"] = switch.guid
        if switch.name:
            attributes["name"] = switch.name
        if switch.id in tiers:
            attributes["tier"] = tiers[switch.id]
        if switch.id in with_sharp:
            attributes["sharp"] = True
        devices.append(Device(ids[switch.id], DeviceKind.SWITCH, None, None, attributes))
    return devices


def _hosts(adapters: list[Adapter]) -> list[Device]:
    named = {adapter.host: adapter.is_named for adapter in adapters}
    return [
        Device(f"{host}/host", DeviceKind.HOST, host, None, {} if is_named else {"named": False})
        for host, is_named in named.items()
    ]


def _nic(adapter: Adapter, ids: dict[str, str]) -> Device:
    record = adapter.record
    attributes: dict[str, str | int | float | bool] = {"name": adapter.device}
    if record.guid:
        attributes["guid"] = record.guid
    if record.system_guid:
        attributes["system_guid"] = record.system_guid
    return Device(ids[record.id], DeviceKind.NIC, adapter.host, None, attributes)


def _inside(adapters: list[Adapter], ids: dict[str, str]) -> list[Link]:
    """Return the links from NICs to their hosts, about which a fabric knows nothing."""
    return [
        Link(ids[adapter.record.id], f"{adapter.host}/host", LinkKind.PCIE) for adapter in adapters
    ]
