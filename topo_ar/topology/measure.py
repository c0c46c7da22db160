"""From timings to figures: the alpha-beta fit, and a topology that carries what was measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from topo_ar.errors import TopologyError
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
from topo_ar.topology.ports import NETWORK_KINDS, links_by_device, port_links, relays

Level = Literal["intra", "inter"]


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A message of n bytes takes ``alpha_seconds + n * beta_seconds_per_byte``.

    `relative_residual` is the root mean square of the relative errors over `num_samples` samples.
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    relative_residual: float
    num_samples: int

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of long messages, None where the samples show no cost of a byte."""
        return 1 / self.beta_seconds_per_byte if self.beta_seconds_per_byte > 0 else None


def fit_alpha_beta(samples: Sequence[tuple[float, float]]) -> AlphaBeta:
    """Fit latency and seconds per byte to samples of (bytes, seconds).

    Least squares of the relative errors, so that short messages count as much as long ones; both
    results are kept from being negative.

    Raises
    ------
    TopologyError
        If there are not at least two sizes, a size is negative or a time is not positive.
    """
    for nbytes, seconds in samples:
        if nbytes < 0 or not 0 < seconds < float("inf"):
            raise TopologyError(f"{nbytes} bytes in {seconds} s is no measurement of a message")
    if len({nbytes for nbytes, _ in samples}) < 2:
        raise TopologyError(
            f"{len(samples)} samples of fewer than two sizes cannot tell latency from rate; "
            "measure at least two sizes"
        )
    # Minimise the sum of (alpha * u + beta * v - 1)**2 with u = 1/t and v = n/t: where the minimum
    # has a negative part, the best one lies on an axis.
    rows = [(1 / seconds, nbytes / seconds) for nbytes, seconds in samples]
    uu, uv, vv = (
        sum(u * u for u, _ in rows),
        sum(u * v for u, v in rows),
        sum(v * v for _, v in rows),
    )
    u1, v1 = sum(u for u, _ in rows), sum(v for _, v in rows)
    candidates = [(u1 / uu, 0.0), (0.0, v1 / vv)]
    determinant = uu * vv - uv * uv
    if determinant > 0:
        candidates.append(((u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant))

    def residual(candidate: tuple[float, float]) -> float:
        alpha, beta = candidate
        return math.sqrt(sum((alpha * u + beta * v - 1) ** 2 for u, v in rows) / len(rows))

    best = min((c for c in candidates if min(c) >= 0), key=residual)
    return AlphaBeta(*best, residual(best), len(rows))


def with_measured(topology: Topology, level: Level, fit: AlphaBeta) -> Topology:
    """Return `topology` with effective rate and latency of one level replaced by `fit`.

    ``intra`` concerns the ports of the ranks inside their nodes, ``inter`` the cables of the NICs.
    `fit` holds for one port: the links of a port share its rate as they did before, and NICs of
    different nominal rates get the same fraction of theirs, the slowest having been measured.
    An effective rate is not raised above a nominal one; what shared memory is said to carry at
    most is raised, because no data sheet says it. The latency of a message is halved where it
    crosses two links.
    """
    devices = {device.id: device for device in topology.devices}
    links = links_by_device(topology.links)
    factors: dict[int, float] = {}
    touched = dict[int, Link]()
    for port in _ports(topology, level, devices, links):
        sums = [figure.value for link in port if (figure := link.effective or link.nominal)]
        rate = fit.bytes_per_s
        for link in port:
            touched[id(link)] = link
            if rate is not None and len(sums) == len(port):
                factor = rate / sum(sums)
                factors[id(link)] = min(factor, factors.get(id(link), factor))
    if level == "inter":
        _share_fraction(list(touched.values()), fit, factors)
    note = f"fit of {fit.num_samples} samples, relative residual {fit.relative_residual:.2g}"
    measured = tuple(
        _measured(link, fit, factors.get(id(link)), note, devices) if id(link) in touched else link
        for link in topology.links
    )
    notes = topology.notes
    if fit.bytes_per_s is None:
        notes += (f"{level}: the measured times do not grow with the size, so rates are unchanged",)
    return validate(msgspec.structs.replace(topology, links=measured, notes=notes))


def with_nic_rates(topology: Topology, rates: Mapping[str, float]) -> Topology:
    """Return `topology` with the effective rate of some nodes' NICs replaced by what they carry.

    Parameters
    ----------
    topology : Topology
        Left as it is.
    rates : mapping of str to float
        By name of the node, in bytes/s for each of its NICs.
    """
    rate_of = {
        device.id: rates[device.node]
        for device in topology.devices
        if device.kind is DeviceKind.NIC and device.node is not None and device.node in rates
    }

    def measured(link: Link) -> Link:
        rate = rate_of.get(link.a) or rate_of.get(link.b)
        if rate is None or link.kind not in NETWORK_KINDS:
            return link
        figure = Figure(rate, Source.MEASURED, "carried in a running job")
        return msgspec.structs.replace(link, effective=figure)

    links = tuple(map(measured, topology.links))
    return validate(msgspec.structs.replace(topology, links=links))


def _ports(
    topology: Topology,
    level: Level,
    devices: Mapping[str, Device],
    links: Mapping[str, Sequence[Link]],
) -> list[list[Link]]:
    if level == "intra":
        return [port_links(links.get(rank, ())) for rank in topology.ranks]
    nics = [device for device in devices.values() if device.kind is DeviceKind.NIC]
    return [[link for link in links.get(nic.id, ()) if link.kind in NETWORK_KINDS] for nic in nics]


def _share_fraction(cables: list[Link], fit: AlphaBeta, factors: dict[int, float]) -> None:
    """Give every cable the fraction of its own rate that the slowest one showed."""
    known = [figure.value for link in cables if (figure := link.nominal or link.effective)]
    if fit.bytes_per_s is None or not known:
        return
    fraction = fit.bytes_per_s / min(known)
    for link in cables:
        before, base = link.effective or link.nominal, link.nominal or link.effective
        if before is not None and base is not None:
            factors[id(link)] = fraction * base.value / before.value


def _measured(
    link: Link, fit: AlphaBeta, factor: float | None, note: str, devices: Mapping[str, Device]
) -> Link:
    before = link.effective or link.nominal
    nominal, effective = link.nominal, link.effective
    value = fit.bytes_per_s if before is None else before.value * factor if factor else None
    if value is not None:
        if nominal is not None and value > nominal.value:
            if link.kind is LinkKind.SHM:
                nominal = Figure(value, Source.MEASURED, note)
            else:
                value = nominal.value
                note += "; cut to the nominal rate"
        effective = Figure(value, Source.MEASURED, note)
    crossed = 2 if relays(devices[link.a], link) or relays(devices[link.b], link) else 1
    latency = Figure(fit.alpha_seconds / crossed, Source.MEASURED, note)
    return msgspec.structs.replace(link, nominal=nominal, effective=effective, latency=latency)
