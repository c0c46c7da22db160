"""FSDP2 with the planned all-reduce between replicas: `attach` on a ``fully_shard`` model."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn

from topo_ar.errors import ConfigError
from topo_ar.execution.bootstrap import refused_for_all
from topo_ar.execution.communicator import DEFAULT_TIMEOUT_S, Communicator
from topo_ar.execution.options import require_equal
from topo_ar.execution.torch_private import (
    lend_name,
    parameter_groups,
    reduce_device,
    replicate_group,
    reshard,
    set_replicate_group,
    shards_of,
    take_name,
)
from topo_ar.integrations.bucket_agreement import BucketAgreement
from topo_ar.integrations.compressed import CompressedReduction
from topo_ar.integrations.compression_choice import AUTO, compression_settings
from topo_ar.integrations.compression_state import State, load_state, saved_state
from topo_ar.integrations.handle import BaseHandle
from topo_ar.integrations.hook import DDPHook
from topo_ar.integrations.path_choice import PathChooser
from topo_ar.integrations.replicate_group import ReplicateGroup
from topo_ar.integrations.trace import Recorder
from topo_ar.planning.plan import Plan
from topo_ar.topology.model import Topology


class ShardBucket:
    """The gradients of one parameter group of FSDP: this rank's shards, one after the other.

    Parameters
    ----------
    group : object
        The parameter group.
    names : mapping of int to str
        Parameter names by ``id`` of the parameter.

    Attributes
    ----------
    shards : dict of str to Tensor
        What stands for each parameter's shard: its shape, without memory.
    """

    def __init__(self, group: Any, names: Mapping[int, str]) -> None:
        self.group = group
        # Codecs and plans ask whether it is on the CPU, and for the shape.
        kind = "cpu" if reduce_device(group).type == "cpu" else "meta"
        self.shards = {
            names[id(parameter)]: torch.empty(1, device=kind).expand(shape)
            for parameter, shape in shards_of(group)
        }
        self._index = 0
        self._held: list[torch.Tensor] = []

    def begin(self, index: int, numel: int) -> None:
        """Take note that `numel` elements are about to be reduced as the step's bucket `index`."""
        self._index = index
        trained = [parameter.requires_grad for parameter, _ in shards_of(self.group)]
        held = [shard for shard, is_in in zip(self.shards.values(), trained, strict=True) if is_in]
        # FSDP leaves out parameters that got no gradient, and does not say which.
        self._held = held if sum(shard.numel() for shard in held) == numel else []

    def index(self) -> int:
        """Return its place among those of the step."""
        return self._index

    def is_last(self) -> bool:
        """Return False: FSDP does not say."""
        return False

    def parameters(self) -> list[torch.Tensor]:
        """Return what is in it; empty where some parameters got no gradient."""
        return self._held


class FSDPHandle(BaseHandle):
    """What `attach` returns for a ``fully_shard`` model; after `close` it trains as before.

    Attributes
    ----------
    replicas : tuple of int
        The global ranks that hold what this one holds: the all-reduce is theirs.
    """

    def __init__(
        self,
        hook: DDPHook,
        communicator: Communicator,
        recorder: Recorder,
        model: nn.Module,
        buckets: Sequence[ShardBucket],
    ) -> None:
        super().__init__(hook, communicator, recorder)
        self._buckets = tuple(buckets)
        self._seen: set[ShardBucket] = set()
        # The model keeps the handle, for whoever drops it.
        self._noting = model.register_forward_hook(self._forward_done)
        self._groups = []
        for number, bucket in enumerate(buckets):
            theirs = replicate_group(bucket.group)
            assert theirs is not None
            self.replicas = tuple(dist.get_process_group_ranks(theirs))
            ours = ReplicateGroup(theirs, self, number)
            self._groups.append(ours)
            lend_name(theirs, ours)
            finalize(self, take_name, ours)
            set_replicate_group(bucket.group, ours)

    def _forward_done(self, module: nn.Module, inputs: object, output: object) -> None:
        self._recorder.forward_done(module, inputs, output)

    def reduce(self, number: int, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
        """Reduce the gradients of one parameter group; FSDP calls it, by `ReplicateGroup`."""
        bucket = self._buckets[number]
        # Ranks reduce the same groups in the same order; one that comes again is another step's.
        if bucket in self._seen:
            self._seen.clear()
        bucket.begin(len(self._seen), tensor.numel())
        self._seen.add(bucket)
        if self.hook.compression is None or op != dist.ReduceOp.SUM:
            self.hook.reduce(bucket, tensor, op).wait()
            return
        self.hook.reduce(bucket, tensor).wait()  # codecs average
        tensor.mul_(self.communicator.world_size)

    @property
    def _mark(self) -> str:
        return f"replicas of rank {self.replicas[0]}/"

    def state_dict(self, *, exact: bool = False) -> State:
        """Return what was not sent yet and the codecs' state of this rank's shards, tensors only.

        Collective; call it between steps on all ranks. Replicas return the same, others have keys
        of their own, so that it can be saved rank by rank or by ``torch.distributed.checkpoint``.

        Parameters
        ----------
        exact : bool
            Keep what each node has not sent instead of the sum, so that a job of the same ranks
            goes on bit for bit.
        """
        found = saved_state(self.hook.compression, exact)
        return {f"{self._mark}{key}": value for key, value in found.items()}

    def load_state_dict(self, state: State) -> None:
        """Take over a state, of a job with the same mesh, before the next step.

        Raises
        ------
        ConfigError
            If `state` is not what `state_dict` returned, or has nothing of this rank's shards.
        """
        mine = {
            key.removeprefix(self._mark): value
            for key, value in state.items()
            if key.startswith(self._mark)
        }
        load_state(self.hook.compression, mine)

    def close(self) -> None:
        """Give FSDP its own all-reduce back and close the communicator; between steps."""
        self._noting.remove()
        for bucket, ours in zip(self._buckets, self._groups, strict=True):
            if replicate_group(bucket.group) is ours:
                set_replicate_group(bucket.group, ours.replaced)
            take_name(ours)
        super().close()


def attach(
    model: nn.Module,
    *,
    plan: str | Plan = "auto",
    topology: Topology | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    reproducible: bool = False,
    compression: str | Mapping[str, str] = "none",
    optimizer: object = None,
    start_step: int = 10,
    warm_up_steps: int = 0,
    guard_steps: int = 100,
) -> FSDPHandle:
    """Let the replicas of a ``fully_shard`` model all-reduce their shards by plan.

    Every wrapped module in `model` takes part, but those that were attached before. Collective over
    the ranks that hold the same shards. Reduce-scatter and all-gather stay FSDP's own, as do
    gradient accumulation, mixed precision and divide factors.

    Parameters
    ----------
    model : FSDPModule
        Sharded over a mesh with a dimension to replicate over.
    plan, topology, timeout_s, reproducible
        As for `Communicator`; the ranks of `topology` are the replicas.
    compression, start_step, warm_up_steps, guard_steps
        See `CompressionSettings`; names are those of ``model.named_parameters()``. Codecs need to
        be named: ``auto`` is for DDP.
    optimizer : Optimizer or str, optional
        With compression: what steps, for codecs that are a risk with it.

    Raises
    ------
    ConfigError
        If nothing in `model` is replicated or all of it is attached, modules are replicated over
        different ranks, or compression cannot be what is asked for.
    """
    group = next(map(replicate_group, parameter_groups(model)), None)
    with refused_for_all(group):
        if compression == AUTO:
            raise ConfigError(
                'compression="auto" weighs what backward hides, which it does not know of FSDP; '
                'name a codec, such as compression="int8"'
            )
        settings = compression_settings(
            model,
            compression=compression,
            optimizer=optimizer,
            start_step=start_step,
            warm_up_steps=warm_up_steps,
            guard_steps=guard_steps,
        )
        reshard(model)  # what is gathered has no name
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        buckets = [ShardBucket(group, names) for group in _replicated(model)]
        shards = {name: shard for bucket in buckets for name, shard in bucket.shards.items()}
    communicator = Communicator(
        replicate_group(buckets[0].group),
        topology=topology,
        plan=plan,
        timeout_s=timeout_s,
        reproducible=reproducible,
    )
    try:
        with communicator.bootstrap.all_or_none():
            require_equal(communicator.gather, settings.facts())
            names = {id(shard): name for name, shard in shards.items()}
            recorder = Recorder(names)
            hook = DDPHook(communicator, recorder)
            if settings.wanted:
                hook.compression = CompressedReduction(communicator, shards, settings)
            hook.path = PathChooser(communicator, plan, hook.compression)
            hook.observers.members += [BucketAgreement(communicator, names), hook.path]
            return FSDPHandle(hook, communicator, recorder, model, buckets)
    except BaseException:
        communicator.close()
        raise


def handle_of(model: nn.Module) -> FSDPHandle | None:
    """Return the handle of a model that `attach` was called on; None if there is none."""
    for group in parameter_groups(model):
        ours = replicate_group(group)
        if isinstance(ours, ReplicateGroup):
            handle: FSDPHandle | None = ours.reducer
            return handle
    return None


def _replicated(model: nn.Module) -> list[Any]:
    """Return the parameter groups that are to be reduced, or say why there are none."""
    groups = parameter_groups(model)
    replicated = [group for group in groups if replicate_group(group) is not None]
    if not replicated:
        raise ConfigError(
            "nothing in this model is replicated, so there is no all-reduce to plan: give "
            "fully_shard a mesh of two dimensions, such as topo_ar.init_mesh(device_type)"
        )
    found = [
        group for group in replicated if not isinstance(replicate_group(group), ReplicateGroup)
    ]
    if not found:
        raise ConfigError("this model is attached already; close the handle first")
    ranks = {tuple(dist.get_process_group_ranks(replicate_group(group))) for group in found}
    if len(ranks) > 1:
        raise ConfigError(
            f"modules of this model are replicated over different ranks: {sorted(ranks)}; attach "
            "them one by one, inner ones first"
        )
    return found
