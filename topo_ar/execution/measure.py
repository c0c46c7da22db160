"""Active measurement of latency and payload rate, inside the nodes and between them."""

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from topo_ar.execution.gather import Channel
from topo_ar.topology.measure import fit_alpha_beta, with_measured
from topo_ar.topology.model import Topology

Samples = list[tuple[int, float]]

_SMALL_NBYTES = (8, 4096)
_LARGE_NBYTES = (4 << 20, 16 << 20)
_COPY_NBYTES = (64 << 10, 512 << 10, 2 << 20)
_REPEATS = 5


def measure_levels(
    channel: Channel, nodes: Sequence[tuple[int, ...]], topology: Topology
) -> Topology:
    """Return `topology` with measured figures on its links, the same on all ranks. Collective.

    Between nodes: the first rank of each node sends to that of the next node while it receives
    from that of the one before (gloo point-to-point, so both directions of every NIC are in use).
    Inside a node: every rank copies memory at once, which is what a shared-memory stage does. The
    best of a few repeats counts, and of all nodes the slowest.
    """
    measured = topology
    if len(nodes) > 1:
        samples = _slowest(channel, _between_nodes(channel, nodes))
        measured = with_measured(measured, "inter", fit_alpha_beta(samples))
    if any(len(node) > 1 for node in nodes):
        samples = _slowest(channel, _inside(channel))
        measured = with_measured(measured, "intra", fit_alpha_beta(samples))
    return measured


def _between_nodes(channel: Channel, nodes: Sequence[tuple[int, ...]]) -> Samples:
    firsts = [node[0] for node in nodes]
    samples: Samples = []
    for nbytes in (*_SMALL_NBYTES, *_LARGE_NBYTES):
        best = float("inf")
        outgoing, incoming = (
            torch.zeros(nbytes, dtype=torch.uint8),
            torch.empty(nbytes, dtype=torch.uint8),
        )
        for _ in range(_REPEATS):
            dist.barrier(group=channel.group)
            if channel.rank in firsts:
                at = firsts.index(channel.rank)
                best = min(best, _shift(channel, firsts, at, outgoing, incoming))
        samples.append((nbytes, best if channel.rank in firsts else 0.0))
    return samples


def _shift(
    channel: Channel, firsts: list[int], at: int, outgoing: torch.Tensor, incoming: torch.Tensor
) -> float:
    onward, back = firsts[(at + 1) % len(firsts)], firsts[at - 1]
    begin = time.perf_counter()
    works = [
        dist.isend(outgoing, group=channel.group, group_dst=onward),
        dist.irecv(incoming, group=channel.group, group_src=back),
    ]
    for work in works:
        if work is not None:
            work.wait()
    return time.perf_counter() - begin


def _inside(channel: Channel) -> Samples:
    source, target = np.zeros(max(_COPY_NBYTES), np.uint8), np.zeros(max(_COPY_NBYTES), np.uint8)
    samples: Samples = []
    for nbytes in _COPY_NBYTES:
        dist.barrier(group=channel.group)
        best = float("inf")
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            np.copyto(target[:nbytes], source[:nbytes])
            best = min(best, time.perf_counter() - begin)
        samples.append((nbytes, best))
    return samples


def _slowest(channel: Channel, mine: Samples) -> Samples:
    gathered = [
        msgspec.json.decode(data, type=Samples)
        for data in channel.all_gather(msgspec.json.encode(mine))
    ]
    return [
        (nbytes, max(samples[i][1] for samples in gathered)) for i, (nbytes, _) in enumerate(mine)
    ]
