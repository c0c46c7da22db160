"""What the planner must know of the runtime that will run its plan."""

from dataclasses import dataclass

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
    chunk_seconds : float or None
        What a chunk occupies a stage for beside its bytes, where chunks stream one behind the other
        and latency is waited for once; None where each chunk waits for its own messages.
    """

    max_chunk_nbytes: int
    flat_hop_seconds: float
    flat_bytes_per_s: float
    chunk_seconds: float | None = None


# Chunk slots in shared memory. The flat ring is gloo's over TCP, inside a node too: starting values
# from 2 x 4 ranks on two cores (25 MB in 69 ms over 10 Gbit/s NICs is 0.63 GB/s through each rank;
# 0.1 ms a step agrees with 1 to 25 MB over 1 Gbit/s). A calibration replaces them. A chunk costs a
# rank some dozen steps of the interpreter.
CPU_RUNTIME = Runtime(
    max_chunk_nbytes=2 << 20, flat_hop_seconds=1e-4, flat_bytes_per_s=0.63e9, chunk_seconds=5e-5
)

# NCCL: chunks are views of the buffer, and its ring uses the ports as they are.
GPU_RUNTIME = Runtime(max_chunk_nbytes=1 << 62, flat_hop_seconds=0.0, flat_bytes_per_s=float("inf"))


def runtime_of(topology: Topology) -> Runtime:
    """Return the runtime that serves `topology`: NCCL's where all ranks sit on GPUs."""
    kinds = {device.id: device.kind for device in topology.devices}
    if topology.ranks and all(kinds[rank] is DeviceKind.GPU for rank in topology.ranks):
        return GPU_RUNTIME
    return CPU_RUNTIME
