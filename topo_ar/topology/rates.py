"""What links carry: data sheets (nominal) and the constants NCCL and RCCL plan with (effective).

The constants are those of NCCL 2.30.7 and of RCCL (2024-10), ``src/graph/topo.h``; bytes/s one
way. They sit below the data sheets because they are fitted to what a payload gets.
"""

from dataclasses import dataclass

from topo_ar.topology.model import Figure, Source

_NCCL = "NCCL 2.30.7"
_RCCL = "RCCL 2024-10"


@dataclass(frozen=True, slots=True)
class Rates:
    """The two rates of one link; None where not known."""

    nominal: Figure | None = None
    effective: Figure | None = None


# Lowest compute capability, data sheet and NCCL constant of one NVLink.
_NVLINK = (
    (100, 50e9, 40.1e9),
    (90, 25e9, 20.6e9),
    (87, 25e9, 20e9),
    (86, 14.0625e9, 12e9),
    (70, 25e9, 20e9),
    (60, 20e9, 18e9),
)
# AMD architecture, data sheet (46: 23 GT/s, 50: 25 GT/s, 64: 32 GT/s; 16 lanes) and RCCL constant.
_XGMI = {
    "906": (46e9, 24e9),
    "908": (46e9, 24e9),
    "90a": (50e9, 36e9),
    "910": (50e9, 36e9),
    "940": (64e9, 48e9),
    "941": (64e9, 48e9),
    "942": (64e9, 48e9),
}


def nvlink_rates(sm: int | None, count: int, source: Source) -> Rates:
    """Return the rates of `count` NVLinks of a GPU of compute capability `sm` (80 is 8.0)."""
    for lowest, nominal, effective in _NVLINK:
        if sm is not None and sm >= lowest:
            return _times(count, "NVLink", nominal, effective, _NCCL, source)
    return Rates()


def xgmi_rates(gcn: str | None, count: int, source: Source) -> Rates:
    """Return the rates of `count` XGMI links of a GPU such as ``906``, ``90a`` or ``gfx942``."""
    known = _XGMI.get((gcn or "").removeprefix("gfx"))
    return _times(count, "XGMI", *known, _RCCL, source) if known else Rates()


def _times(
    count: int, name: str, nominal: float, effective: float, library: str, source: Source
) -> Rates:
    return Rates(
        Figure(count * nominal, source, f"{count} {name} x {nominal / 1e9:g} GB/s, data sheet"),
        Figure(count * effective, source, f"{count} {name} x {effective / 1e9:g} GB/s, {library}"),
    )


def pcie_rates(gigatransfers_per_s: float, width: int, source: Source, note: str = "") -> Rates:
    """Return the rates of a PCIe link of `width` lanes.

    Nominal is the line code's payload: 8b/10b to generation 2, 128b/130b to 5, 242/256 bytes of a
    flit from 6 on. Effective is NCCL's ``width * rate / 80`` GB/s.
    """
    speed = gigatransfers_per_s
    code = 0.8 if speed < 8 else 128 / 130 if speed < 64 else 242 / 256
    nccl_rate = speed * (6 if speed < 8 else 7.5)
    lanes = f"PCIe {speed:g} GT/s x{width}"
    return Rates(
        Figure(speed * 1e9 / 8 * width * code, source, note or lanes),
        Figure(width * nccl_rate / 80 * 1e9, source, note or f"{lanes}, {_NCCL}"),
    )


def interconnect_rate(
    arch: str | None, vendor: str | None, model: int | None, source: Source
) -> Figure:
    """Return what NCCL plans with between two CPUs of a host; assumed where the CPU is unknown."""
    value = None
    if arch == "x86_64" and vendor == "AuthenticAMD":
        value = 16e9
    elif arch == "x86_64" and vendor == "GenuineIntel" and model is not None and model >= 0:
        value = next(
            v for m, v in ((0xCF, 40e9), (0x8F, 22e9), (0x55, 10e9), (0, 6e9)) if model >= m
        )
    elif arch == "ppc64":
        value = 32e9
    elif arch == "arm64":
        value = 6e9
    if value is None:
        return Figure(6e9, Source.ASSUMED, "CPU model not known; slowest constant of " + _NCCL)
    return Figure(value, source, f"constant of {_NCCL} for this CPU")
