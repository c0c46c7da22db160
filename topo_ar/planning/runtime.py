"""What the planner must know of the runtime that will run its plan."""

from dataclasses import dataclass, replace

from topo_ar.planning.plan import Family
from topo_ar.topology.model import DeviceKind, Topology


@dataclass(frozen=True, slots=True)
class Runtime:
    """Limits of a runtime, and what its flat ring costs beside the ports.

    Attributes
    ----------
    max_chunk_nbytes : int
        What a chunk slot holds.
    flat_hop_seconds : float
        Added to each of the 2(N-1) steps of the flat ring.
    flat_bytes_per_s : float
        What one rank of the flat ring moves at most, whatever its ports carry.
    latency_share : float
        What a message between nodes is waited for, of the latency between them as torch's own
        messages see it, which wake a thread at either end.
    message_seconds, message_share : float
        What each further message costs a rank that sends many at once (direct all-to-all): seconds
        at least, and a share of the same latency, which is longer where ranks wait for cores.
    chunk_seconds : float or None
        What a chunk occupies a stage for beside its bytes, where chunks stream one behind the other
        and latency is waited for once; None where each chunk waits for its own messages.
    ring_rails : bool
        Whether the ranks of a rail pass their parts round a ring whatever the family, so that few
        of them cross from rack to rack; else each sends to every other where a family says so.
    most_direct_nodes : int
        The most nodes whose ranks send to each other directly: each has a flow to every other then,
        and what all send at once to one of them has to find room in the switch before its NIC.
    reduce_seconds_per_byte : float or None
        Gamma: the time to add a byte that arrived, beside moving it; None where the rates include
        it, as measured ones do.
    call_seconds : float
        What starting a stage costs for each chunk, beside the latency of its messages.
    islands : bool
        Whether the ranks of an island reduce among themselves first; in shared memory a node
        reduces at once, however a plan divides it.
    overlaps_codecs : bool
        Whether chunks of a compressed bucket overlap as those of others; else buckets follow one
        another, and in each only codec and wire overlap, where the codec takes it `by_runs`.
    families : frozenset of Family
        What it runs; the others can be planned, verified, timed and exported.
    """

    max_chunk_nbytes: int
    flat_hop_seconds: float
    flat_bytes_per_s: float
    latency_share: float = 1
    message_seconds: float = 0
    message_share: float = 0
    chunk_seconds: float | None = None
    ring_rails: bool = False
    most_direct_nodes: int = 1 << 62
    reduce_seconds_per_byte: float | None = None
    call_seconds: float = 0.0
    islands: bool = True
    overlaps_codecs: bool = True
    families: frozenset[Family] = frozenset(Family)

    def further_message_seconds(self, latency: float) -> float:
        """Return what a further message costs where the latency is `latency` seconds."""
        if not self.message_share:
            return self.message_seconds
        return max(self.message_seconds, self.message_share * latency)


_STAGED = frozenset(
    {
        Family.FLAT_RING,
        Family.HIERARCHICAL_SEQUENTIAL,
        Family.HIERARCHICAL_PIPELINED,
        Family.HIERARCHICAL_LEADER,
    }
)

# Chunk slots in shared memory. The flat ring is gloo's over TCP, inside a node too: starting values
# from 2 x 4 ranks on two cores (25 MB in 69 ms over 10 Gbit/s NICs is 0.63 GB/s through each rank;
# 0.1 ms a step agrees with 1 to 25 MB over 1 Gbit/s). A calibration replaces them. A chunk costs a
# rank some dozen steps of the interpreter. The shares of the latency are those of 4, 8 and 16 nodes
# of one rank on two cores.
CPU_RUNTIME = Runtime(
    max_chunk_nbytes=2 << 20,
    flat_hop_seconds=1e-4,
    flat_bytes_per_s=0.63e9,
    latency_share=0.4,
    message_seconds=3e-5,
    message_share=0.2,
    chunk_seconds=5e-5,
    most_direct_nodes=64,
    islands=False,
    overlaps_codecs=False,
    families=frozenset(Family)
    - {Family.DOUBLE_BINARY_TREE, Family.HALVING_DOUBLING, Family.DIRECT},
)

# GPUs as their ports are: chunks are views of the buffer, and a message over the network costs its
# sender 1 us more (the overhead of tuning.cc, NCCL 2.30.7, on Intel hosts).
GPU_RUNTIME = Runtime(
    max_chunk_nbytes=1 << 62,
    flat_hop_seconds=0.0,
    flat_bytes_per_s=float("inf"),
    message_seconds=1e-6,
    ring_rails=True,
    families=_STAGED,
)

# Each stage of a chunk is a call of NCCL: the base latency of tuning.cc (ring, Simple). Its stages
# are reduce-scatter, all-reduce and all-gather; nobody leads.
NCCL_RUNTIME = replace(
    GPU_RUNTIME, call_seconds=8.4e-6, families=_STAGED - {Family.HIERARCHICAL_LEADER}
)


def runtime_of(topology: Topology) -> Runtime:
    """Return the runtime that serves `topology`: NCCL's where all ranks sit on GPUs."""
    kinds = {device.id: device.kind for device in topology.devices}
    if topology.ranks and all(kinds[rank] is DeviceKind.GPU for rank in topology.ranks):
        return NCCL_RUNTIME
    return CPU_RUNTIME
