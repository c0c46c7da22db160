"""DDP's bucket cap: the planned one for a new model, and what another would gain for a running one.

What a new model gets is a function of topology, sizes and dtypes alone, so that all ranks agree.
Measured times differ from rank to rank and are only for advice.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from topo_ar.execution.communicator import Communicator
from topo_ar.planning.buckets import Backward, backward_of
from topo_ar.planning.codec_costs import CodecCosts
from topo_ar.planning.joint import CAPS_MIB, balanced_backward, plan_training
from topo_ar.planning.nccl_machine import nccl_machine_of
from topo_ar.planning.nccl_search import NcclMachine
from topo_ar.planning.occupancy import MODES
from topo_ar.planning.parameters import ITEMSIZES, Parameter
from topo_ar.planning.plan import Plan
from topo_ar.planning.policy import Policy
from topo_ar.planning.runtime import CPU_RUNTIME, NCCL_RUNTIME, Runtime
from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.telemetry.bucket_trace import BucketTrace
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.model import topology_hash


def planned_cap(
    module: nn.Module, communicator: Communicator, plan: str | Plan
) -> TrainingPlan | None:
    """Return the exact training plan of `module`, or None where there is nothing to choose.

    Backward is assumed to take as long as the communication. Equal on all ranks.

    Parameters
    ----------
    module : Module
        Not yet wrapped.
    communicator : Communicator
        Over the ranks of the DDP's process group.
    plan : str or Plan
        What `communicator` was made with.
    """
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    parameters = [
        Parameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in trained
    ]
    priced = all(parameter.dtype in ITEMSIZES for parameter in parameters)
    if communicator.world_size == 1 or not priced or not sum(p.nbytes for p in parameters):
        return None
    runtime = _runtime(communicator, (p.device.type for _, p in trained))
    known = levels(communicator.topology)
    backward = balanced_backward(
        known,
        parameters,
        runtime=runtime,
        families=runtime.families,
        nccl=_nccl(communicator, known, runtime),
    )
    return _plan(communicator, backward, plan, runtime)


def advice(
    trace: BucketTrace,
    communicator: Communicator,
    plan: str | Plan,
    cap_mib: float | None,
    devices: Iterable[str],
    policy: Policy,
    *,
    keep_cap: bool = False,
    costs: CodecCosts | None = None,
) -> TrainingPlan:
    """Return the training plan for the backward that `trace` shows, against the cap in use.

    With `keep_cap` no other cap is looked at. `costs` are those of codecs, assumed if left out.

    Raises
    ------
    ConfigError
        If the trace holds no step.
    """
    caps = (cap_mib,) if keep_cap else CAPS_MIB
    return _plan(
        communicator,
        backward_of(trace),
        plan,
        _runtime(communicator, devices),
        cap_mib,
        policy,
        caps,
        costs,
    )


def _runtime(communicator: Communicator, devices: Iterable[str]) -> Runtime:
    inline = communicator.uses_nccl and set(devices) == {"cuda"}
    return NCCL_RUNTIME if inline else CPU_RUNTIME


def _plan(
    communicator: Communicator,
    backward: Backward,
    plan: str | Plan,
    runtime: Runtime,
    cap_mib: float | None = None,
    policy: Policy | None = None,
    caps_mib: Sequence[float | None] = CAPS_MIB,
    costs: CodecCosts | None = None,
) -> TrainingPlan:
    mode = plan if plan in MODES else MODES[0]
    known = levels(communicator.topology)
    return plan_training(
        known,
        backward,
        policy=policy,
        topology_hash=topology_hash(communicator.topology),
        runtime=runtime,
        costs=costs,
        families=runtime.families,
        caps_mib=caps_mib,
        reference_cap_mib=cap_mib,
        modes=("flat" if communicator.plain_reason else mode,),
        nccl=_nccl(communicator, known, runtime),
    )


def _nccl(communicator: Communicator, known: Levels, runtime: Runtime) -> NcclMachine | None:
    if runtime is not NCCL_RUNTIME:
        return None
    return nccl_machine_of(communicator.topology, known)
