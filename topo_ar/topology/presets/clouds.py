"""Instances that clouds rent out."""

from dataclasses import replace

from topo_ar.topology.model import LinkKind
from topo_ar.topology.presets.amd import MI300X
from topo_ar.topology.presets.machine import (
    AMD,
    EMERALD_RAPIDS,
    SAPPHIRE_RAPIDS,
    SKYLAKE,
    Machine,
    Nics,
    places,
)
from topo_ar.topology.presets.nvidia import (
    CUBE_MESH_V100,
    GB200_TRAY,
    GB300_TRAY,
    HALVES,
    HGX_B200,
    PAIRS,
    SINGLES,
)

_ETHERNET = LinkKind.ETHERNET
_100G, _200G, _400G, _800G = 12.5e9, 25e9, 50e9, 100e9
_FLAT = (0,) * 8

_P3DN = Machine(
    document="EC2 p3dn.24xlarge",
    gpu="V100",
    at=_FLAT,
    cpu_of=(0,),
    cpu=SKYLAKE,
    pcie=8,
    sm=70,
    pairs=CUBE_MESH_V100,
    nics=Nics(_100G, (0,), _ETHERNET, lanes=None),
    switched=False,
    notes=("the instance does not say which socket a device is at; all count as equally far",),
)
_P4D = Machine(
    document="EC2 p4d.24xlarge",
    gpu="A100",
    at=PAIRS,
    cpu_of=(0, 0, 1, 1),
    cpu=SKYLAKE,
    pcie=16,
    sm=80,
    nvlinks=12,
    nics=Nics(_100G, (0, 1, 2, 3), _ETHERNET),
)
_P5 = Machine(
    document="EC2 p5.48xlarge",
    gpu="H100",
    at=SINGLES,
    cpu_of=HALVES,
    cpu=AMD,
    pcie=32,
    sm=90,
    nvlinks=18,
    nics=Nics(_100G, places(*[4] * 8), _ETHERNET, lanes=4),
)
_NDV4 = Machine(
    document="Azure ND A100 v4",
    gpu="A100",
    at=PAIRS,
    cpu_of=(1, 0, 3, 2),
    cpu=AMD,
    pcie=16,
    sm=80,
    nvlinks=12,
    nics=Nics(_200G, PAIRS),
)
_NDV5 = Machine(
    document="Azure ND H100 v5",
    gpu="H100",
    at=SINGLES,
    cpu_of=HALVES,
    cpu=SAPPHIRE_RAPIDS,
    pcie=32,
    sm=90,
    nvlinks=18,
    nics=Nics(_400G, SINGLES),
)
_NO_NIC_MAP = "which NIC is near to which GPU is not verified for this machine"
_TRAY = (
    "a node is one machine of 4 GPUs; that machines of one rack share an NVLink domain is left "
    "out, see gb200-nvl72 and gb300-nvl72 for whole domains"
)
_HOST_NIC = "the total that Google names counts one more NIC, for the host"

MACHINES = {
    "aws-p3dn": _P3DN,
    "aws-p4d": _P4D,
    "aws-p4de": replace(_P4D, document="EC2 p4de.24xlarge"),
    "aws-p5": _P5,
    "aws-p5en": replace(
        _P5,
        document="EC2 p5en.48xlarge",
        gpu="H200",
        cpu=SAPPHIRE_RAPIDS,
        nics=Nics(_200G, places(*[2] * 8), _ETHERNET, lanes=None),
    ),
    "aws-p6-b200": replace(
        _P5,
        document="EC2 p6-b200.48xlarge",
        gpu="B200",
        at=PAIRS,
        cpu_of=(0, 0, 1, 1),
        cpu=EMERALD_RAPIDS,
        sm=100,
        nics=Nics(_400G, PAIRS, _ETHERNET),
        notes=("two more ConnectX-7 functions manage the NVSwitches and carry no data",),
    ),
    "aws-g5.48xl": Machine(
        document="EC2 g5.48xlarge",
        gpu="A10G",
        at=_FLAT,
        cpu_of=(0,),
        cpu=AMD,
        pcie=16,
        sm=86,
        lanes=8,
        nics=Nics(_100G, (0,), _ETHERNET, lanes=None),
        switched=False,
        notes=("PCIe 4.0 x8 of the A10G is not verified: captures show it idle",),
    ),
    "azure-ndv2": replace(
        _P3DN,
        document="Azure NDv2",
        at=HALVES,
        cpu_of=(0, 1),
        nics=Nics(_100G, (0,)),
        notes=(),
    ),
    "azure-ndv4": _NDV4,
    "azure-ndv5": _NDV5,
    "azure-ncv4": Machine(
        document="Azure NC A100 v4",
        gpu="A100 PCIe",
        at=(0, 1, 2, 3),
        cpu_of=(0, 1, 2, 3),
        cpu=AMD,
        pcie=16,
        sm=80,
        nics=Nics(_100G, (0,), _ETHERNET, lanes=None),
        switched=False,
        notes=("the NVLink of its description leads from each GPU to itself, so none counts",),
    ),
    "azure-gb200-v6": replace(GB200_TRAY, document="Azure ND GB200 v6", notes=(_TRAY,)),
    "azure-mi300x-v5": replace(MI300X, document="Azure ND MI300X v5"),
    "gcp-a3-high": replace(
        _NDV5,
        document="Google Cloud A3 High",
        at=PAIRS,
        cpu_of=(0, 0, 1, 1),
        nics=Nics(_200G, (0, 1, 2, 3), _ETHERNET),
        notes=(_NO_NIC_MAP, f"{_HOST_NIC}: 1000 Gbit/s"),
    ),
    "gcp-a3-mega": replace(
        _NDV5,
        document="Google Cloud A3 Mega",
        at=PAIRS,
        cpu_of=(0, 0, 1, 1),
        nics=Nics(_200G, PAIRS, _ETHERNET),
        notes=(_NO_NIC_MAP, f"{_HOST_NIC}: 1800 Gbit/s"),
    ),
    "gcp-a3-ultra": replace(
        _NDV5,
        document="Google Cloud A3 Ultra",
        gpu="H200",
        cpu=EMERALD_RAPIDS,
        nics=Nics(_400G, SINGLES, _ETHERNET),
        notes=(_NO_NIC_MAP,),
    ),
    "gcp-a4": replace(
        HGX_B200,
        document="Google Cloud A4",
        nics=Nics(_400G, SINGLES, _ETHERNET),
        notes=(_NO_NIC_MAP,),
    ),
    "gcp-a4x": replace(
        GB200_TRAY,
        document="Google Cloud A4X",
        nics=Nics(_400G, places(2, 2), _ETHERNET),
        notes=(_TRAY, f"{_HOST_NIC}: 2000 Gbit/s"),
    ),
    "gcp-a4x-max": replace(
        GB300_TRAY,
        document="Google Cloud A4X Max",
        nics=Nics(_800G, places(2, 2), _ETHERNET),
        notes=(_TRAY, f"{_HOST_NIC}: 3600 Gbit/s"),
    ),
}
