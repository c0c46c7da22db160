"""What one device's links carry together: the port of a rank inside its node, and of a NIC."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source

NETWORK_KINDS = frozenset({LinkKind.INFINIBAND, LinkKind.ETHERNET})

FAST_KINDS = frozenset({LinkKind.NVLINK, LinkKind.XGMI})
SLOW_KINDS = frozenset({LinkKind.PCIE, LinkKind.C2C, LinkKind.SHM})
_RELAYS = frozenset(
    {DeviceKind.NVSWITCH, DeviceKind.SWITCH, DeviceKind.HOST, DeviceKind.PCIE_SWITCH}
)

# Seconds a message needs where no link says: the hardware latencies of NCCL 2.30.7's tuning table
# (ring, Simple: NVLink 3.4, PCI 5.7, network 14 us); shared memory between processes is a guess.
_MESSAGE_SECONDS = {
    LinkKind.NVLINK: 3.4e-6,
    LinkKind.XGMI: 3.4e-6,
    LinkKind.C2C: 3.4e-6,
    LinkKind.PCIE: 5.7e-6,
    LinkKind.SHM: 20e-6,
}
NETWORK_SECONDS = 14e-6


@dataclass(frozen=True, slots=True)
class Rate:
    """What one port carries: bytes/s in one direction, and the latency in seconds.

    `payload` is the effective rate; it equals `nominal` where nothing better is known, and the
    other way round. `latency` is that of a whole message from one port to another: both links of
    a way over a switch. `source` is that of `payload`.
    """

    nominal: float
    payload: float
    latency: float
    source: Source


def links_by_device(links: Iterable[Link]) -> dict[str, list[Link]]:
    """Return the links that end at each device."""
    by_device: dict[str, list[Link]] = {}
    for link in links:
        by_device.setdefault(link.a, []).append(link)
        by_device.setdefault(link.b, []).append(link)
    return by_device


def port_links(links: Iterable[Link]) -> list[Link]:
    """Return those of a rank's links that make its port inside the node: the fast ones, if any."""
    links = list(links)
    return [link for link in links if link.kind in FAST_KINDS] or [
        link for link in links if link.kind in SLOW_KINDS
    ]


def relays(device: Device, link: Link) -> bool:
    """Return whether a message over `link` goes on at `device`, so that it crosses two links."""
    if device.kind is DeviceKind.CPU:
        # A CPU forwards for PCIe; over shared memory it is itself a rank.
        return link.kind is not LinkKind.SHM
    return device.kind in _RELAYS


def carries_data(nic: Device) -> bool:
    """Return whether `nic` is for the ranks' traffic; the attribute ``data`` false says no."""
    return nic.attributes.get("data", True) is not False


def port_rate(
    device: Device,
    links: Mapping[str, Sequence[Link]],
    kinds: frozenset[LinkKind],
    devices: Mapping[str, Device],
) -> Rate | None:
    """Return the sum of `device`'s links of these kinds, or None where no rate is known."""
    chosen = [link for link in links.get(device.id, ()) if link.kind in kinds]
    ways = [_way_up(device.id, link, links, devices) for link in chosen]
    payloads = [figure for way in ways if (figure := _narrowest(map(payload_of, way)))]
    nominals = [figure for way in ways if (figure := _narrowest(map(nominal_of, way)))]
    if not payloads:
        return None
    return Rate(
        nominal=sum(figure.value for figure in nominals),
        payload=sum(figure.value for figure in payloads),
        latency=max(_message_seconds(device.id, link, devices) for link in chosen),
        source=payloads[0].source,
    )


def _way_up(
    device_id: str,
    link: Link,
    links: Mapping[str, Sequence[Link]],
    devices: Mapping[str, Device],
) -> list[Link]:
    """Return the PCIe links everything through `link` must take: on through lone bridges."""
    way = [link]
    here = device_id
    while way[-1].kind is LinkKind.PCIE:
        here = way[-1].b if way[-1].a == here else way[-1].a
        at_bridge = links[here] if devices[here].kind is DeviceKind.PCIE_SWITCH else ()
        onward = [other for other in at_bridge if other is not way[-1]]
        if len(onward) != 1 or onward[0] in way:
            break
        way += onward
    return way


def _narrowest(figures: Iterable[Figure | None]) -> Figure | None:
    known = [figure for figure in figures if figure is not None]
    return min(known, key=lambda figure: figure.value, default=None)


def payload_of(link: Link) -> Figure | None:
    """Return the effective rate of `link`, the nominal one where that is not known."""
    return link.effective or link.nominal


def nominal_of(link: Link) -> Figure | None:
    """Return the nominal rate of `link`, the effective one where that is not known."""
    return link.nominal or link.effective


def _message_seconds(device_id: str, link: Link, devices: Mapping[str, Device]) -> float:
    """Return the seconds of a message: once over a direct link, twice where it ends in a relay."""
    if link.latency is None:
        return _MESSAGE_SECONDS.get(link.kind, NETWORK_SECONDS)
    far = devices[link.b if link.a == device_id else link.a]
    return link.latency.value * (2 if relays(far, link) else 1)


def nic_rate(
    nic: Device, links: Mapping[str, Sequence[Link]], devices: Mapping[str, Device]
) -> Rate | None:
    """Return the smaller of cable and PCIe, or None; the latency is the cable's."""
    cable = port_rate(nic, links, NETWORK_KINDS, devices)
    bus = port_rate(nic, links, frozenset({LinkKind.PCIE, LinkKind.C2C}), devices)
    sides = [side for side in (cable, bus) if side is not None]
    if not sides:
        return None
    slower = min(sides, key=lambda side: side.payload)
    return Rate(
        nominal=min(side.nominal for side in sides),
        payload=slower.payload,
        latency=cable.latency if cable else NETWORK_SECONDS,
        source=slower.source,
    )
