"""NVLink and XGMI between GPUs, from what each GPU says of its own links.

Each end counts for itself. Where two ends disagree the fewer count, where one end is silent the
other is believed, and either is said in a note.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source
from topo_ar.topology.rates import Rates, nvlink_rates, xgmi_rates

Counts = Counter[tuple[str, str, LinkKind]]
"""Number of links by (GPU that counts, device at the far end, kind)."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What the rate of a GPU's links depends on: its compute capability or AMD architecture.

    `nvlink` is what the GPU itself says one NVLink carries, in bytes/s; it replaces the data sheet.
    """

    node: str
    sm: int | None = None
    gcn: str | None = None
    nvlink: float | None = None


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """The links of all GPUs, the NVSwitches they need, and what is doubtful about them."""

    links: tuple[Link, ...]
    switches: tuple[Device, ...]
    notes: tuple[str, ...]


NO_LINKS = GpuLinks((), (), ())


def nvswitch(node: str) -> str:
    """Return the id of the one device that stands for all NVSwitches of `node`."""
    return f"{node}/nvswitch"


def is_sentinel(busid: str) -> bool:
    """Return whether a bus id such as ``ffffffff:ff:ff.0`` stands for a device one may not see."""
    return busid.startswith("ffff") and not set(busid) - set("f:.0")


def connect_gpus(
    gpus: Mapping[str, GpuModel], counts: Counts, source: Source, known: Sequence[str] = ()
) -> GpuLinks:
    """Return the links that `counts` describes.

    Parameters
    ----------
    gpus : mapping
        The model of each GPU, by device id; all GPUs, also those without links.
    counts : Counter
        What each GPU says of its own links.
    source : Source
        Where the counts come from.
    known : sequence of str
        GPUs whose silence means something: those that were asked.
    """
    links, notes = [], []
    switches = dict[str, Device]()
    for (a, b, kind), count in counts.items():
        back = counts.get((b, a, kind))
        if b in gpus and back is not None and a > b:
            continue
        if b in gpus and back != count:
            notes.append(_disagreement(a, b, kind, count, back))
            count = min(count, back) if back else count
        if count < 1:
            continue
        if b == nvswitch(gpus[a].node):
            switches[b] = Device(b, DeviceKind.NVSWITCH, gpus[a].node)
        rates = min(
            (_rates(gpus[end], kind, count, source) for end in (a, b) if end in gpus),
            key=lambda rates: rates.nominal.value if rates.nominal else 0.0,
        )
        links.append(Link(a, b, kind, rates.nominal, rates.effective, count=count))
        if rates.nominal is None:
            notes.append(f"{a} - {b}: rate of {kind.value} not known for this GPU")
    notes += _silent(gpus, counts, known)
    return GpuLinks(tuple(links), tuple(switches.values()), tuple(notes))


def _rates(gpu: GpuModel, kind: LinkKind, count: int, source: Source) -> Rates:
    if kind is LinkKind.XGMI:
        return xgmi_rates(gpu.gcn, count, source)
    rates = nvlink_rates(gpu.sm, count, source)
    if gpu.nvlink is None:
        return rates
    note = f"{count} NVLink x {gpu.nvlink / 1e9:g} GB/s, as the GPU says"
    return replace(rates, nominal=Figure(count * gpu.nvlink, source, note))


def _disagreement(a: str, b: str, kind: LinkKind, count: int, back: int | None) -> str:
    if back is None:
        return f"{a} - {b}: {count} {kind.value} links reported by {a} only"
    return f"{a} - {b}: {count} {kind.value} links from one end, {back} from the other; fewer count"


def _silent(gpus: Mapping[str, GpuModel], counts: Counts, known: Sequence[str]) -> list[str]:
    """Name each GPU that shows no link, or fewer to its switch, than others of its node."""
    totals = Counter[str]()
    switched = set[str]()
    for (device, far, _), count in counts.items():
        totals[device] += count
        if far == nvswitch(gpus[device].node):
            switched.add(device)
    notes = []
    for device in known:
        most = max(totals[other] for other in known if gpus[other].node == gpus[device].node)
        if totals[device] < most and (device in switched or totals[device] == 0):
            notes.append(
                f"{device}: shows {totals[device]} NVLink or XGMI links, others of its node "
                f"{most}; they may be missing rather than absent, and the GPU counts without them"
            )
    return notes
