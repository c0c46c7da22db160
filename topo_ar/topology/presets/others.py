"""Supercomputers, servers with cards in slots, workstations, and hosts without GPUs."""

from topo_ar.topology.model import LinkKind
from topo_ar.topology.presets.machine import AMD, CpuHost, Machine, Nics, mesh

_ASSUMED = "what a server of this kind usually has; nothing of it belongs to one machine"

MACHINES = {
    "perlmutter": Machine(
        document="NERSC Perlmutter",
        gpu="A100",
        at=(3, 2, 1, 0),
        cpu_of=(0, 1, 2, 3),
        cpu=AMD,
        pcie=16,
        sm=80,
        pairs=mesh(4, 4),
        nics=Nics(25e9, (0, 1, 2, 3), LinkKind.ETHERNET),
        switched=False,
    ),
    "pcie-4": Machine(
        document="assumed server",
        gpu="PCIe card",
        at=(0,) * 4,
        cpu_of=(0,),
        cpu=AMD,
        pcie=16,
        nics=Nics(12.5e9, (0,), LinkKind.ETHERNET),
        switched=False,
        notes=(_ASSUMED,),
    ),
    "pcie-8": Machine(
        document="assumed server",
        gpu="PCIe card",
        at=(0,) * 4 + (1,) * 4,
        cpu_of=(0, 1),
        cpu=AMD,
        pcie=16,
        nics=Nics(12.5e9, (0, 1), LinkKind.ETHERNET),
        switched=False,
        notes=(_ASSUMED,),
    ),
    "ws-2x3090": Machine(
        document="GeForce RTX 3090 data sheet",
        gpu="RTX 3090",
        at=(0, 0),
        cpu_of=(0,),
        cpu=AMD,
        pcie=16,
        sm=86,
        pairs=((0, 1, 4),),
        lanes=8,
        switched=False,
        notes=("PCIe is taken to be x8 for each card, as boards with two slots share 16 lanes",),
    ),
    "ws-2x5090": Machine(
        document="GeForce RTX 5090 data sheet",
        gpu="RTX 5090",
        at=(0, 0),
        cpu_of=(0,),
        cpu=AMD,
        pcie=32,
        sm=120,
        lanes=8,
        switched=False,
        notes=(
            "these cards have no NVLink and no peer-to-peer copies: what they exchange goes "
            "through the host's memory",
            "PCIe is taken to be x8 for each card, as boards with two slots share 16 lanes",
        ),
    ),
}
HOSTS = {
    "cpu-host": CpuHost(ranks=4, nics=(125e6,)),
    "laptop": CpuHost(ranks=2, nics=()),
}
