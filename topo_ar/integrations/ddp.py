"""DistributedDataParallel with the planned all-reduce: ``topo_ar.attach(ddp)`` and ``ddp(...)``."""

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from topo_ar.errors import ConfigError, TopoError
from topo_ar.execution.bootstrap import refused_for_all
from topo_ar.execution.communicator import DEFAULT_TIMEOUT_S, Communicator
from topo_ar.execution.options import require_equal
from topo_ar.execution.torch_private import bucket_cap_mib
from topo_ar.integrations.bucket_agreement import BucketAgreement
from topo_ar.integrations.bucket_cap import advice, planned_cap
from topo_ar.integrations.compressed import CompressedReduction
from topo_ar.integrations.compression_auto import Auto, decide
from topo_ar.integrations.compression_choice import (
    AUTO,
    CompressionSettings,
    compression_settings,
)
from topo_ar.integrations.compression_state import State, load_state, saved_state
from topo_ar.integrations.gradient_norm import GradNorm, NormMeter
from topo_ar.integrations.handle import BaseHandle
from topo_ar.integrations.hook import DDPHook
from topo_ar.integrations.job_watch import JobWatch, watch_job
from topo_ar.integrations.model_checks import ModelChecks, gathered_versions, host_findings
from topo_ar.integrations.options import HookOptions
from topo_ar.integrations.path_choice import PathChooser
from topo_ar.integrations.replica_check import ReplicaCheck
from topo_ar.integrations.target_monitor import TargetMonitor
from topo_ar.integrations.telemetry_options import Telemetry, telemetry_of
from topo_ar.integrations.trace import Recorder
from topo_ar.integrations.unsupported import refuse_unsupported, same_group
from topo_ar.integrations.zero_copy import BucketSharing
from topo_ar.planning.joint_reasons import cap_name
from topo_ar.planning.plan import Plan
from topo_ar.planning.policy import parse_policy
from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.telemetry.incidents import Incident
from topo_ar.telemetry.targets import Targets, targets_of
from topo_ar.topology.findings import TopologyFinding
from topo_ar.topology.model import Topology

logger = logging.getLogger("topo_ar")

_handles: "WeakKeyDictionary[DistributedDataParallel, Handle]" = WeakKeyDictionary()


class Handle(BaseHandle):
    """What `attach` returns: the communicator, the bucket trace, advice, and `close`."""

    def __init__(
        self,
        hook: DDPHook,
        communicator: Communicator,
        recorder: Recorder,
        ddp: DistributedDataParallel,
        plan: str | Plan,
    ) -> None:
        super().__init__(hook, communicator, recorder)
        self._plan = plan
        self._norm: NormMeter | None = None
        self.telemetry: JobWatch | None = None
        self._checks = ModelChecks(ddp)
        self._versions = gathered_versions(communicator.gather)
        for finding in self._versions if communicator.rank == 0 else ():
            logger.warning("%s; %s", finding.text, finding.remedy)
        hook.observers.members.append(self._checks)
        self._cap_mib = bucket_cap_mib(ddp)
        self._devices = sorted({p.device.type for p in ddp.parameters() if p.requires_grad})

    def grad_norm(self) -> GradNorm:
        """Return the norm of the last step's averaged gradients. Collective, after backward.

        All gradients that the hook reduced count, as `torch.nn.utils.get_total_norm` would have
        them at the end of backward.

        Raises
        ------
        ConfigError
            If ``grad_norm=True`` was not given to `attach`, or there was no step yet.
        ExecutionError
            If a rank failed, or asks for another step.
        """
        if self._norm is None:
            raise ConfigError("no norm is kept; call attach with grad_norm=True")
        return self._norm.agree()

    def watch_norm(self) -> None:
        """Keep the norm of every step from the next on."""
        self._norm = NormMeter(self.communicator)
        self.hook.observers.members.append(self._norm)

    def advice(
        self, policy: str = "exact", optimizer: str = "", *, keep_cap: bool = False
    ) -> TrainingPlan:
        """Return what the last steps say about bucket cap and codecs, on this rank alone.

        Nothing is changed. `TrainingPlan.reason` says it in sentences.

        Parameters
        ----------
        policy : str
            ``exact``, ``lossy:BOUND`` or names of codecs, as for `parse_policy`.
        optimizer : str
            Such as ``adamw``: codecs that are a risk with it are left out.
        keep_cap : bool
            Look at the bucket cap in use alone.

        Raises
        ------
        ConfigError
            If no step was trained yet or the policy is none.
        """
        compression = self.hook.compression
        return advice(
            self.trace(),
            self.communicator,
            self._plan,
            self._cap_mib,
            self._devices,
            parse_policy(policy, optimizer),
            keep_cap=keep_cap,
            costs=compression.costs if compression is not None else None,
        )

    def _log_advice(self) -> None:
        try:
            found = self.advice()
        except TopoError as error:
            logger.info("no advice on the bucket cap: %s", error)
            return
        logger.info("advice after %d steps: %s", self._recorder.num_steps, found.reason)

    def doctor(self) -> list[TopologyFinding]:
        """Return what keeps this job from running well, each with its remedy, as far as is known.

        How the DDP is used, versions that differ between ranks, and this host's interfaces, cores,
        shared memory and NUMA; on rank 0, with telemetry, late ranks and slow NICs as well.
        """
        last = self.telemetry.last if self.telemetry is not None else None
        causes = last.causes if last is not None else ()
        return [
            *self._checks.findings,
            *self._versions,
            *host_findings(),
            *(TopologyFinding(cause.about, cause.text, "") for cause in causes),
        ]

    @property
    def incidents(self) -> list[Incident]:
        """The breaches of targets so far, and what was done; see `Incident`."""
        return list(self._monitor.incidents)

    def report_loss(self, loss: float) -> None:
        """Say what this rank's loss of the step at hand is, for the target ``loss_drift``."""
        self._monitor.report_loss(float(loss))

    def set_targets(self, targets: Targets) -> None:
        """Judge by other targets from the next step on; with the same ones on all ranks."""
        self._monitor.set_targets(targets)

    @property
    def _monitor(self) -> TargetMonitor:
        if self.telemetry is None or self.telemetry.monitor is None:
            raise ConfigError("no targets are watched; call attach with telemetry= and targets=")
        return self.telemetry.monitor

    def state_dict(self, *, exact: bool = False) -> State:
        """Return what was not sent yet and the codecs' state, tensors only; the same on all ranks.

        Collective; call it between steps on all ranks. It can be saved by any means, also by
        ``torch.distributed.checkpoint``, and loaded with ``weights_only=True``.

        Parameters
        ----------
        exact : bool
            Keep what each node has not sent instead of the sum, n times as much, so that a job of
            the same ranks goes on bit for bit.
        """
        return saved_state(self.hook.compression, exact)

    def load_state_dict(self, state: State) -> None:
        """Take over a state, of a job of any size and with any bucket cap, before the next step.

        Raises
        ------
        ConfigError
            If `state` is not what `state_dict` returned.
        """
        load_state(self.hook.compression, state)

    def close(self) -> None:
        """Close the communicator; the DDP cannot run backward afterwards."""
        self.communicator.close()
        if self.telemetry is not None:
            self.telemetry.close()


def attach(
    ddp: DistributedDataParallel,
    *,
    plan: str | Plan = "auto",
    topology: Topology | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    reproducible: bool = False,
    zero_copy: bool = False,
    grad_norm: bool = False,
    check_replicas_every: int = 0,
    telemetry: str | os.PathLike[str] | Telemetry | None = None,
    targets: str | os.PathLike[str] | Targets | None = None,
    compression: str | Mapping[str, str] = "none",
    policy: str = "exact",
    optimizer: object = None,
    start_step: int = 10,
    warm_up_steps: int = 0,
    guard_steps: int = 100,
) -> Handle:
    """Let `ddp` average its gradients by the planned all-reduce. Collective over its ranks.

    The average is bit-identical on all ranks. Without compression it is exact: the same as plain
    DDP up to the order of summation.

    Parameters
    ----------
    ddp : DistributedDataParallel
        Without a communication hook.
    plan, topology, timeout_s, reproducible
        As for `Communicator`. With ``"auto"`` planned and plain all-reduce take turns early in the
        training, and the faster stays, see `Handle.choice`; any other plan keeps to itself.
    zero_copy : bool
        Keep buckets in shared memory, see `Communicator.share`. With compression it has no effect.
    grad_norm : bool
        Keep what `Handle.grad_norm` needs: each rank looks once at its part of the averages.
    check_replicas_every : int
        Compare the parameters of all ranks by checksum in the first step and every so many after
        it, and fail on all ranks where they differ, see `ReplicaCheck`; 0 for never.
    telemetry : path-like or Telemetry, optional
        A directory, or a ``.jsonl`` file, in which rank 0 keeps records of the running job, for
        ``topo-ar top`` and others; given on all ranks. See `Telemetry`.
    targets : path-like or Targets, optional
        What steps may take, as a TOML file or `Targets`, the same on all ranks; with `telemetry`.
        Where they are missed, all ranks go back to what reduced steps before, or plan anew, or to
        plain all-reduce, in the same step, and rank 0 writes an incident.
    compression, policy, start_step, warm_up_steps, guard_steps
        See `CompressionSettings`.
    optimizer : Optimizer or str, optional
        With compression: what steps, for codecs that are a risk with it.

    Raises
    ------
    ConfigError
        If `ddp` is not a DDP, already has a hook, or uses an option that bypasses hooks, or
        compression cannot be what is asked for.

    Examples
    --------
    ::

        model = DistributedDataParallel(module)
        handle = topo_ar.attach(model)
    """
    with refused_for_all(getattr(ddp, "process_group", None)):
        refuse_unsupported(ddp)
        settings = compression_settings(
            ddp.module,
            compression=compression,
            policy=policy,
            optimizer=optimizer,
            start_step=start_step,
            warm_up_steps=warm_up_steps,
            guard_steps=guard_steps,
        )
        chosen = HookOptions(
            zero_copy, grad_norm, check_replicas_every, telemetry_of(telemetry), targets_of(targets)
        )
    communicator = Communicator(
        ddp.process_group,
        topology=topology,
        plan=plan,
        timeout_s=timeout_s,
        reproducible=reproducible,
    )
    try:
        with communicator.bootstrap.all_or_none():
            handle = prepare(ddp, communicator, plan, settings, chosen)
            ddp.register_comm_hook(None, handle.hook.hook)
    except BaseException:
        communicator.close()
        raise
    return handle


def prepare(
    ddp: DistributedDataParallel,
    communicator: Communicator,
    plan: str | Plan,
    settings: CompressionSettings,
    chosen: HookOptions,
) -> Handle:
    """Return the handle of `ddp`, all but registered: its hook is yet to be. Collective."""
    require_equal(communicator.gather, chosen.facts())
    handle = _handles[ddp] = make_handle(ddp, communicator, plan, settings)
    if chosen.grad_norm:
        handle.watch_norm()
    if chosen.check_replicas_every:
        check = ReplicaCheck(communicator, ddp, chosen.check_replicas_every)
        handle.hook.observers.members.append(check)
    if chosen.zero_copy:
        handle.hook.sharing = BucketSharing(communicator)
    if chosen.telemetry is not None:
        handle.telemetry = watch_job(handle.hook, chosen.telemetry)
        if chosen.targets is not None and chosen.telemetry.directory is not None:
            directory = chosen.telemetry.directory
            handle.telemetry.monitor = TargetMonitor(handle, chosen.targets, directory)
    return handle


def make_handle(
    ddp: DistributedDataParallel,
    communicator: Communicator,
    plan: str | Plan,
    settings: CompressionSettings,
) -> Handle:
    """Return a handle whose hook is still to be registered on `ddp`, or called by one that is.

    Collective over the ranks of `communicator`.
    """
    require_equal(communicator.gather, settings.facts())
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    recorder = Recorder(names)
    hook = DDPHook(communicator, recorder)
    hook.require_group = same_group(ddp)
    ddp.register_forward_hook(recorder.forward_done)
    handle = Handle(hook, communicator, recorder, ddp, plan)
    if settings.wanted:
        compression = CompressedReduction(
            communicator, dict(ddp.module.named_parameters()), settings
        )
        hook.compression = compression
        if settings.compression == AUTO:
            ask = partial(handle.advice, settings.policy, settings.optimizer, keep_cap=True)
            compression.auto = Auto(compression, lambda: decide(communicator, handle.trace(), ask))
    hook.observers.members.append(BucketAgreement(communicator, names))
    hook.path = PathChooser(communicator, plan, hook.compression)
    hook.observers.members.append(hook.path)
    if communicator.rank == 0 and logger.isEnabledFor(logging.INFO):
        hook.advise = handle._log_advice
    return handle


def ddp(
    module: nn.Module,
    *,
    plan: str | Plan = "auto",
    topology: Topology | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    reproducible: bool = False,
    zero_copy: bool = False,
    grad_norm: bool = False,
    check_replicas_every: int = 0,
    telemetry: str | os.PathLike[str] | Telemetry | None = None,
    targets: str | os.PathLike[str] | Targets | None = None,
    compression: str | Mapping[str, str] = "none",
    policy: str = "exact",
    optimizer: str = "",
    start_step: int = 10,
    warm_up_steps: int = 0,
    guard_steps: int = 100,
    **options: Any,
) -> DistributedDataParallel:
    """Return `module` wrapped in DDP with the planned bucket cap and all-reduce.

    The cap is chosen for topology, sizes and dtypes, with a backward that takes as long as the
    communication; it is the same on all ranks. ``bucket_cap_mb=`` given by the caller wins.
    `handle_of` returns what `attach` does.

    Parameters
    ----------
    module : Module
        The model.
    plan, topology, timeout_s, reproducible
        As for `Communicator`.
    zero_copy, grad_norm, check_replicas_every, telemetry, targets
        As for `attach`.
    compression, policy, optimizer, start_step, warm_up_steps, guard_steps
        As for `attach`.
    **options
        Passed to DistributedDataParallel.

    Raises
    ------
    ConfigError
        As for `attach`.
    """
    with refused_for_all(group_of(options)):
        settings = compression_settings(
            module,
            compression=compression,
            policy=policy,
            optimizer=optimizer,
            start_step=start_step,
            warm_up_steps=warm_up_steps,
            guard_steps=guard_steps,
        )
        chosen = HookOptions(
            zero_copy, grad_norm, check_replicas_every, telemetry_of(telemetry), targets_of(targets)
        )
    communicator = Communicator(
        group_of(options),
        topology=topology,
        plan=plan,
        timeout_s=timeout_s,
        reproducible=reproducible,
    )
    try:
        planned = cap_wanted(module, options, communicator, plan)
        if planned is not None and planned.bucket_cap_mib is not None:
            options["bucket_cap_mb"] = planned.bucket_cap_mib
        if planned is not None and communicator.rank == 0:
            cap = cap_name(planned.bucket_cap_mib)
            logger.info("bucket cap %s: %s %s", cap, planned.reason, planned.backward_source)
        with communicator.bootstrap.all_or_none():
            model = DistributedDataParallel(module, **options)
            refuse_unsupported(model)
            handle = prepare(model, communicator, plan, settings, chosen)
            model.register_comm_hook(None, handle.hook.hook)
    except BaseException:
        communicator.close()
        raise
    return model


def group_of(options: Mapping[str, Any]) -> "dist.ProcessGroup | None":
    """Return the group that DDP takes from its arguments, None for the default one."""
    group: dist.ProcessGroup | None = options.get("process_group")
    if group is None and options.get("device_mesh") is not None:
        group = options["device_mesh"].get_group(mesh_dim=0)
    return group


def cap_wanted(
    module: nn.Module, options: Mapping[str, Any], communicator: Communicator, plan: str | Plan
) -> TrainingPlan | None:
    """Return the plan whose bucket cap DDP is to get, None where its arguments name one."""
    if options.get("bucket_cap_mb") is not None or options.get("bucket_cap_mb_list"):
        return None
    return planned_cap(module, communicator, plan)


def drop(ddp: DistributedDataParallel, handle: Handle) -> bool:
    """Forget `handle`; tell whether it was that of `ddp`, and not one that was attached later."""
    ours = _handles.get(ddp) is handle
    if ours:
        del _handles[ddp]
    return ours


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of a DDP that `ddp` made or `attach` was called on; None without."""
    return _handles.get(model)  # type: ignore[call-overload, no-any-return]
