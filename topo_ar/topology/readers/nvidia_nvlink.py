"""``nvidia-smi nvlink -s``, ``-R`` and ``-p``: the NVLinks of each GPU, one by one.

``-s`` prints rates, ``-R`` and ``-p`` far ends; a file may hold several of them one after the
other. Neither prints a GPU's own bus id, so far ends are put to GPUs by the order of bus ids, which
is that of the indices, and only where both ends of every link agree with that.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from topo_ar.errors import TopologyError
from topo_ar.topology.busid import normal_busid
from topo_ar.topology.gpu_links import is_sentinel, nvswitch
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
from topo_ar.topology.names import NODE
from topo_ar.topology.readers.smi_matrix import plain_lines

FORMAT = "nvidia-smi-nvlink"

_HEADER = re.compile(r"GPU (\d{1,6}): *([^(]*|.*?)(?:\(UUID: *([^)]*)\)?)?$")
_LINK = re.compile(r"Link (\d{1,4}): *(.*)$")
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) GB/s")
_REMOTE = re.compile(
    r"(?:Remote Device )?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])"
    r"(?:: *Link (\d{1,4}))?"
)
_LONGEST_LINE = 300
# What some drivers print is the signalling rate; the payload is that of the data sheet. GB/s.
_PAYLOAD = {25.781: 25.0, 26.562: 25.0, 53.125: 50.0}


@dataclass(slots=True)
class _Gpu:
    """A GPU as printed: by link the rate in bytes/s and the far end, and the inactive links."""

    name: str
    uuid: str
    line: int
    rates: dict[int, float] = field(default_factory=dict)
    remotes: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    inactive: set[int] = field(default_factory=set)
    silent: bool = False

    @property
    def active(self) -> int | None:
        """The number of links that work; None where nothing is printed of any."""
        links = self.rates.keys() | self.remotes.keys()
        return len(links) if links or self.inactive or self.silent else None


def matches(text: str) -> bool:
    """Return whether `text` lists GPUs with a UUID, or their links."""
    return (
        re.search(r"^[ \t]*GPU \d+: .*\(UUID: ", text, re.MULTILINE) is not None
        or re.search(r"^[ \t]*Link \d+: (?:[\d.]+ GB/s|<inactive>|Remote)", text, re.MULTILINE)
        is not None
    )


def read_text(text: str, name: str) -> Topology:
    """Return the GPUs in `text`, which comes from the file `name`, and the links that are sure.

    A GPU has the attributes ``nvlinks``, the number of active links, and ``nvlink_bytes_per_s``,
    the nominal rate of one of them in one direction.

    Raises
    ------
    TopologyError
        If there is no GPU, or GPUs of two machines; the message names file and line.
    """
    notes: list[str] = []
    gpus = _read_gpus(plain_lines(text), name, notes)
    if not gpus:
        raise TopologyError(
            f"{name}: lists links without the line of their GPU, such as 'GPU 0: NAME (UUID: ...)'"
        )
    rates = {index: _rate(index, gpu, notes) for index, gpu in gpus.items()}
    for index, gpu in gpus.items():
        if gpu.active is None:
            notes.append(f"{_id(index)}: nothing is printed of its links; they are unknown")
        elif gpu.active == 0:
            notes.append(f"{_id(index)}: no NVLink is active")
        elif gpu.inactive:
            notes.append(f"{_id(index)}: {len(gpu.inactive)} NVLinks are inactive")
    owners, links = _connect(gpus, rates, notes)
    devices = [
        Device(_id(index), DeviceKind.GPU, NODE, None, _attributes(index, gpu, rates, owners))
        for index, gpu in gpus.items()
    ]
    switch = nvswitch(NODE)
    if any(switch == link.b for link in links):
        devices.append(Device(switch, DeviceKind.NVSWITCH, NODE))
    notes.append("CPUs, PCIe, NUMA nodes and NICs are not in this output")
    ranks = tuple(_id(index) for index in gpus)
    return validate(Topology(name, tuple(devices), tuple(links), ranks, tuple(notes)))


def _id(index: int) -> str:
    return f"{NODE}/gpu{index}"


def _read_gpus(lines: Sequence[str], name: str, notes: list[str]) -> dict[int, _Gpu]:
    gpus: dict[int, _Gpu] = {}
    gpu: _Gpu | None = None
    odd: list[int] = []
    for number, whole in enumerate(lines, 1):
        line = whole.strip()[:_LONGEST_LINE]
        if header := _HEADER.match(line):
            index, uuid = int(header[1]), header[3] or ""
            gpu = gpus.setdefault(index, _Gpu(header[2].strip(), uuid, number))
            if gpu.uuid != uuid:
                raise TopologyError(
                    f"{name}:{number}: GPU {index} has another UUID than in line {gpu.line}; "
                    "give one machine a file"
                )
        elif gpu and (link := _LINK.match(line)) and _read_link(gpu, int(link[1]), link[2]):
            continue
        elif gpu and "all links are inactive" in line.lower():
            gpu.silent = True
        elif line.strip():
            odd.append(number)
    if odd:
        more = f", as are {len(odd) - 1} other lines" if len(odd) > 1 else ""
        said = lines[odd[0] - 1].strip()[:80]
        notes.append(f"line {odd[0]}: {said!r} is not understood and left out{more}")
    return dict(sorted(gpus.items()))


def _read_link(gpu: _Gpu, link: int, said: str) -> bool:
    """Take down what is said of a link; return False where it is not understood."""
    if said.lower() == "<inactive>":
        gpu.inactive.add(link)
    elif rate := _RATE.fullmatch(said):
        if float(rate[1]) <= 0:
            return False
        gpu.rates[link] = float(rate[1])
    elif remote := _REMOTE.fullmatch(said):
        gpu.remotes[link] = (normal_busid(remote[1]), int(remote[2]) if remote[2] else None)
    else:
        return False
    return True


def _rate(index: int, gpu: _Gpu, notes: list[str]) -> float | None:
    """Return bytes/s of one link of a GPU; of the slowest where they differ."""
    if not gpu.rates:
        return None
    printed, fastest = min(gpu.rates.values()), max(gpu.rates.values())
    if fastest > printed:
        notes.append(
            f"{_id(index)}: its links differ, from {printed:g} to {fastest:g} GB/s; "
            "the slowest counts"
        )
    payload = _PAYLOAD.get(printed, printed)
    if payload != printed:
        said = f"{printed:g} GB/s is the signalling rate of a link, {payload:g} GB/s its payload"
        if said not in notes:
            notes.append(said)
    return payload * 1e9


def _attributes(
    index: int, gpu: _Gpu, rates: Mapping[int, float | None], owners: Mapping[str, int]
) -> dict[str, str | int | float | bool]:
    found: dict[str, str | int | float | bool | None] = {
        "index": index,
        "name": gpu.name or None,
        "uuid": gpu.uuid or None,
        "busid": next((busid for busid, owner in owners.items() if owner == index), None),
        "nvlinks": gpu.active,
        "nvlink_bytes_per_s": rates[index],
    }
    return {key: value for key, value in found.items() if value is not None}


def _connect(
    gpus: Mapping[int, _Gpu], rates: Mapping[int, float | None], notes: list[str]
) -> tuple[dict[str, int], list[Link]]:
    """Return which GPU has which bus id, and the links; both empty where that is not sure."""
    linked = {index: gpu for index, gpu in gpus.items() if gpu.remotes}
    if not linked:
        if any(gpu.active for gpu in gpus.values()):
            notes.append("far ends of links are not printed; `nvidia-smi nvlink -R` prints them")
        return {}, []
    far_ends = sorted({busid for gpu in linked.values() for busid, _ in gpu.remotes.values()})
    owners = dict(zip(far_ends, linked, strict=False)) if len(far_ends) == len(linked) else {}
    own = {index: busid for busid, index in owners.items()}
    if owners and all(
        _is_answered(own[index], link, end, linked[owners[end[0]]])
        for index, gpu in linked.items()
        for link, end in gpu.remotes.items()
    ):
        counts = Counter(
            (index, owners[busid])
            for index, gpu in linked.items()
            for busid, _ in gpu.remotes.values()
            if index < owners[busid]
        )
        links = [
            _link(_id(a), _id(b), count, _slower(rates[a], rates[b]))
            for (a, b), count in counts.items()
        ]
        return owners, links
    ends = [{busid for busid, _ in gpu.remotes.values()} for gpu in linked.values()]
    hidden = all(is_sentinel(busid) for busid in far_ends)
    if hidden or (len(ends) > 1 and all(end == ends[0] for end in ends)):
        why = "are hidden" if hidden else f"({', '.join(far_ends)}) are the same for all GPUs"
        notes.append(f"the far ends of the links {why}; they are taken to be NVSwitches")
        return {}, [
            _link(_id(index), nvswitch(NODE), len(gpu.remotes), rates[index])
            for index, gpu in linked.items()
        ]
    notes.append(
        f"which GPUs the far ends {', '.join(far_ends[:8])} are cannot be told; the links between "
        "GPUs are left out"
    )
    return {}, []


def _is_answered(own: str, link: int, end: tuple[str, int | None], far: _Gpu) -> bool:
    """Return whether the GPU at the far end of a link says that it leads back."""
    busid, far_link = end
    if busid == own:
        return False
    if far_link is None:
        return any(back == own for back, _ in far.remotes.values())
    return far.remotes.get(far_link) == (own, link)


def _slower(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else min(a, b)


def _link(a: str, b: str, count: int, rate: float | None) -> Link:
    nominal = None
    if rate is not None:
        note = f"{count} NVLink x {rate / 1e9:g} GB/s, nvidia-smi"
        nominal = Figure(count * rate, Source.FILE, note)
    return Link(a, b, LinkKind.NVLINK, nominal, count=count)
