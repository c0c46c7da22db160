"""What tells one machine from another, as data."""

from dataclasses import dataclass

from topo_ar.topology.model import LinkKind


@dataclass(frozen=True, slots=True)
class Cpu:
    """A processor by the names under which NCCL knows it; `model` is Intel's model number."""

    arch: str
    vendor: str
    model: int = 0


AMD = Cpu("x86_64", "AuthenticAMD")
BROADWELL = Cpu("x86_64", "GenuineIntel", 0x4F)
SKYLAKE = Cpu("x86_64", "GenuineIntel", 0x55)
SAPPHIRE_RAPIDS = Cpu("x86_64", "GenuineIntel", 0x8F)
EMERALD_RAPIDS = Cpu("x86_64", "GenuineIntel", 0xCF)
GRACE = Cpu("arm64", "ARM")

Triples = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Nics:
    """The data NICs of a machine: `at` names the place of each.

    Attributes
    ----------
    rate : float
        Nominal bytes/s of one NIC.
    at : tuple of int
        The place of each NIC.
    kind : LinkKind
        Of its cable.
    lanes : int or None
        Of its PCIe link; None where not known.
    bridged : bool
        Whether each NIC sits behind a PCIe bridge of its own.
    names : tuple of str
        What the system calls them, where a document says so.
    """

    rate: float
    at: tuple[int, ...]
    kind: LinkKind = LinkKind.INFINIBAND
    lanes: int | None = 16
    bridged: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with GPUs.

    GPUs and NICs sit at places, which are PCIe switches or, without `switched`, the root ports of
    a CPU.

    Attributes
    ----------
    document : str
        Where the figures are from; goes into their notes.
    gpu : str
        The GPU's name.
    at : tuple of int
        The place of each GPU.
    cpu_of : tuple of int
        The CPU (or NUMA element) of each place.
    cpu : Cpu
        The processor.
    pcie : float
        GT/s of one lane.
    sm, gcn : int or None, str or None
        Compute capability, 80 is 8.0; AMD architecture.
    nvlinks : int
        Links of each GPU to the NVSwitches.
    pairs : tuple of (int, int, int)
        Direct NVLink or XGMI: two GPUs and the number of links.
    link_effective : float or None
        Payload bytes/s of one link of `pairs` where that was measured.
    c2c : tuple of (float, float or None), or None
        Nominal and effective bytes/s of each GPU's coherent link to its CPU. Switches then lead to
        NICs only.
    nics : Nics or None
        None where the machine has none for data.
    trays : int
        How many times all of the above is there, joined by NVLink alone.
    lanes : int
        PCIe lanes of a GPU.
    switched : bool
        Whether places are PCIe switches.
    notes : tuple of str
        What is not verified, or easily misread, in sentences.
    """

    document: str
    gpu: str
    at: tuple[int, ...]
    cpu_of: tuple[int, ...]
    cpu: Cpu
    pcie: float
    sm: int | None = None
    gcn: str | None = None
    nvlinks: int = 0
    pairs: Triples = ()
    link_effective: float | None = None
    c2c: tuple[float, float | None] | None = None
    nics: Nics | None = None
    trays: int = 1
    lanes: int = 16
    switched: bool = True
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return len(self.at) * self.trays


@dataclass(frozen=True, slots=True)
class CpuHost:
    """A host without GPUs: how many ranks by default, and nominal bytes/s of its NICs."""

    ranks: int
    nics: tuple[float, ...]


def mesh(size: int, count: int) -> Triples:
    """Return the pairs of a full mesh of `size` GPUs with `count` links each."""
    return tuple((a, b, count) for a in range(size) for b in range(a + 1, size))


def places(*sizes: int) -> tuple[int, ...]:
    """Return the place of each device where place i holds ``sizes[i]`` of them.

    Examples
    --------
    >>> places(2, 1)
    (0, 0, 1)
    """
    return tuple(place for place, size in enumerate(sizes) for _ in range(size))
