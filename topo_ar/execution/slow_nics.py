"""What the NICs of a running job carry now, against what its topology says of them.

Nodes send in a ring, all at once, so that each NIC is busy both ways. A flow is as fast as the
slower of its two ends, so the better of a node's two flows shows what the node's NIC carries; of
two nodes the faster one cannot be told, which a plan does not need either.
"""

import time
from collections.abc import Sequence

import msgspec
import torch

from topo_ar.execution.gather import Channel
from topo_ar.topology.levels import levels
from topo_ar.topology.measure import with_nic_rates
from topo_ar.topology.model import Topology

_NBYTES = (512 << 10, 4 << 20)
_REPEATS = 3
# A busy machine measures less than a NIC carries, so half of what is said of it is not doubted; nor
# is a NIC from here on, which one flow may not fill.
_DOUBTED = 0.5
_ONE_FLOW_BYTES_PER_S = 0.5e9


def with_slow_nics(
    channel: Channel, nodes: Sequence[tuple[int, ...]], topology: Topology
) -> Topology:
    """Return `topology` with the measured rate of NICs that carry much less than it says.

    The same on all ranks, and collective over them. Nodes of several NICs stay as they are.

    Raises
    ------
    ExecutionError
        If a rank is gone.
    """
    if len(nodes) < 2:
        return topology
    by_first = {min(node.ranks): node for node in levels(topology).nodes}
    said = [by_first[min(node)] for node in nodes]
    found = slow(
        [node.nics[0].payload if len(node.nics) == 1 else None for node in said],
        ring_rates(channel, nodes),
    )
    return with_nic_rates(topology, {said[i].name: rate for i, rate in found.items()})


def slow(declared: Sequence[float | None], into: Sequence[float]) -> dict[int, float]:
    """Return the nodes whose NIC is much slower than declared, and its rate in bytes/s.

    Parameters
    ----------
    declared : sequence of float or None
        The payload rate of each node's NIC; None where it is not to be judged.
    into : sequence of float
        The rate of the flow into each node from the node before, round the ring, in bytes/s.
    """
    carried = [max(rate, into[(i + 1) % len(into)]) for i, rate in enumerate(into)]
    sure = max(_ONE_FLOW_BYTES_PER_S, _DOUBTED * max(carried))
    return {
        i: seen
        for i, (rate, seen) in enumerate(zip(declared, carried, strict=True))
        if rate is not None and seen < _DOUBTED * rate and seen < sure
    }


def ring_rates(channel: Channel, nodes: Sequence[tuple[int, ...]]) -> list[float]:
    """Return the rate in bytes/s of the flow into each node from the node before, round the ring.

    The same on all ranks, and collective over them, while nothing is in flight.
    """
    at = next(i for i, node in enumerate(nodes) if channel.rank in node)
    best = [float("inf")] * len(_NBYTES)
    for i, nbytes in enumerate(_NBYTES):
        out, into = torch.zeros(2, nbytes, dtype=torch.uint8, device="cpu").unbind()
        for _ in range(_REPEATS):
            channel.barrier()
            begin = time.perf_counter()
            works = []
            if channel.rank == nodes[at][0]:
                works.append(channel.send(out, nodes[(at + 1) % len(nodes)][-1]))
            if channel.rank == nodes[at][-1]:
                channel.receive(into, nodes[at - 1][0]).wait()
                best[i] = min(best[i], time.perf_counter() - begin)
            for work in works:
                work.wait()
    # Without latency, and whatever an idle link had saved up.
    rate = (_NBYTES[1] - _NBYTES[0]) / max(best[1] - best[0], 1e-9) if best[0] < 1e9 else 0.0
    rates = [
        msgspec.json.decode(each, type=float)
        for each in channel.all_gather(msgspec.json.encode(rate))
    ]
    return [rates[node[-1]] for node in nodes]
