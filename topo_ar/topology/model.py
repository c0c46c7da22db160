"""The typed description of a machine or a cluster: devices, links, and where ranks sit.

Bandwidths are bytes per second in one direction, latencies are seconds. Every figure carries its
source; a figure that is not known is ``None``, never zero.
"""

from enum import StrEnum

import msgspec

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
