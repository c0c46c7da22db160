"""``topo-ar plan`` for a training step: buckets, algorithms, codecs, and the memory of a replica.

With ``--json`` the output is one object: ``training`` with the keys of `TrainingPlan` (among them
``bucket_cap_mib``, ``mode``, ``exposed_seconds``, ``floor_ratio``, ``codecs``, ``reason`` and
``buckets``, each with ``algorithm``, ``chunks`` and ``codec``) and ``memory`` with those of
`Memory` and ``nbytes`` and ``fits``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.errors import ConfigError
from topo_ar.units import parse_size

if TYPE_CHECKING:
    from topo_ar.planning.buckets import Backward
    from topo_ar.planning.codec_costs import CodecCosts
    from topo_ar.planning.codecs import Codec
    from topo_ar.planning.memory import Memory
    from topo_ar.planning.parameters import Parameter
    from topo_ar.planning.training_plan import TrainingPlan
    from topo_ar.topology.levels import Levels
    from topo_ar.topology.model import Topology

Params = Annotated[
    str | None, typer.Option(help="The same for a number of parameters, such as 340M.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(help="The same for a bucket trace (handle.trace().write(path))."),
]
BackwardSeconds = Annotated[
    float | None,
    typer.Option(help="Length of backward; by default as long as the communication."),
]


@dataclass(frozen=True, slots=True)
class Training:
    """What the options say about a training step; None where they say nothing."""

    params: str | None = None
    model: str | None = None
    trace: Path | None = None
    optimizer: str | None = None
    dtype: str | None = None
    device_memory: str | None = None
    policy: str | None = None
    backward_seconds: float | None = None
    measure_codecs: bool = False

    @property
    def given(self) -> bool:
        """Whether any of the options was given."""
        return self != Training()


def plan_step(topology: "Topology", training: Training) -> "tuple[TrainingPlan, Memory]":
    """Return the plan of a training step on `topology`, and the memory of its replicas.

    Raises
    ------
    ConfigError
        If an option is not usable or options contradict each other.
    PlanError
        If no plan can be made.
    """
    import msgspec

    from topo_ar.planning.codecs import NONE, parse_codec
    from topo_ar.planning.joint import plan_training
    from topo_ar.planning.memory import optimizer_nbytes, plan_memory
    from topo_ar.planning.nccl_machine import nccl_machine_of
    from topo_ar.planning.policy import parse_policy
    from topo_ar.planning.runtime import runtime_of
    from topo_ar.topology.levels import levels
    from topo_ar.topology.model import topology_hash

    optimizer = training.optimizer or "adamw"
    optimizer_nbytes(optimizer, ())  # refuses what it does not know
    device = None if training.device_memory is None else parse_size(training.device_memory)
    policy = parse_policy(training.policy or "exact", optimizer)
    both, runtime = levels(topology), runtime_of(topology)
    backward = backward_for(both, training, topology)
    made = plan_training(
        both,
        backward,
        policy=policy,
        topology_hash=topology_hash(topology),
        runtime=runtime,
        costs=_measured(policy.allowed, len(both.nodes)) if training.measure_codecs else None,
        nccl=nccl_machine_of(topology, both),
    )
    if training.params is not None:
        note = "Only the number of parameters is known: 1024 x 1024 matrices are assumed."
        made = msgspec.structs.replace(made, notes=(*made.notes, note))
    used = {bucket.codec for bucket in made.buckets} - {str(NONE)}
    memory = plan_memory(
        both,
        backward.parameters,
        optimizer=optimizer,
        codec=parse_codec(used.pop()) if used else NONE,
        largest_bucket_nbytes=max(bucket.nbytes for bucket in made.buckets),
        runtime=runtime,
        device_nbytes=device,
    )
    return made, memory


def step_json(plan: "TrainingPlan", memory: "Memory") -> bytes:
    """Return both as one line of JSON."""
    import msgspec

    figures = {**msgspec.structs.asdict(memory), "nbytes": memory.nbytes, "fits": memory.fits}
    return msgspec.json.encode({"training": plan, "memory": figures})


def step_text(plan: "TrainingPlan", memory: "Memory", training: Training) -> str:
    """Return both for a person."""
    from topo_ar.planning.explain_training import explain_memory, explain_training

    return f"{explain_training(plan)}\n\n{explain_memory(memory, training.optimizer or 'adamw')}"


def _measured(codecs: "Sequence[Codec]", num_nodes: int) -> "CodecCosts":
    import torch

    from topo_ar.compression.calibration import measure_costs
    from topo_ar.planning.codec_costs import CPU_COSTS

    if not codecs:
        raise ConfigError("--measure-codecs measures the codecs of --policy, which allows none")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has them under torchrun
    try:
        found = measure_costs(codecs, num_nodes)
    finally:
        torch.set_num_threads(threads)
    return CPU_COSTS.with_measured([found], "measured on one core of this machine")


def backward_for(levels: "Levels", training: Training, topology: "Topology") -> "Backward":
    """Return the backward that the options describe.

    Raises
    ------
    ConfigError
        If an option is not usable or options contradict each other.
    """
    from topo_ar.planning.buckets import backward_of, uniform_backward
    from topo_ar.planning.joint import balanced_backward
    from topo_ar.planning.nccl_machine import nccl_machine_of
    from topo_ar.planning.runtime import runtime_of
    from topo_ar.telemetry.bucket_trace import read

    sources = [training.params, training.model, training.trace]
    if sum(source is not None for source in sources) != 1:
        raise ConfigError(
            "give the model once: --model with a name or a file of name,shape lines, --params with "
            "a count, or --trace with a bucket trace"
        )
    if training.trace is not None:
        if training.dtype is not None or training.backward_seconds is not None:
            raise ConfigError(
                f"{training.trace} says dtypes and the length of backward; leave --dtype and "
                "--backward-seconds out"
            )
        return backward_of(read(training.trace))
    parameters = _parameters(training)
    if training.backward_seconds is not None:
        return uniform_backward(parameters, training.backward_seconds)
    return balanced_backward(
        levels,
        parameters,
        runtime=runtime_of(topology),
        nccl=nccl_machine_of(topology, levels),
    )


def _parameters(training: Training) -> "tuple[Parameter, ...]":
    from topo_ar.planning.models import model_parameters
    from topo_ar.planning.parameters import assumed_parameters, parse_count, read_parameters

    dtype = training.dtype or "float32"
    if training.params is not None:
        return assumed_parameters(parse_count(training.params), dtype)
    name = training.model or ""
    if Path(name).is_file():
        return read_parameters(Path(name), dtype)
    return model_parameters(name, dtype)
