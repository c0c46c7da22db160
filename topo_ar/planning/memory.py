"""Bytes that training one replica takes on a device, and how to shard it where it does not fit.

Activations, the framework's own memory and NCCL's buffers are not counted: they depend on batch,
code and library.
"""

import math
from collections.abc import Sequence

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.planning.codecs import NONE, Codec, factors_pay
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.parameters import Parameter, total_numel
from topo_ar.planning.runtime import Runtime
from topo_ar.topology.levels import Levels

# The engine for CPU tensors: pages of counters and slots in the segment of each rank, and slots of
# sums and arrivals. A test compares them with the engine.
SEGMENT_HEADER_NBYTES = 2 * 4096
SEGMENT_SLOTS = 11
SUM_SLOTS = 4

_MASTER = "-master"
# Elements that an optimizer of torch keeps for each parameter, in the parameter's dtype.
_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
OPTIMIZERS = (*_STATES, *(name + _MASTER for name in _STATES))
_FP32 = 4


class Hsdp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hybrid sharding: replicas across `num_replicas` groups of `shard_size` ranks of one node.

    Attributes
    ----------
    shard_size, num_replicas : int
        The two dimensions of the device mesh.
    nbytes : int
        Bytes a rank holds: its part of parameters, gradients and optimizer, and the largest
        tensor gathered, with its gradient.
    gather_seconds : float
        All-gather of the parameters inside the groups, once for forward and once for backward.
    scatter_seconds : float
        Reduce-scatter of the gradients inside the groups.
    reduce_seconds : float
        All-reduce of each shard of the gradients over the replicas.
    """

    shard_size: int
    num_replicas: int
    nbytes: int
    gather_seconds: float
    scatter_seconds: float
    reduce_seconds: float

    @property
    def seconds(self) -> float:
        """All communication of a step, one after the other; layers overlap it with computing."""
        return self.gather_seconds + self.scatter_seconds + self.reduce_seconds


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes on the device of one rank, by what they are for.

    `device_nbytes` is None where the device is not known; `fits` is then None too. `hsdp` is
    given where a replica does not fit and a part of it does. `notes` say what is left out.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int
    staging: int
    residuals: int
    device_nbytes: int | None = None
    hsdp: Hsdp | None = None
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The sum."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.buckets
            + self.staging
            + self.residuals
        )

    @property
    def fits(self) -> bool | None:
        """Whether the sum fits the device; None where that is not known."""
        return None if self.device_nbytes is None else self.nbytes <= self.device_nbytes


def optimizer_nbytes(optimizer: str, parameters: Sequence[Parameter]) -> int:
    """Return the bytes of the optimizer's state, without counters of a few bytes a tensor.

    Parameters
    ----------
    optimizer : str
        ``sgd``, ``momentum``, ``adam`` or ``adamw``, which keep 0, 1, 2 and 2 elements for each
        parameter in its dtype. With ``-master`` they keep them in fp32, and an fp32 copy of
        parameters that are narrower: with 16-bit Adam 16 bytes a parameter in all, as in
        Rajbhandari et al., "ZeRO" (2020), section 3.1.
    parameters : sequence of Parameter
        The model.

    Raises
    ------
    ConfigError
        If the optimizer is not known.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"{optimizer!r} is not an optimizer; choose {', '.join(OPTIMIZERS)}")
    states = _STATES[optimizer.removesuffix(_MASTER)]
    if not optimizer.endswith(_MASTER):
        return states * sum(parameter.nbytes for parameter in parameters)
    return sum(
        states * max(p.nbytes, _FP32 * p.numel)
        + (_FP32 * p.numel if p.nbytes < _FP32 * p.numel else 0)
        for p in parameters
    )


def staging_nbytes(
    runtime: Runtime, num_nodes: int, ranks_per_node: int, largest_bucket_nbytes: int
) -> int:
    """Return the bytes that the runtime itself keeps on each rank.

    On CPU the segment with its slots, and with several nodes slots of sums and, for every other
    node, of arrivals. On CUDA the shards of one bucket.
    """
    if runtime.chunk_seconds is None:
        return -(-largest_bucket_nbytes // max(1, ranks_per_node)) if num_nodes > 1 else 0
    slot = runtime.max_chunk_nbytes
    own = SEGMENT_HEADER_NBYTES + SEGMENT_SLOTS * slot
    if num_nodes == 1:
        return own
    arrival = -(-slot // max(1, ranks_per_node))
    return own + SUM_SLOTS * (slot + (num_nodes - 1) * arrival)


def residual_nbytes(
    codec: Codec, parameters: Sequence[Parameter], num_nodes: int, ranks_per_node: int
) -> int:
    """Return the bytes of error memory and factors on each rank.

    The owner of a shard keeps its residual in fp32, 1/g of the gradients; codecs of two shots keep
    another 1/n of it; PowerSGD its factors, whole. Casts keep nothing.
    """
    if codec == NONE or codec.name in ("fp16", "bf16") or num_nodes == 1:
        return 0
    shard = -(-_FP32 * total_numel(parameters) // max(1, ranks_per_node))
    if codec.name in ("int8", "int4", "sign"):
        return shard + -(-shard // num_nodes)
    if codec.name == "powersgd" and codec.argument is not None:
        return shard + _FP32 * sum(_factor_numel(p, int(codec.argument)) for p in parameters)
    return shard


def _factor_numel(parameter: Parameter, rank: int) -> int:
    if not factors_pay(parameter.shape, rank):
        return 0
    rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
    return min(rows, columns, rank) * (rows + columns)


def plan_memory(
    levels: Levels,
    parameters: Sequence[Parameter],
    *,
    optimizer: str = "adamw",
    codec: Codec = NONE,
    gradient_as_bucket_view: bool = False,
    largest_bucket_nbytes: int = 0,
    runtime: Runtime,
    device_nbytes: int | None = None,
) -> Memory:
    """Return what training with DDP takes on each rank, and a way out where it does not fit.

    Parameters
    ----------
    levels : Levels
        The nodes.
    parameters : sequence of Parameter
        The model; gradients have the parameters' dtype.
    optimizer : str
        One of `OPTIMIZERS`.
    codec : Codec
        What compresses the gradients between nodes.
    gradient_as_bucket_view : bool
        As for DDP: gradients then live in the buckets, which else are a copy.
    largest_bucket_nbytes : int
        The largest bucket.
    runtime : Runtime
        What runs the all-reduces.
    device_nbytes : int, optional
        Memory of a device, or a rank's part of the host's memory.

    Raises
    ------
    ConfigError
        If the optimizer is not known or `device_nbytes` is not above 0.
    PlanError
        If the levels contradict themselves.
    """
    if device_nbytes is not None and device_nbytes <= 0:
        raise ConfigError(f"a device cannot have {device_nbytes} bytes of memory; give 80GB or so")
    nodes, ranks = len(levels.nodes), min(len(node.ranks) for node in levels.nodes)
    nbytes = sum(parameter.nbytes for parameter in parameters)
    notes = ["Activations, the framework and NCCL's buffers are not counted."]
    made = Memory(
        parameters=nbytes,
        gradients=nbytes,
        optimizer=optimizer_nbytes(optimizer, parameters),
        buckets=0 if gradient_as_bucket_view or levels.world_size == 1 else nbytes,
        staging=(
            staging_nbytes(runtime, nodes, ranks, largest_bucket_nbytes)
            if levels.world_size > 1
            else 0
        ),
        residuals=residual_nbytes(codec, parameters, nodes, ranks),
        device_nbytes=device_nbytes,
    )
    hsdp = None
    if made.fits is False:
        hsdp = smallest_hsdp(levels, parameters, made.optimizer, device_nbytes or 0, runtime)
        without_copy = made.nbytes - made.buckets
        if made.buckets and device_nbytes is not None and without_copy <= device_nbytes:
            notes.append("With gradient_as_bucket_view=True a replica fits.")
        if hsdp is None:
            notes.append(
                "No part of a replica inside one node fits: shard over several nodes (FSDP), or "
                "keep parameters or optimizer elsewhere."
            )
        else:
            notes.append(
                "HSDP gathers one layer at a time; the largest tensor stands for it, since layers "
                "are not known."
            )
    return msgspec.structs.replace(made, hsdp=hsdp, notes=tuple(notes))


def smallest_hsdp(
    levels: Levels,
    parameters: Sequence[Parameter],
    optimizer_state_nbytes: int,
    device_nbytes: int,
    runtime: Runtime,
) -> Hsdp | None:
    """Return hybrid sharding over the fewest ranks of a node with which a rank's part fits.

    The shard dimension divides the ranks of every node, so that no gather leaves a node.

    Raises
    ------
    PlanError
        If the levels contradict themselves.
    """
    nbytes = sum(parameter.nbytes for parameter in parameters)
    largest = max((parameter.nbytes for parameter in parameters), default=0)
    common = math.gcd(*(len(node.ranks) for node in levels.nodes))
    p = CostParameters.from_levels(levels, runtime=runtime)
    for size in range(2, common + 1):
        held = -(-(2 * nbytes + optimizer_state_nbytes) // size) + 2 * largest
        if common % size or held > device_nbytes:
            continue
        inside = (size - 1) * (p.intra_alpha + nbytes * p.intra_beta / size)
        replicas = max(len(node.ranks) for node in levels.nodes) // size
        reduce = 2 * (replicas - 1) * (p.intra_alpha + nbytes / size * p.intra_beta / replicas)
        if p.num_nodes > 1:
            # Every node sends each of its shards once, over all NICs at a time.
            reduce += 2 * (p.num_nodes - 1) * p.inter_alpha + nbytes * p.inter_slope
        return Hsdp(size, levels.world_size // size, held, 2 * inside, inside, reduce)
    return None
