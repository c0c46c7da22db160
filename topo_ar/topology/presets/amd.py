"""Machines with AMD GPUs."""

from topo_ar.topology.model import LinkKind
from topo_ar.topology.presets.machine import (
    AMD,
    SAPPHIRE_RAPIDS,
    Machine,
    Nics,
    mesh,
    places,
)

MI300X = Machine(
    document="MI300X data sheet",
    gpu="MI300X",
    at=tuple(range(8)),
    cpu_of=(0, 0, 0, 0, 1, 1, 1, 1),
    cpu=SAPPHIRE_RAPIDS,
    pcie=32,
    gcn="gfx942",
    pairs=mesh(8, 1),
    nics=Nics(50e9, tuple(range(8)), bridged=True),
)

# Two GCDs of one package have four links; the others are those of RCCL's models of such machines.
_PACKAGES_4 = tuple((a, a + 1, 4) for a in range(0, 8, 2))
_BETWEEN_4 = ((0, 2), (0, 6), (1, 3), (1, 5), (2, 4), (3, 7), (4, 6), (5, 7))
_PACKAGES_8 = tuple((a, a + 1, 4) for a in range(0, 16, 2))
_BETWEEN_8 = (
    (0, 2, 1), (0, 4, 2), (1, 2, 1), (1, 3, 1), (1, 5, 1), (2, 6, 1), (3, 7, 2), (4, 12, 1),
    (5, 13, 1), (5, 14, 1), (6, 13, 1), (6, 14, 1), (7, 15, 1), (8, 10, 1), (8, 12, 2),
    (9, 10, 1), (9, 11, 1), (9, 13, 1), (10, 14, 1), (11, 15, 2),
)  # fmt: skip

MACHINES = {
    "frontier": Machine(
        document="OLCF Frontier user guide",
        gpu="MI250X GCD",
        at=places(2, 2, 2, 2),
        cpu_of=(0, 1, 2, 3),
        cpu=AMD,
        pcie=16,
        gcn="90a",
        pairs=(*_PACKAGES_4, *((*pair, 1) for pair in _BETWEEN_4)),
        c2c=(36e9, None),
        nics=Nics(25e9, (0, 1, 2, 3), LinkKind.ETHERNET),
        notes=(
            "which GCDs of different packages are linked, and that they are by one link, is not "
            "verified; nor is it to which GCD of a package its NIC belongs",
        ),
    ),
    "mi250x-16gcd": Machine(
        document="RCCL's model topo_16p1h",
        gpu="MI250X GCD",
        at=places(4, 4, 4, 4),
        cpu_of=(0, 1, 2, 3),
        cpu=AMD,
        pcie=16,
        gcn="90a",
        pairs=(*_PACKAGES_8, *_BETWEEN_8),
        nics=Nics(25e9, places(2, 2, 2, 2), bridged=True),
    ),
    "mi300x": MI300X,
    "mi210-4": Machine(
        document="MI210 data sheet",
        gpu="MI210",
        at=(0, 1, 2, 3),
        cpu_of=(0, 1, 2, 3),
        cpu=AMD,
        pcie=16,
        gcn="90a",
        pairs=mesh(4, 1),
        # Measured one way between two GPUs, ARCHER2 user documentation.
        link_effective=42.2e9,
        switched=False,
    ),
}
