"""The records of an ``ibnetdiscover`` file, and of ibsim's net files, which lack GUIDs and speeds.

A record is a header line for a switch or a channel adapter (``Ca``, in ibsim ``Hca``) and one line
for each connected port. Every cable is written twice, once from each end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from topo_ar.topology.model import Figure, Source

HEADER = re.compile(
    r'^(?P<kind>Switch|Ca|Hca|Rt)\s+(?P<ports>\d{1,4})\s+"(?P<id>[^"]+)"(?:\s*#\s*"(?P<name>[^"]*)")?',
    re.MULTILINE,
)
_PORT = re.compile(
    r"^\[(?P<port>\d{1,4})\](?:\[ext \d+\])?(?:\([0-9a-fA-F]+\))?\s+"
    r'"(?P<peer>[^"]+)"\s*\[(?P<peer_port>\d{1,4})\](?P<rest>.*)$'
)
_RATE = re.compile(r"\b(\d{1,2})x([A-Z]+\d*)\b")
_FIELD = re.compile(r"^(\w+)=0x([0-9a-fA-F]+)")

# Gbit/s of one lane, as products are called: four lanes of NDR are "400 Gbit/s".
_LANE_GIGABITS = {
    "SDR": 2.5,
    "DDR": 5.0,
    "QDR": 10.0,
    "FDR10": 10.0,
    "FDR": 14.0,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}


@dataclass(frozen=True, slots=True)
class Port:
    """One end of a cable as its own side tells it; `rate` such as ``4xNDR``, empty if not told."""

    number: int
    peer: str
    peer_port: int
    rate: str


@dataclass(slots=True)
class Record:
    """A switch or channel adapter with its connected ports; GUIDs are 16 hex digits or empty."""

    id: str
    is_switch: bool
    name: str
    num_ports: int
    guid: str
    system_guid: str
    ports: list[Port] = field(default_factory=list)

    @property
    def is_aggregation_node(self) -> bool:
        """Whether this is the part of a switch that reduces (SHARP), which is no host."""
        return not self.is_switch and "Aggregation Node" in self.name


@dataclass(frozen=True, slots=True)
class Records:
    """All records by id, in file order, and the lines that could not be read."""

    nodes: dict[str, Record]
    unread: tuple[tuple[int, str], ...]
    repeated: tuple[str, ...]


def read_records(text: str) -> Records:
    """Return what is in `text`; lines that are neither record nor comment are kept apart."""
    nodes: dict[str, Record] = {}
    unread: list[tuple[int, str]] = []
    repeated: list[str] = []
    current: Record | None = None
    fields: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            current = None
        elif header := HEADER.match(line):
            current = _record(header, fields)
            fields = {}
            if current.id in nodes:
                repeated.append(current.id)
                current = nodes[current.id]
            nodes[current.id] = current
        elif (port := _PORT.match(line)) and current is not None:
            current.ports.append(_port(port))
        elif about := _FIELD.match(line):
            fields[about[1].lower()] = about[2].lower()
        elif not line.lstrip().startswith("#"):
            unread.append((number, line.strip()))
    return Records(nodes, tuple(unread), tuple(repeated))


def _record(header: "re.Match[str]", fields: dict[str, str]) -> Record:
    is_switch = header["kind"] == "Switch"
    own = fields.get("switchguid" if is_switch else "caguid")
    in_id = re.fullmatch(r"\w-([0-9a-fA-F]{16})", header["id"])
    return Record(
        id=header["id"],
        is_switch=is_switch,
        name=" ".join((header["name"] or "").split()),
        num_ports=int(header["ports"]),
        guid=own or (in_id[1].lower() if in_id else ""),
        system_guid=fields.get("sysimgguid", ""),
    )


def _port(match: "re.Match[str]") -> Port:
    # The name of the peer may itself look like a rate; what follows it does not.
    rates = _RATE.findall(match["rest"].rpartition('"')[2])
    rate = "x".join(rates[-1]) if rates and rates[-1][1] in _LANE_GIGABITS else ""
    return Port(int(match["port"]), match["peer"], int(match["peer_port"]), rate)


def slower(rates: Sequence[str]) -> Figure | None:
    """Return bytes/s of the slowest of `rates` such as ``4xNDR``; None where none is told."""
    told = [(_gigabits(rate), rate) for rate in rates if rate]
    if not told:
        return None
    gigabits, rate = min(told)
    return Figure(gigabits * 1e9 / 8, Source.FILE, f"{rate}, {gigabits:g} Gbit/s")


def _gigabits(rate: str) -> float:
    width, _, speed = rate.partition("x")
    return int(width) * _LANE_GIGABITS[speed]
