"""Which network cards of an hwloc file carry the ranks' data, and why the others do not."""

from collections.abc import Sequence
from dataclasses import dataclass

from topo_ar.topology.readers.hwloc_pci import PciFunction, is_rdma, port_gigabits

_ACTIVE = "4"


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card; `reason` says why it carries no data, None where it does."""

    function: PciFunction
    reason: str | None
    gigabits: int | None

    @property
    def name(self) -> str:
        """The name of its RDMA device, else of its interface, else its bus id."""
        named = [device for device in self.function.os_devices if device.name]
        best = [device for device in named if "openfabrics" in device.kinds] or named
        return best[0].name if best else self.function.busid

    @property
    def attributes(self) -> dict[str, str | int | float | bool]:
        """What identifies the card."""
        attributes = self.function.attributes
        attributes["name"] = self.name
        for device in self.function.os_devices:
            for ours, theirs in (("guid", "NodeGUID"), ("system_guid", "SysImageGUID")):
                if theirs in device.info:
                    attributes[ours] = device.info[theirs].replace(":", "").lower()
        return attributes


def judge_nics(functions: Sequence[PciFunction]) -> list[Nic]:
    """Return the network cards, those that carry data first, each group by bus id."""
    cards = sorted((f for f in functions if f.is_network), key=lambda card: card.busid)
    rdma = [card for card in cards if is_rdma(card)]
    best = max((card.speed or 0.0 for card in rdma), default=0.0)
    nics = [Nic(card, _why_not(card, rdma, best), port_gigabits(card)) for card in cards]
    return sorted(nics, key=lambda nic: nic.reason is not None)


def _why_not(card: PciFunction, rdma: Sequence[PciFunction], best: float) -> str | None:
    if rdma and card not in rdma:
        return "not RDMA beside cards that are"
    if card.speed is not None and card.speed * 2 < best and port_gigabits(card) is None:
        return (
            f"PCIe at {card.speed / 1e9:.1f} GB/s beside an RDMA card at {best / 1e9:.1f} GB/s: "
            "a management function, as of NVSwitches"
        )
    states = [
        value
        for device in card.os_devices
        for name, value in device.info.items()
        if name.startswith("Port") and name.endswith("State")
    ]
    if states and _ACTIVE not in states:
        return "no port of it is active"
    return None
