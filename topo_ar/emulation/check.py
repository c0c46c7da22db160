"""The self-check: what the emulated links carry, against what the spec says, and round trips."""

import logging
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.layout import Host
from topo_ar.emulation.links import default_burst, payload_fraction
from topo_ar.emulation.loopback import LoopbackCluster
from topo_ar.errors import EmulationError
from topo_ar.units import format_rate

_log = logging.getLogger("topo_ar")
_ENDPOINT = Path(__file__).with_name("endpoint.py")
_PORT = 29499
_TOLERANCE = 0.05
_BUSY = 0.85
_PACE = 1.08  # enough to see a link that is too fast
_COPY_SECONDS = 0.3
_COPY_SEGMENTS = 100
_LONGEST_COPY = 2.0


class PairReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one NIC of two hosts carried, one way after the other.

    `expected`, `forward` and `backward` are TCP payload in bytes/s, `round_trip` is the median in
    seconds of an idle link, `cpu_busy` the busy share of all CPUs during the copy, and `held`
    whether both directions are within 5 % of what is expected.
    """

    a: str
    b: str
    nic: str
    expected: float
    forward: float
    backward: float
    round_trip: float
    cpu_busy: float
    congestion_control: str
    held: bool


class EmulationReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run's network was made and what it was seen to carry; goes into the run's manifest.

    `nics` are each host's nominal rates and `uplinks` the racks', in bytes/s; `burst` is the
    largest credit of a token bucket in bytes: messages below it are not shaped. Without emulation
    `reason` says why, and no other figure means anything.
    """

    emulated: bool
    reason: str
    ranks: tuple[tuple[int, ...], ...]
    nics: tuple[tuple[float, ...], ...]
    uplinks: dict[str, float]
    mtu: int
    burst: int
    latency: float
    congestion_control: str
    pairs: tuple[PairReport, ...] = ()

    @property
    def held(self) -> bool:
        """Whether every measured link carried what it should; true when none was measured."""
        return all(pair.held for pair in self.pairs)


def report(cluster: Cluster | LoopbackCluster, *, measure: bool = True) -> EmulationReport:
    """Return what `cluster` is and, unless told not to `measure`, what its links carry.

    Each pair of neighbouring hosts takes about 0.7 seconds per NIC. A link that does not hold its
    rate is logged as a warning; the usual cause is that the CPUs are busy.

    Raises
    ------
    EmulationError
        If two hosts cannot talk.
    """
    spec, layout = cluster.spec, cluster.layout
    rates = [rate for node in spec.nodes for rate in node.nics] + list(spec.uplinks.values())
    emulated = isinstance(cluster, Cluster)
    pairs: tuple[PairReport, ...] = ()
    if isinstance(cluster, Cluster) and measure:
        neighbours = zip(layout.hosts, layout.hosts[1:], strict=False)
        pairs = tuple(
            check_pair(cluster, a.name, b.name, index)
            for a, b in neighbours
            for index in range(min(len(a.nics), len(b.nics)))
        )
    return EmulationReport(
        emulated=emulated,
        reason="" if isinstance(cluster, Cluster) else cluster.reason,
        ranks=tuple(node.ranks for node in spec.nodes),
        nics=tuple(node.nics for node in spec.nodes),
        uplinks=spec.uplinks,
        mtu=spec.mtu,
        burst=max(default_burst(rate) for rate in rates) if spec.burst is None else spec.burst,
        latency=spec.latency,
        congestion_control=spec.congestion_control if emulated else "",
        pairs=pairs,
    )


def check_pair(cluster: Cluster, a: str, b: str, nic: int = 0) -> PairReport:
    """Copy between NIC number `nic` of hosts `a` and `b`, each way, and compare.

    A copy that does not reach its rate is repeated once, and for longer: a loss in slow start or
    other work on the CPUs may have come in between.

    Raises
    ------
    EmulationError
        If they cannot talk.
    """
    result = _copy_each_way(cluster, a, b, nic, stretch=1.0)
    if not result.held:
        result = _copy_each_way(cluster, a, b, nic, stretch=3.0)
    if not result.held:
        rates = (result.forward, result.backward, result.expected)
        _log.warning(
            "%s and %s exchange %s and %s over %s where %s are expected%s",
            *(a, b, format_rate(rates[0]), format_rate(rates[1]), result.nic),
            format_rate(rates[2]),
            "; the CPUs are busy" if result.cpu_busy > _BUSY else "",
        )
    return result


def round_trip(cluster: Cluster, a: str, b: str) -> float:
    """Return the median round trip in seconds of one byte over TCP between two idle hosts."""
    return float(median(_converse(cluster, a, b, 0, 0.0, 1 << 30)[0]["round_trips"]))


def _copy_each_way(cluster: Cluster, a: str, b: str, nic: int, stretch: float) -> PairReport:
    layout = cluster.layout
    shaped = _path_rate(cluster, layout.host(a), layout.host(b), nic)
    expected = shaped * payload_fraction(cluster.spec.mtu)
    # At low rates a few segments of 64 KiB would decide the figure.
    seconds = stretch * min(max(_COPY_SECONDS, _COPY_SEGMENTS * 65536 / shaped), _LONGEST_COPY)
    near, far = _converse(cluster, a, b, nic, seconds, round(_PACE * shaped))
    forward, backward = far["received"], near["received"]
    return PairReport(
        a=a,
        b=b,
        nic=layout.host(a).nics[nic].name,
        expected=expected,
        forward=forward,
        backward=backward,
        round_trip=median(near["round_trips"]),
        cpu_busy=near["cpu_busy"],
        congestion_control=near["congestion_control"],
        held=all(abs(rate - expected) <= _TOLERANCE * expected for rate in (forward, backward)),
    )


def _path_rate(cluster: Cluster, a: Host, b: Host, nic: int) -> float:
    rates = [cluster.rate(host.name, host.nics[nic].name) for host in (a, b)]
    if a.leaf != b.leaf:
        trunks = [trunk.rate for trunk in cluster.layout.trunks if trunk.leaf in (a.leaf, b.leaf)]
        rates += [rate for rate in trunks if rate is not None]
    return min(rates)


def _converse(
    cluster: Cluster, a: str, b: str, nic: int, seconds: float, pace: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    address = cluster.layout.host(b).nics[nic].address
    python = [sys.executable, "-I", "-S", str(_ENDPOINT)]
    where = [address, str(_PORT), repr(seconds), str(pace)]
    pipe = subprocess.PIPE
    server = cluster.popen(b, [*python, "serve", *where], stdout=pipe, stderr=pipe, text=True)
    try:
        if server.stdout is None or server.stdout.readline() != "ready\n":
            raise EmulationError(f"{b} cannot listen: {_complaint(server)}")
        near = cluster.run(a, [*python, "connect", *where])
        far, _ = server.communicate(timeout=30)
    except subprocess.TimeoutExpired as error:
        raise EmulationError(f"the self-check between {a} and {b} does not end") from error
    finally:
        server.kill()
        server.communicate()
    return msgspec.json.decode(near), msgspec.json.decode(far)


def _complaint(process: "subprocess.Popen[Any]") -> str:
    _, errors = process.communicate()
    return str((errors.strip().splitlines() or ["no message"])[-1])
