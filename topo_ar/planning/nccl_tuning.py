"""What NCCL expects its own all-reduces to take, and so which one it chooses.

The formulas and constants are those of ``src/graph/tuning.cc`` of NCCL 2.30.7. They predict the
baseline on GPUs; they know no contention beyond the channel search, and a real start-up cost of a
kernel is only in the base latencies.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from topo_ar.errors import PlanError


class Algorithm(StrEnum):
    """The algorithms NCCL has for an all-reduce without a network plug-in."""

    RING = "ring"
    TREE = "tree"
    NVLS = "nvls"
    NVLS_TREE = "nvls_tree"


class Protocol(StrEnum):
    """How data and flags travel: 4 + 4 bytes, 120 + 8 bytes, or plain buffers with fences."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


class Generation(IntEnum):
    """Rows of the bandwidth tables."""

    VOLTA = 0
    AMPERE = 1
    HOPPER = 2
    BLACKWELL = 3

    @staticmethod
    def of(compute_capability: int) -> "Generation":
        """Return the row for the lowest compute capability of a job, such as 80 or 90."""
        limits = ((100, Generation.BLACKWELL), (90, Generation.HOPPER), (80, Generation.AMPERE))
        rows = (generation for least, generation in limits if compute_capability >= least)
        return next(rows, Generation.VOLTA)


@dataclass(frozen=True, slots=True)
class Channels:
    """What NCCL's search found for a pattern: channels, and bytes/s of each in and between nodes.

    `latency_inter` is the network's own latency in seconds; both stock plug-ins report 0.
    """

    count: int
    intra: float
    inter: float
    latency_inter: float = 0.0


@dataclass(frozen=True, slots=True)
class NcclJob:
    """What the tuning model knows of a job.

    Attributes
    ----------
    num_nodes, ranks_per_node : int
        Equal nodes.
    compute_capability : int
        The lowest in the job, 80 for an A100.
    ring, tree : Channels
        What the search found for the patterns.
    nvls : Channels or None
        The same for NVLink SHARP; None where a switch does not multicast.
    nvlink : bool
        Whether GPUs of a node meet over NVLink (path type NVL); another GPU on the way counts as
        PCIe.
    cpu : {"intel", "amd", "other"}
        Decides the overhead of the network and LL's limits on several nodes.
    ll128 : bool
        Whether LL128 may be used: NVLink inside, NIC no farther than PXB, Volta or newer.
    """

    num_nodes: int
    ranks_per_node: int
    compute_capability: int
    ring: Channels
    tree: Channels
    nvls: Channels | None = None
    nvlink: bool = True
    cpu: str = "intel"
    ll128: bool = True

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Estimate:
    """NCCL's expectation: seconds of latency, bytes/s of message, and the seconds they make."""

    algorithm: Algorithm
    protocol: Protocol
    latency: float
    algbw: float
    seconds: float


_PROTOCOLS = (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)
_GB = 1e9
_US = 1e-6

# Microseconds for LL, LL128, Simple.
_BASE_LATENCY = {Algorithm.TREE: (6.8, 14.0, 8.4), Algorithm.RING: (6.6, 14.0, 8.4)}
_NVLINK_LATENCY = {Algorithm.TREE: (0.6, 1.25, 4.0), Algorithm.RING: (0.6, 1.9, 3.4)}
_PCI_LATENCY = {Algorithm.TREE: (1.0, 1.9, 4.0), Algorithm.RING: (1.0, 2.5, 5.7)}
_NET_LATENCY = {Algorithm.TREE: (5.0, 8.5, 14.0), Algorithm.RING: (2.7, 4.0, 14.0)}
_NVLS_LATENCY = {Algorithm.NVLS: (25.0, 18.0), Algorithm.NVLS_TREE: (25.0, 20.9)}
_NETWORK_OVERHEAD = {"intel": 1.0, "amd": 2.0, "other": 1.0}

# GB/s by generation, each for one node, two nodes, more.
_LL_MAX = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_RING_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7,) * 3, (40.0,) * 3)
_TREE_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)

# What a tree really gets of its bandwidth, by floor(log2(bytes / 64)).
_TREE_CORRECTION = {
    Protocol.LL: "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1 1 1 1",
    Protocol.LL128: "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1 1",
    Protocol.SIMPLE: ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9",
}
_TREE_STEPS = {name: tuple(map(float, row.split())) for name, row in _TREE_CORRECTION.items()}


def estimates(job: NcclJob, nbytes: int) -> list[Estimate]:
    """Return what NCCL expects of each algorithm and protocol for an all-reduce of `nbytes`.

    ``seconds = latency * f + nbytes / algbw``, with NCCL's corrections for trees and for the
    plateau of large rings.

    Raises
    ------
    PlanError
        If the job has fewer than two ranks, a channel has no bandwidth, or `nbytes` is negative.
    """
    _check(job, nbytes)
    found = []
    for algorithm, protocol, latency, algbw in _model(job):
        rate, factor = algbw, 1.0
        if algorithm is Algorithm.TREE:
            step = int(math.log2(max(nbytes, 64) / 64))
            table = _TREE_STEPS[protocol]
            rate *= table[step] if step < len(table) else 1.0
        elif (algorithm, protocol) == (Algorithm.RING, Protocol.SIMPLE) and (
            job.num_nodes > 1 and nbytes / (job.ring.count * job.world_size) >= 64
        ):
            factor = 1.9 if job.compute_capability < 80 else 1.4
        seconds = latency * factor + nbytes / rate
        found.append(Estimate(algorithm, protocol, latency, algbw, seconds))
    return found


def choice(job: NcclJob, nbytes: int) -> Estimate:
    """Return the estimate NCCL acts on: the fastest.

    Raises
    ------
    PlanError
        As for `estimates`.
    """
    return min(estimates(job, nbytes), key=lambda estimate: estimate.seconds)


def _check(job: NcclJob, nbytes: int) -> None:
    if job.world_size < 2 or min(job.num_nodes, job.ranks_per_node) < 1:
        raise PlanError(
            f"NCCL's model needs two ranks, not {job.num_nodes} x {job.ranks_per_node}; "
            "one rank has nothing to reduce"
        )
    if nbytes < 0:
        raise PlanError(f"a buffer cannot hold {nbytes} bytes; give 0 or more")
    for name, channels in (("ring", job.ring), ("tree", job.tree), ("nvls", job.nvls)):
        if channels is not None and not (
            channels.count > 0 and channels.intra > 0 and channels.inter > 0
        ):
            raise PlanError(f"the {name} channels {channels} carry nothing; rates must be positive")
    if job.cpu not in _NETWORK_OVERHEAD:
        raise PlanError(f"cpu is {job.cpu!r}; it must be one of {', '.join(_NETWORK_OVERHEAD)}")


def _model(job: NcclJob) -> Iterator[tuple[Algorithm, Protocol, float, float]]:
    """Yield algorithm, protocol, seconds of latency and bytes/s."""
    for position, protocol in enumerate(_PROTOCOLS):
        if protocol is Protocol.LL128 and not job.ll128:
            continue
        yield Algorithm.RING, protocol, _ring_latency(job, position), _ring_rate(job, protocol)
        yield Algorithm.TREE, protocol, _tree_latency(job, position), _tree_rate(job, protocol)
    if job.nvls is not None and job.nvls.count > 1:
        algorithm = Algorithm.NVLS if job.num_nodes == 1 else Algorithm.NVLS_TREE
        rate = _nvls_rate(job, job.nvls)
        if rate > 0:
            yield algorithm, Protocol.SIMPLE, _nvls_latency(job, algorithm), rate


def _column(job: NcclJob) -> int:
    return min(job.num_nodes, 3) - 1


def _per_channel(job: NcclJob, channels: Channels) -> float:
    # On two nodes NCCL counts the rate inside a node: a tree crosses the network once.
    return channels.intra if job.num_nodes <= 2 else channels.inter


def _ll_max(job: NcclJob) -> float:
    row = Generation.of(job.compute_capability)
    if job.num_nodes > 1:
        row = Generation.AMPERE if job.cpu == "amd" else Generation.VOLTA
    return _LL_MAX[row][_column(job)] * _GB


def _ring_rate(job: NcclJob, protocol: Protocol) -> float:
    total = job.ring.count * _per_channel(job, job.ring)
    if protocol is Protocol.LL:
        total = min(_ll_max(job), 0.5 * total)
    elif protocol is Protocol.LL128:
        row = Generation.of(job.compute_capability)
        total = min(0.92 * total, job.ring.count * _RING_LL128[row][_column(job)] * _GB)
    return total * job.world_size / (2 * (job.world_size - 1))


def _tree_rate(job: NcclJob, protocol: Protocol) -> float:
    row, column = Generation.of(job.compute_capability), _column(job)
    count = job.tree.count
    total = min(0.92 * count * _per_channel(job, job.tree), count * _TREE[row][column] * _GB)
    if protocol is Protocol.LL:
        total = min(total / 3.8, _ll_max(job))
    elif protocol is Protocol.LL128:
        share = 7 / 9 if job.num_nodes == 1 else 120 / 128
        total = min(total * share, count * _TREE_LL128[row][column] * _GB)
    return total / 2


def _nvls_rate(job: NcclJob, nvls: Channels) -> float:
    row = Generation.of(job.compute_capability)
    each = 2 * nvls.intra * _NVLS_EFFICIENCY[row] * (nvls.count - 1) / nvls.count
    if job.num_nodes > 1:
        network = nvls.inter * (2 if job.num_nodes == 2 else 1)
        each = min(each, network, _NVLS_TREE[row][_column(job)] * _GB)
    return each * nvls.count * job.world_size / (2 * (job.world_size - 1))


def _ring_latency(job: NcclJob, protocol: int) -> float:
    inside = (_NVLINK_LATENCY if job.nvlink else _PCI_LATENCY)[Algorithm.RING][protocol]
    simple = protocol == len(_PROTOCOLS) - 1
    steps, crossings = 2 * (job.world_size - 1), 2 * (job.num_nodes - 1)
    overhead = 0.0
    if job.num_nodes > 1:
        overhead = _NETWORK_OVERHEAD[job.cpu] * (3 if simple else 1)
    # With one GPU on a node NCCL takes the tree's network latency for the ring too.
    kind = Algorithm.TREE if job.ranks_per_node == 1 else Algorithm.RING
    network = _NET_LATENCY[kind][protocol] + job.ring.latency_inter / _US * (2 if simple else 1)
    total = (steps - crossings) * max(inside, overhead) + crossings * network
    return (_BASE_LATENCY[Algorithm.RING][protocol] + total) * _US


def _tree_latency(job: NcclJob, protocol: int) -> float:
    inside = (_NVLINK_LATENCY if job.nvlink else _PCI_LATENCY)[Algorithm.TREE][protocol]
    simple = protocol == len(_PROTOCOLS) - 1
    network = _NET_LATENCY[Algorithm.TREE][protocol]
    network += job.tree.latency_inter / _US * (2 if simple else 1)
    depth = int(math.log2(job.num_nodes))
    total = 2 * ((job.ranks_per_node - 1) * inside + depth * network)
    return (_BASE_LATENCY[Algorithm.TREE][protocol] + total) * _US


def _nvls_latency(job: NcclJob, algorithm: Algorithm) -> float:
    inside, network = _NVLS_LATENCY[algorithm]
    depth = math.log2(job.num_nodes) if algorithm is Algorithm.NVLS_TREE else 0
    return (inside + 2 * depth * network) * _US
