"""Which of several descriptions of one machine is believed, and what is said where they differ.

Figures go by their source: measured, NVML, sysfs, a file, a preset, assumed. Among figures from
files, and for what is there at all, descriptions go by what made them:

1. a probe of the machine (our JSON with figures from NVML or sysfs),
2. the XML of NCCL or RCCL: what NVML and sysfs say, or what a cloud ships because they are wrong,
3. hwloc's XML: the same PCI tree, but links at their current speed,
4. what ``nvidia-smi topo -m``, ``nvlink``, ``topo -p2p`` and ``rocm-smi`` print, in this order:
   classes and counts without bus ids,
5. our JSON made from other files, then presets.

One exception: a link cannot run faster than it can. A current speed above what a more trusted
description declares is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from topo_ar.topology.model import Figure, Link, LinkKind, Source
from topo_ar.topology.readers import Description

_SOURCES = tuple(Source)
_PROBED = (Source.MEASURED, Source.NVML, Source.SYSFS)
_FORMATS = (
    "nccl-xml",
    "hwloc-xml",
    "nvidia-smi-topo",
    "nvidia-smi-nvlink",
    "nvidia-smi-p2p",
    "rocm-smi-topo",
)
_OWN = "topo-ar"
_READS_CURRENT_SPEED = "hwloc-xml"
# What two figures may differ by before it is said: vendors round.
_ROUNDING = 0.01


def by_trust(descriptions: Sequence[Description]) -> list[Description]:
    """Return the descriptions, the most trusted first; those alike keep their order."""
    return sorted(descriptions, key=_rank)


def _rank(description: Description) -> int:
    if description.format != _OWN:
        known = description.format in _FORMATS
        return 1 + (_FORMATS.index(description.format) if known else len(_FORMATS))
    links = description.topology.links
    sources = {f.source for link in links for f in (link.nominal, link.effective) if f}
    if sources & set(_PROBED):
        return 0
    return len(_FORMATS) + (3 if Source.PRESET in sources else 2)


@dataclass(slots=True)
class Conflicts:
    """What descriptions say differently, each kind of difference once with all its places."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, where: str, what: str) -> None:
        """Remember that at `where` the descriptions differ as `what` says."""
        places = self.found.setdefault(what, [])
        if where not in places:
            places.append(where)

    def notes(self) -> list[str]:
        """Return a sentence for each difference."""
        return [f"{', '.join(where)}: {what}" for what, where in self.found.items()]


@dataclass(frozen=True, slots=True)
class Claim:
    """A link as one description has it, the most trusted first in any sequence of these."""

    said_by: Description
    link: Link


@dataclass(frozen=True, slots=True)
class Chosen:
    """The figures that are believed, and whose they are."""

    nominal: Figure | None = None
    effective: Figure | None = None
    latency: Figure | None = None


def choose_figures(claims: Sequence[Claim], where: str, conflicts: Conflicts) -> Chosen:
    """Return the figures to believe of one link; `where` names it in notes.

    Nominal and effective come from one description, so that they fit each other; what it lacks is
    taken from the next where it does not contradict.
    """
    told = [claim for claim in claims if _main(claim.link) is not None]
    told.sort(key=lambda claim: _SOURCES.index(_source(claim.link)))
    latency = _best([claim.link.latency for claim in claims])
    if not told:
        return Chosen(latency=latency)
    best, reason = told[0], ""
    for claim in told[1:]:
        is_current = claim.said_by.format == _READS_CURRENT_SPEED
        if is_current and claim.link.kind is LinkKind.PCIE and _value(claim) > _value(best):
            best, reason = claim, ", as no link is faster than it can"
    for claim in told:
        differ = abs(_value(claim) - _value(best)) > _ROUNDING * _value(best)
        if differ and _source(claim.link) is not Source.ASSUMED:
            conflicts.add(
                where,
                f"{claim.link.kind.value} {_value(claim) / 1e9:.4g} GB/s in {_name(claim)}, "
                f"{_value(best) / 1e9:.4g} in {_name(best)}; {_name(best)} is taken{reason}",
            )
    nominal, effective = best.link.nominal, best.link.effective
    for claim in told:
        nominal = nominal or _if_fits(claim.link.nominal, effective, above=True)
        effective = effective or _if_fits(claim.link.effective, nominal, above=False)
    return Chosen(nominal, effective, latency)


def _if_fits(figure: Figure | None, other: Figure | None, *, above: bool) -> Figure | None:
    if figure is None or other is None:
        return figure
    return figure if (figure.value >= other.value) is above else None


def _main(link: Link) -> Figure | None:
    return link.nominal or link.effective


def _source(link: Link) -> Source:
    figure = _main(link)
    return figure.source if figure else Source.ASSUMED


def _value(claim: Claim) -> float:
    figure = _main(claim.link)
    return figure.value if figure else 0.0


def _name(claim: Claim) -> str:
    return claim.said_by.topology.name


def _best(figures: Sequence[Figure | None]) -> Figure | None:
    known = [figure for figure in figures if figure is not None]
    return min(known, key=lambda figure: _SOURCES.index(figure.source), default=None)
