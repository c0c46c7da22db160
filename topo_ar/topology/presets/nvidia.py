"""Machines that NVIDIA sells or specifies."""

from dataclasses import replace

from topo_ar.topology.presets.machine import (
    AMD,
    BROADWELL,
    EMERALD_RAPIDS,
    GRACE,
    SAPPHIRE_RAPIDS,
    SKYLAKE,
    Machine,
    Nics,
    mesh,
    places,
)

PAIRS = places(2, 2, 2, 2)
SINGLES = tuple(range(8))
HALVES = (0, 0, 0, 0, 1, 1, 1, 1)

_EDR, _HDR, _NDR, _XDR = 12.5e9, 25e9, 50e9, 100e9

# The hybrid cube mesh of eight: two quads, joined corner to corner.
CUBE_MESH_P100 = (
    *mesh(4, 1),
    *((a + 4, b + 4, n) for a, b, n in mesh(4, 1)),
    *((a, a + 4, 1) for a in range(4)),
)
_DOUBLE = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
_SINGLE = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))
CUBE_MESH_V100 = (*((*pair, 2) for pair in _DOUBLE), *((*pair, 1) for pair in _SINGLE))

_DGX1_V100 = Machine(
    document="DGX-1 user guide",
    gpu="V100",
    at=PAIRS,
    cpu_of=(0, 0, 1, 1),
    cpu=BROADWELL,
    pcie=8,
    sm=70,
    pairs=CUBE_MESH_V100,
    nics=Nics(_EDR, (0, 1, 2, 3)),
)
_DGX_A100 = Machine(
    document="DGX A100 data sheet",
    gpu="A100",
    at=PAIRS,
    cpu_of=(0, 1, 2, 3),
    cpu=AMD,
    pcie=16,
    sm=80,
    nvlinks=12,
    nics=Nics(_HDR, PAIRS, bridged=True),
)
_DGX_H100 = Machine(
    document="DGX H100 user guide",
    gpu="H100",
    at=SINGLES,
    cpu_of=HALVES,
    cpu=SAPPHIRE_RAPIDS,
    pcie=32,
    sm=90,
    nvlinks=18,
    nics=Nics(
        _NDR,
        SINGLES,
        bridged=True,
        # Table 6 of the guide: the HCA nearest to GPU 0 .. 7; the others are for storage.
        names=("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"),
    ),
)
HGX_B200 = replace(
    _DGX_H100,
    document="DGX B200 data sheet",
    gpu="B200",
    cpu=EMERALD_RAPIDS,
    sm=100,
    nics=Nics(_NDR, SINGLES, bridged=True),
)
GB200_TRAY = Machine(
    document="GB200 NVL72 data sheet",
    gpu="GB200",
    at=places(2, 2),
    cpu_of=(0, 1),
    cpu=GRACE,
    pcie=32,
    sm=100,
    nvlinks=18,
    c2c=(450e9, None),
    nics=Nics(_NDR, places(2, 2)),
    switched=False,
)
GB300_TRAY = replace(
    GB200_TRAY,
    document="GB300 NVL72 data sheet",
    gpu="GB300",
    pcie=64,
    sm=103,
    # 5 links of 44712 MB/s in NCCL's dump of such a machine.
    c2c=(450e9, 223.56e9),
    nics=Nics(_XDR, places(2, 2)),
)
_DOMAIN = (
    "a node is one NVLink domain of 72 GPUs in 18 trays: NVLink is what its ranks share, as those "
    "of one host do elsewhere; the trays are hosts of their own for whatever is not NVLink"
)

MACHINES = {
    "dgx1-p100": replace(
        _DGX1_V100, document="DGX-1 data sheet", gpu="P100", sm=60, pairs=CUBE_MESH_P100
    ),
    "dgx1-v100": _DGX1_V100,
    "dgx2": Machine(
        document="DGX-2 data sheet",
        gpu="V100",
        at=places(*[2] * 8),
        cpu_of=HALVES,
        cpu=SKYLAKE,
        pcie=8,
        sm=70,
        nvlinks=6,
        nics=Nics(_EDR, SINGLES),
        notes=("which NIC is near to which GPU is not verified for this machine",),
    ),
    "dgx-a100": _DGX_A100,
    "a800": replace(_DGX_A100, document="A800 data sheet", gpu="A800", nvlinks=8),
    "dgx-h100": _DGX_H100,
    "dgx-h200": replace(_DGX_H100, document="DGX H200 data sheet", gpu="H200"),
    "hgx-b200": HGX_B200,
    "gb200-nvl72": replace(GB200_TRAY, trays=18, notes=(_DOMAIN,)),
    "gb300-nvl72": replace(GB300_TRAY, trays=18, notes=(_DOMAIN,)),
}
