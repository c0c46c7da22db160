"""Active measurement of latency and payload rate, inside the nodes and between them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import msgspec
import torch

from topo_ar.execution.gather import Channel
from topo_ar.topology.levels import levels
from topo_ar.topology.measure import AlphaBeta, fit_alpha_beta, with_measured
from topo_ar.topology.model import Source, Topology
from topo_ar.units import format_rate

logger = logging.getLogger("topo_ar")

Samples = list[tuple[int, float]]
NodeAllReduce = Callable[[torch.Tensor], None]

_NETWORK_NBYTES = (8, 4 << 20, 16 << 20)
_NODE_NBYTES = (64 << 10, 1 << 20, 8 << 20)
_NODE_CALLS = 9
_REPEATS = 5


def measure_levels(
    channel: Channel,
    nodes: Sequence[tuple[int, ...]],
    topology: Topology,
    all_reduce_in_node: NodeAllReduce,
) -> Topology:
    """Return `topology` with measured figures on its links, the same on all ranks. Collective.

    Between nodes: the first rank of each node sends to the last rank of the next (gloo
    point-to-point), so that both directions of every NIC are in use; the best of a few repeats
    counts. Inside a node: the engine's own reduce-scatter and all-gather through shared memory, on
    all nodes at once, so that ranks share cores and memory as they will; in `all_reduce_in_node`
    every rank reduces a tensor over its node and waits. Of all nodes and ranks the slowest counts.
    """
    measured = topology
    if len(nodes) > 1:
        fit = _network_fit(
            _slowest(channel, _between_nodes(channel, nodes)), topology, warn=channel.rank == 0
        )
        measured = with_measured(measured, "inter", fit)
    num_local = max(len(node) for node in nodes)
    if num_local > 1:
        fit = fit_alpha_beta(_slowest(channel, _inside(channel, num_local, all_reduce_in_node)))
        # The fit's latency is that of all 2(g-1) steps of the two stages.
        fit = replace(fit, alpha_seconds=fit.alpha_seconds / (2 * (num_local - 1)))
        measured = with_measured(measured, "intra", fit)
    return measured


def _network_fit(samples: Samples, topology: Topology, *, warn: bool) -> AlphaBeta:
    """Fit latency to the smallest message and rate to the difference of the two largest.

    The difference leaves out latency and whatever credit an idle link had saved up. Where the
    system says what the NIC is shaped to, the share of it that is payload is known exactly: a busy
    machine measures less, and a limit must not be beatable.
    """
    (_, alpha), (less, t0), (more, t1) = samples
    beta = max(t1 - t0, 1e-9) / (more - less)
    nics = [nic for node in levels(topology).nodes for nic in node.nics]
    if nics and all(nic.source is Source.SYSFS for nic in nics):
        least = min(nic.payload for nic in nics)
        if warn and beta * least > 1.05:
            logger.warning(
                "the NICs were seen to carry %s of %s: is the machine busy, or the link shared?",
                format_rate(1 / beta),
                format_rate(least),
            )
        beta = 1 / least
    residual = abs(alpha + beta * more - t1) / t1
    return AlphaBeta(alpha, beta, residual, len(samples))


def _between_nodes(channel: Channel, nodes: Sequence[tuple[int, ...]]) -> Samples:
    samples: Samples = []
    at = next(i for i, node in enumerate(nodes) if channel.rank in node)
    for nbytes in _NETWORK_NBYTES:
        buffers = [torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2)]
        best = float("inf")
        for _ in range(_REPEATS):
            channel.barrier()
            begin = time.perf_counter()
            works = []
            if channel.rank == nodes[at][0]:
                onward = nodes[(at + 1) % len(nodes)][-1]
                works.append(channel.send(buffers[0], onward))
            if channel.rank == nodes[at][-1]:
                back = nodes[at - 1][0]
                works.append(channel.receive(buffers[1], back))
            for work in works:
                work.wait()
            if works:
                best = min(best, time.perf_counter() - begin)
        samples.append((nbytes, best if best < float("inf") else 0.0))
    return samples


def _inside(channel: Channel, num_local: int, all_reduce: NodeAllReduce) -> Samples:
    """Time the engine's own all-reduce inside every node; bytes are those through one port."""
    samples: Samples = []
    for nbytes in _NODE_NBYTES:
        tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device="cpu")
        all_reduce(tensor)
        channel.barrier()
        times = []
        for _ in range(_NODE_CALLS):
            begin = time.perf_counter()
            all_reduce(tensor)
            times.append(time.perf_counter() - begin)
        through_port = 2 * (num_local - 1) * nbytes // num_local
        samples.append((through_port, median(times)))
    return samples


def _slowest(channel: Channel, mine: Samples) -> Samples:
    gathered = [
        msgspec.json.decode(data, type=Samples)
        for data in channel.all_gather(msgspec.json.encode(mine))
    ]
    return [
        (nbytes, max(samples[i][1] for samples in gathered)) for i, (nbytes, _) in enumerate(mine)
    ]
