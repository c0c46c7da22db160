"""What `topo_ar.attach` does, by itself, to every DDP that an unchanged script makes."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from topo_ar.errors import ConfigError, PlanError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.torch_private import bucket_cap_mib, registered_hooks, uncompiled
from topo_ar.integrations.ddp import Handle, cap_wanted, drop, group_of, prepare
from topo_ar.integrations.injection import endings, say
from topo_ar.integrations.observe import Observation
from topo_ar.integrations.run_options import RunOptions, options_from
from topo_ar.integrations.unsupported import refuse_arguments, refuse_unsupported
from topo_ar.planning.joint_reasons import cap_name
from topo_ar.units import format_size

_Init = Callable[..., None]


def construct(
    original: _Init,
    ddp: DistributedDataParallel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Construct `ddp` with the planned bucket cap, and attach to it at its first forward pass.

    Until then the script may register a hook of its own, which wins. What cannot be served stays
    plain DDP, loudly: it is so on all ranks, since they have equal models and options. Collective.

    Parameters
    ----------
    original : callable
        DDP's own ``__init__``.
    ddp : DistributedDataParallel
        New and empty.
    args, kwargs
        What the script gave.

    Raises
    ------
    ExecutionError
        If ranks cannot reach each other.
    """
    options = options_from()
    if not dist.is_initialized() or options.observe_steps:
        original(ddp, *args, **kwargs)  # without a process group it says so
        if options.observe_steps:
            Observation(ddp, options)
        return
    bound = inspect.signature(original).bind(ddp, *args, **kwargs)
    try:
        automatic = _Automatic(bound.arguments, options)
    except (ConfigError, PlanError) as error:
        original(ddp, *args, **kwargs)
        _leave(ddp, str(error))
        return
    try:
        bound.arguments.update(automatic.arguments)
        original(*bound.args, **bound.kwargs)
        automatic.attach(ddp)
    except BaseException:
        automatic.communicator.close()
        raise


class _Automatic:
    """One DDP on its way: its communicator and what is planned for it."""

    def __init__(self, arguments: Mapping[str, Any], options: RunOptions) -> None:
        self._options = options
        refuse_arguments(arguments)
        settings, module = self._options.compression_settings, arguments["module"]
        settings.choice(name for name, _ in module.named_parameters())
        self.communicator = Communicator(
            group_of(arguments),
            plan=self._options.plan,
            timeout_s=self._options.timeout_s,
            reproducible=self._options.reproducible,
        )
        self._planned = cap_wanted(module, arguments, self.communicator, self._options.plan)

    @property
    def arguments(self) -> dict[str, Any]:
        """What DDP gets beside what the script gave."""
        cap = self._planned.bucket_cap_mib if self._planned is not None else None
        return {} if cap is None else {"bucket_cap_mb": cap}

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Do all but register the hook. Collective."""
        try:
            refuse_unsupported(ddp)
            handle = prepare(
                ddp,
                self.communicator,
                self._options.plan,
                self._options.compression_settings,
                self._options.hook_options,
            )
        except (ConfigError, PlanError) as error:
            self.communicator.close()
            _leave(ddp, str(error))
            return
        _FirstForward(ddp, handle)
        if self.communicator.rank == 0:
            say(self._what_is_done(ddp))

    def _what_is_done(self, ddp: DistributedDataParallel) -> str:
        made, planned = self.communicator, self._planned
        nbytes = sum(p.nbytes for p in ddp.module.parameters() if p.requires_grad)
        nodes = len(made.nodes)
        parts = [
            f"attached to {type(ddp.module).__name__}: {format_size(nbytes)} of gradients, "
            f"{made.world_size} ranks on {nodes} node{'s' if nodes > 1 else ''}"
        ]
        if self._options.compression != "none":
            parts.append(f"compression {self._options.compression}")
        if made.plain_reason is not None:
            parts.append(f"plain all-reduce: {made.plain_reason}")
        if planned is None:
            parts.append(f"bucket cap {cap_name(bucket_cap_mib(ddp))}, as the script has it")
        else:
            cap = cap_name(planned.bucket_cap_mib)
            families = ", ".join(dict.fromkeys(str(bucket.family) for bucket in planned.buckets))
            parts.append(f"bucket cap {cap}, {families}")
            parts.append(f"{planned.reason} {planned.backward_source}")
        return "; ".join(parts)


class _FirstForward:
    """Registers the hook before the first forward pass, if the script has registered none."""

    def __init__(self, ddp: DistributedDataParallel, handle: Handle) -> None:
        self._handle: Handle | None = handle
        self._removable = ddp.register_forward_pre_hook(self.before)

    @uncompiled
    def before(self, ddp: nn.Module, inputs: object) -> None:
        handle, self._handle = self._handle, None
        self._removable.remove()
        if handle is None or not isinstance(ddp, DistributedDataParallel):
            return
        if registered_hooks(ddp):
            handle.close()
            if drop(ddp, handle):
                _leave(ddp, "the script has registered a communication hook of its own")
            elif handle.communicator.rank == 0:
                model, why = type(ddp.module).__name__, "the script attaches by itself"
                endings.append(lambda: {"model": model, "attached": False, "reason": why})
            return
        ddp.register_comm_hook(None, handle.hook.hook)
        if handle.communicator.rank == 0:
            endings.append(_ending(ddp, handle))

    def __getstate__(self) -> dict[str, Any]:
        return {"_handle": None, "_removable": self._removable}


def _leave(ddp: DistributedDataParallel, why: str) -> None:
    model = type(ddp.module).__name__
    if dist.get_rank() == 0:
        say(f"WARNING: {model} stays plain DistributedDataParallel: {why}")
        endings.append(lambda: {"model": model, "attached": False, "reason": why})


def _ending(ddp: DistributedDataParallel, handle: Handle) -> Callable[[], dict[str, Any]]:
    model, cap_mib = type(ddp.module).__name__, bucket_cap_mib(ddp)

    def ending() -> dict[str, Any]:
        choice = handle.choice
        return {
            "model": model,
            "attached": True,
            "world_size": handle.communicator.world_size,
            "num_nodes": len(handle.communicator.nodes),
            "bucket_cap_mib": cap_mib,
            "path": choice.path,
            "reason": choice.reason,
            "speedup": choice.speedup and list(astuple(choice.speedup))[:3],
            "compression": handle.compression.reason,
            "fallbacks": handle.fallbacks,
            "error": None if handle.error is None else str(handle.error),
        }

    return ending
