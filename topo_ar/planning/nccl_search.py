"""How many channels NCCL's search finds on equal nodes, and how fast each is.

A summary of ``src/graph/search.cc`` of NCCL 2.30.7 for machines whose GPUs all reach each other at
one rate and whose NICs are alike: which speeds are tried, when channels are doubled, when trees and
NVLS get a second speed. The real search walks the PCIe tree and may find less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from topo_ar.errors import PlanError
from topo_ar.planning.nccl_tuning import Channels, NcclJob

_GB = 1e9
_MAX_CHANNELS = 32

# GB/s that are tried, fastest first.
_INTRA = {
    0: (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
    90: (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    100: (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
}
_INTER = {
    0: (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    90: (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    100: (96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
}
# One-way GB/s of an NVLink as NCCL counts it (src/graph/topo.h), from the generation on.
_NVLINK = ((100, 40.1), (90, 20.6), (86, 12.0), (70, 20.0), (60, 18.0))


@dataclass(frozen=True, slots=True)
class NcclMachine:
    """Equal nodes as NCCL's search sees them.

    Attributes
    ----------
    num_nodes, ranks_per_node : int
        The job.
    compute_capability : int
        The lowest, 80 for an A100.
    gpu_bytes_per_s : float
        What one GPU's NVLinks carry together as NCCL counts them, or its PCIe link without NVLink.
    nic_bytes_per_s : sequence of float
        The NICs of a node, as the network plug-in shows them.
    nvlink, nvls : bool
        Whether GPUs meet over NVLink, and whether its switches multicast and reduce.
    cpu : {"intel", "amd", "other"}
        As for `NcclJob`.
    """

    num_nodes: int
    ranks_per_node: int
    compute_capability: int
    gpu_bytes_per_s: float
    nic_bytes_per_s: Sequence[float] = ()
    nvlink: bool = True
    nvls: bool = False
    cpu: str = "intel"


def nvlink_bytes_per_s(compute_capability: int) -> float:
    """Return what NCCL counts for one NVLink of a GPU, in bytes/s one way."""
    rates = (rate for least, rate in _NVLINK if compute_capability >= least)
    return next(rates, 20.0) * _GB


def nccl_job(machine: NcclMachine) -> NcclJob:
    """Return the job as the tuning model takes it.

    Raises
    ------
    PlanError
        If several nodes have no NIC, or nothing carries even NCCL's slowest channel.
    """
    if machine.num_nodes > 1 and not machine.nic_bytes_per_s:
        raise PlanError("several nodes without a NIC cannot reach each other; give the NICs' rates")
    ring = _doubled(machine, _first_pass(machine))
    tree = Channels(ring.count, _tree_speed(machine, ring), ring.inter)
    return NcclJob(
        machine.num_nodes,
        machine.ranks_per_node,
        machine.compute_capability,
        ring,
        tree,
        _nvls(machine) if machine.nvls and machine.ranks_per_node > 1 else None,
        machine.nvlink,
        machine.cpu,
        ll128=machine.nvlink and machine.compute_capability >= 70,
    )


def _speeds(machine: NcclMachine) -> tuple[float, ...]:
    table = _INTER if machine.num_nodes > 1 else _INTRA
    key = max(least for least in table if machine.compute_capability >= least)
    return tuple(speed * _GB for speed in table[key])


def _capacity(machine: NcclMachine, speed: float) -> int:
    """Return how many channels of `speed` fit the NICs and each GPU's links at once."""
    inside = int(min(_gpu_rate(machine) / speed, _MAX_CHANNELS) + 1e-9)
    if machine.num_nodes == 1:
        return inside
    network = sum(int(rate / speed + 1e-9) for rate in machine.nic_bytes_per_s)
    return min(inside, network)


def _gpu_rate(machine: NcclMachine) -> float:
    """Return what channels may claim of one GPU's links together."""
    if machine.num_nodes == 1:
        return machine.gpu_bytes_per_s
    # Each channel enters every node by a NIC, so that it leaves out one GPU's links there.
    g = machine.ranks_per_node
    return machine.gpu_bytes_per_s * g / (g - 1) if g > 1 else float("inf")


def _first_pass(machine: NcclMachine) -> Channels:
    fits = [(_capacity(machine, speed) * speed, speed) for speed in _speeds(machine)]
    total, speed = max(fits, key=lambda fit: fit[0])  # of equals the fastest, which comes first
    if total == 0:
        raise PlanError("no link carries NCCL's slowest channel; correct the rates")
    return Channels(round(total / speed), speed, speed)


def _doubled(machine: NcclMachine, found: Channels) -> Channels:
    if found.intra < 25 * _GB or 2 * found.count > _MAX_CHANNELS:
        return found
    if machine.compute_capability > 80 and found.intra < 50 * _GB and found.count > 4:
        return found
    return Channels(2 * found.count, found.intra / 2, found.inter / 2)


def _tree_speed(machine: NcclMachine, ring: Channels) -> float:
    """Raise the speed inside the node while it is below twice that between nodes."""
    if machine.num_nodes == 1 or machine.ranks_per_node == 1:
        return ring.intra
    best = ring.intra
    for speed in sorted(speed for speed in _speeds(machine) if speed > ring.intra):
        if best >= 2 * ring.inter or ring.count * speed > _gpu_rate(machine):
            break
        best = speed
    return best


def _nvls(machine: NcclMachine) -> Channels | None:
    """One channel for each GPU of the node, which is its head; the network may be faster."""
    heads = machine.ranks_per_node
    fitting = [
        speed
        for speed in _speeds(machine)
        if heads * speed <= machine.gpu_bytes_per_s
        and (machine.num_nodes == 1 or _capacity(machine, speed) >= heads)
    ]
    if not fitting:
        return None
    intra = inter = fitting[0]
    if machine.num_nodes > 1:
        nics = sum(machine.nic_bytes_per_s) / heads
        for speed in sorted(speed for speed in _speeds(machine) if speed > inter):
            if inter >= 2 * intra or speed > nics:
                break
            inter = speed
    return Channels(heads, intra, inter)
