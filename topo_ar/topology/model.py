"""The typed description of a machine or a cluster: devices, links, and where ranks sit.

Bandwidths are bytes per second in one direction, latencies are seconds. Every figure carries its
source; a figure that is not known is ``None``, never zero.
"""

import hashlib
import math
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from topo_ar.errors import TopologyError
from topo_ar.versioned_json import decode

SCHEMA_VERSION = 1


class Source(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    NVML = "nvml"
    SYSFS = "sysfs"
    FILE = "file"
    PRESET = "preset"
    ASSUMED = "assumed"


class DeviceKind(StrEnum):
    """What a device is. A rank without a GPU sits on a ``cpu``; ``host`` is a node's memory."""

    GPU = "gpu"
    CPU = "cpu"
    PCIE_SWITCH = "pcie_switch"
    NVSWITCH = "nvswitch"
    NIC = "nic"
    SWITCH = "switch"
    HOST = "host"


class LinkKind(StrEnum):
    """What a link is made of."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    C2C = "c2c"
    PCIE = "pcie"
    UPI = "upi"
    SHM = "shm"
    INFINIBAND = "infiniband"
    ETHERNET = "ethernet"


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number with its source: bytes per second for a bandwidth, seconds for a latency."""

    value: float
    source: Source
    note: str = ""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A vertex of the graph. `id` is unique and starts with its node's name, ``node0/gpu3``."""

    id: str
    kind: DeviceKind
    node: str | None = None
    numa: int | None = None
    attributes: dict[str, str | int | float | bool] = {}


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A full-duplex connection of two devices; figures hold for each direction.

    `nominal` is what the data sheet says, `effective` what a payload gets, `count` the number of
    parallel lanes or links that the figures already sum up.
    """

    a: str
    b: str
    kind: LinkKind
    nominal: Figure | None = None
    effective: Figure | None = None
    latency: Figure | None = None
    count: int = 1


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices, links and the device of each rank, in rank order.

    `notes` say in full sentences what is unknown, guessed or left out.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    ranks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA_VERSION


def validate(topology: Topology) -> Topology:
    """Return `topology` unchanged if it is sound.

    Sound means: device ids are unique and not empty, links join two different devices that exist,
    bandwidths are positive and finite, latencies finite and not negative, counts positive, and
    each rank sits on a device of its own that exists.

    Raises
    ------
    TopologyError
        At the first fault; the message names the device, the link or the rank.
    """
    for fault in _faults(topology):
        raise TopologyError(f"topology {topology.name!r}: {fault}")
    return topology


def to_json(topology: Topology) -> bytes:
    """Return the topology as UTF-8 JSON in one stable order of keys."""
    return msgspec.json.encode(topology)


def from_json(text: bytes | str) -> Topology:
    """Read and validate a topology.

    Raises
    ------
    TopologyError
        If `text` is not a sound topology of a known schema; the message names the field.
    """
    hint = "write one with `topo-ar probe -o FILE`"
    return validate(decode(text, Topology, SCHEMA_VERSION, "topology", hint, TopologyError))


def topology_hash(topology: Topology) -> str:
    """Return the first 16 hex digits of the SHA-256 of the JSON: equal topologies, equal hash."""
    return hashlib.sha256(to_json(topology)).hexdigest()[:16]


def _faults(topology: Topology) -> Iterator[str]:
    ids = set[str]()
    for device in topology.devices:
        if not device.id:
            yield f"a {device.kind.value} device has an empty id; give every device a name"
        if device.id in ids:
            yield f"two devices are called {device.id!r}; ids must be unique"
        ids.add(device.id)
    for link in topology.links:
        for fault in _link_faults(link, ids):
            yield f"{link.kind.value} link {link.a!r} - {link.b!r}: {fault}"
    taken = dict[str, int]()
    for rank, device_id in enumerate(topology.ranks):
        if device_id not in ids:
            yield f"rank {rank} sits on {device_id!r}, which is no device"
        if device_id in taken:
            yield f"ranks {taken[device_id]} and {rank} both sit on {device_id!r}; one is allowed"
        taken[device_id] = rank


def _link_faults(link: Link, ids: set[str]) -> Iterator[str]:
    for end in (link.a, link.b):
        if end not in ids:
            yield f"{end!r} is no device; a link joins two devices that are listed"
    if link.a == link.b:
        yield "a link must join two different devices"
    if link.count < 1:
        yield f"count is {link.count}; it must be at least 1"
    for name, figure in (("nominal", link.nominal), ("effective", link.effective)):
        if figure is not None and not 0 < figure.value < math.inf:
            yield f"{name} is {figure.value} bytes/s; it must be positive, or left out if unknown"
    if link.latency is not None and not 0 <= link.latency.value < math.inf:
        yield f"latency is {link.latency.value} s; it must not be negative, or be left out"
