"""Averaging inside the node in every step and between nodes every H steps.

`LocalSGD` averages the parameters; `DiLoCo` lets an outer optimizer step by what they have moved.
Both may let the exchange overlap with the steps that follow it.

References
----------
T. Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (post-local and hierarchical
local SGD). A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models", 2023. Q. Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed
Training Using Delayed Averaging", 2020 (what is moved during the exchange is kept).
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypedDict, Unpack, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.execution.communicator import DEFAULT_TIMEOUT_S, Communicator
from topo_ar.execution.options import require_equal
from topo_ar.execution.torch_private import GradBucket
from topo_ar.integrations.compressed import CompressedReduction
from topo_ar.integrations.compression_choice import CompressionSettings
from topo_ar.integrations.compression_state import load_state, saved_state
from topo_ar.integrations.hook import DDPHook
from topo_ar.integrations.unsupported import refuse_unsupported
from topo_ar.planning.plan import Plan
from topo_ar.topology.model import Topology

OuterOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

# The outer optimizer and its rates of the DiLoCo paper.
NESTEROV: OuterOptimizer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class AveragingOptions(TypedDict, total=False):
    """What `DiLoCo` hands on to `LocalSGD`."""

    delay: int
    warmup_steps: int
    compression: str | Mapping[str, str]
    plan: str | Plan
    topology: Topology | None
    timeout_s: float


# By the default group: torch cannot make a group of the same few ranks twice.
_node_groups: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]"
_node_groups = WeakKeyDictionary()


class _Hook:
    """Averages gradients over all ranks in the first steps and inside the node from then on."""

    def __init__(self, everywhere: DDPHook, inside: DDPHook, node: tuple[int, ...]) -> None:
        self.everywhere, self.inside, self.node = everywhere, inside, node
        self.warms_up = False

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.warms_up:
            return self.everywhere.hook(state, bucket)
        return self.inside.hook(state, bucket).then(self._outcome)

    def _outcome(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        try:
            return future.value()
        except Exception as error:
            raise ExecutionError(
                f"inside the node of ranks {list(self.node)}, which are numbered from 0 in what "
                f"follows: {error}"
            ) from error


@dataclass(slots=True, eq=False)
class _Part:
    """Tensors of one dtype, exchanged as one; it can be handed to what compresses buckets.

    Attributes
    ----------
    anchor : Tensor or None
        What all ranks had after the last exchange, the same bits on all; None where not needed.
    snapshot : Tensor or None
        What this rank had when the exchange began that is under way.
    future, mean : Future or None, Tensor or None
        What it will give, and has given.
    """

    number: int
    named: dict[str, torch.Tensor]
    anchor: torch.Tensor | None = None
    snapshot: torch.Tensor | None = None
    future: "torch.futures.Future[torch.Tensor] | None" = None
    mean: torch.Tensor | None = None

    def index(self) -> int:
        return self.number

    def parameters(self) -> list[torch.Tensor]:
        return list(self.named.values())

    def flat(self) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.named.values()])

    def put(self, flat: torch.Tensor) -> None:
        offset = 0
        for tensor in self.named.values():
            part = flat[offset : offset + tensor.numel()]
            tensor.detach().copy_(part.view(tensor.shape))
            offset += tensor.numel()


class LocalSGD:
    """Averages gradients inside each node in every step and parameters of all ranks every H steps.

    Gradients cross no wire between nodes, so the bytes there are those of one all-reduce of the
    parameters every `sync_every` steps. Ranks of a node hold the same bits at all times, all ranks
    after each exchange (with `delay`: after `synchronize`). Optimizer states stay where they are.

    It is collective over the ranks of `ddp`, which must step equally often. Floating-point buffers,
    such as the statistics of batch norms, are averaged with the parameters and not broadcast. With
    ``find_unused_parameters=True`` DDP itself still exchanges which were used, in every step.

    Parameters
    ----------
    ddp : DistributedDataParallel
        Without a communication hook.
    optimizer : Optimizer, optional
        What steps the parameters: after each of its steps comes `step`. Without one, call that
        yourself; so too where a loss scaler may skip steps, which it does not on all nodes.
    sync_every : int
        Steps between exchanges.
    delay : int
        After so many steps, fewer than `sync_every`, the outcome of an exchange is put in place;
        until then it is under way. What the parameters have moved meanwhile is kept.
    warmup_steps : int
        As many steps come first whose gradients are averaged over all ranks.
    compression : str or mapping
        As for `topo_ar.attach`, but for ``auto``: parameters then travel as differences to what
        they were after the last exchange, with error feedback.
    plan, topology, timeout_s
        As for `Communicator`; of the exchange between all ranks.

    Attributes
    ----------
    communicator : Communicator
        Of all ranks.
    num_steps, num_exchanges : int
        Steps taken, exchanges put in place.

    Raises
    ------
    ConfigError
        If `ddp` cannot be served, or an option cannot be, or differs between ranks.

    Examples
    --------
    ::

        model = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averaging = topo_ar.LocalSGD(model, optimizer, sync_every=16)
        ...  # the training loop as it was
        averaging.synchronize()  # at the end, and before the model is saved or evaluated
    """

    # Whether anything but the mean is made of an exchange.
    _steps_outside = False

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sync_every: int = 16,
        delay: int = 0,
        warmup_steps: int = 0,
        compression: str | Mapping[str, str] = "none",
        plan: str | Plan = "auto",
        topology: Topology | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        refuse_unsupported(ddp)
        if sync_every < 1 or not 0 <= delay < sync_every or warmup_steps < 0:
            raise ConfigError(
                f"sync_every={sync_every} must be positive, delay={delay} from 0 to less than "
                f"that, and warmup_steps={warmup_steps} not negative"
            )
        if compression == "auto":
            raise ConfigError("compression='auto' is for gradients; name a codec, such as 'int8'")
        settings = CompressionSettings(compression=compression, start_step=0, guard_steps=0)
        settings.choice(name for name, _ in ddp.module.named_parameters())
        self.sync_every, self.delay, self.warmup_steps = sync_every, delay, warmup_steps
        self.num_steps = self.num_exchanges = 0
        self.compression: CompressedReduction | None = None
        self._due_at: int | None = None
        parameters = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad}
        buffers = {n: b for n, b in ddp.module.named_buffers() if b.is_floating_point()}
        self._parts = _by_dtype(parameters)
        self._buffers = _by_dtype(buffers)
        self._anchored = settings.wanted or self._steps_outside
        options = {"sync_every": str(sync_every), "delay": str(delay)}
        options |= {"warmup_steps": str(warmup_steps), "averaging": type(self).__name__}
        with ExitStack() as undo:
            self.communicator = undo.enter_context(
                Communicator(ddp.process_group, topology=topology, plan=plan, timeout_s=timeout_s)
            )
            node = _ranks_of_node(ddp.process_group, self.communicator)
            self._node = undo.enter_context(Communicator(_group_of(node), timeout_s=timeout_s))
            # Last, so that no rank goes on, or away, before all have made both.
            require_equal(self.communicator.gather, options | settings.facts())
            undo.pop_all()
        if settings.wanted:
            self.compression = CompressedReduction(self.communicator, parameters, settings)
        self._hook = _Hook(DDPHook(self.communicator), DDPHook(self._node), node)
        self._hook.warms_up = warmup_steps > 0
        ddp.register_comm_hook(None, self._hook.hook)
        ddp.broadcast_buffers = False
        self._drop_anchors()
        self._removable = None
        if optimizer is not None:
            self._removable = optimizer.register_step_post_hook(lambda *_: self.step())

    @property
    def nbytes_sent_between(self) -> int:
        """Bytes that this rank has sent to other nodes, so far."""
        return self.communicator.nbytes_sent_between

    def step(self) -> None:
        """Take note of a step of the optimizer; begin an exchange, or put one in place.

        Raises
        ------
        ExecutionError
            If a rank failed.
        """
        self.num_steps += 1
        since = self.num_steps - self.warmup_steps
        if since <= 0:
            if since == 0:
                self._hook.warms_up = False
                self._drop_anchors()
            return
        if self.num_steps == self._due_at:
            self._finish()
        if since % self.sync_every == 0:
            self._begin(keep=self.delay > 0)
            if self.delay:
                self._due_at = self.num_steps + self.delay
            else:
                self._finish()

    def synchronize(self) -> None:
        """Make an exchange now and put it in place: all ranks then hold the same parameters.

        Collective, between steps. It is an exchange like any other, for an outer optimizer too; the
        next ones come at the steps at which they would have come.

        Raises
        ------
        ExecutionError
            If a rank failed.
        """
        if self._due_at is not None:
            self._finish()
        self._begin(keep=False)
        self._finish()

    def _begin(self, *, keep: bool) -> None:
        for part in self._all_parts():
            sent = part.flat()
            if keep:
                part.snapshot = sent.clone()
            if part.anchor is not None:
                sent -= part.anchor.detach()
            part.future = self._reduce(part, sent)

    def _reduce(self, part: _Part, sent: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        if self.compression is None or part.anchor is None:
            return self.communicator.all_reduce(sent, dist.ReduceOp.AVG, name="averaging")
        bucket = cast(GradBucket, part)
        self.compression.begin(bucket)
        return self.compression.reduce(bucket, sent, None)

    def _finish(self) -> None:
        means = [self._mean(part) for part in self._all_parts()]
        self._outer_step(means)
        for part, mean in zip(self._all_parts(), means, strict=True):
            target = mean if part.anchor is None else part.anchor.detach()
            if part.snapshot is not None:
                target = target + (part.flat() - part.snapshot)
            part.put(target)
            part.snapshot = part.future = part.mean = None
        self._due_at = None
        self.num_exchanges += 1

    def _mean(self, part: _Part) -> torch.Tensor:
        if part.mean is None:
            assert part.future is not None
            part.mean = part.future.wait()
        return part.mean

    def _outer_step(self, means: list[torch.Tensor]) -> None:
        """Move the anchors by what the ranks have moved in the mean, or something made of it."""
        for part, mean in zip(self._all_parts(), means, strict=True):
            if part.anchor is not None:
                part.anchor += mean

    def _drop_anchors(self) -> None:
        """Remember the parameters as what all ranks have; they do where this is called."""
        for part in self._parts if self._anchored else ():
            if part.anchor is None:
                part.anchor = part.flat()
            else:
                part.anchor.detach().copy_(part.flat())

    def _all_parts(self) -> list[_Part]:
        return self._parts + self._buffers

    def state_dict(self) -> dict[str, Any]:
        """Return what a job of the same ranks needs to go on bit for bit, beside its model.

        Collective, between steps. Parameters differ between nodes then, and so does this: every
        rank, or one of each node, saves model, optimizer and this. After `synchronize` parameters
        are the same everywhere, optimizer states are not.
        """
        pending = self._due_at is not None
        parts = self._all_parts()
        return {
            "num_steps": self.num_steps,
            "num_exchanges": self.num_exchanges,
            "due_at": self._due_at,
            "anchors": [_copy(part.anchor) for part in parts],
            "snapshots": [_copy(part.snapshot) for part in parts],
            "means": [_copy(self._mean(part)) if pending else None for part in parts],
            "compression": saved_state(self.compression, exact=True),
            **self._outer_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state before the next step; collective, as is loading model and optimizer.

        Raises
        ------
        ConfigError
            If it is not of this model.
        """
        parts = self._all_parts()
        shapes = [_numel(part.anchor) for part in parts]
        if [_numel(anchor) for anchor in state["anchors"]] != shapes:
            raise ConfigError(
                "this state of averaging is of another model or of other options: its anchors have "
                f"{[_numel(anchor) for anchor in state['anchors']]} elements, not {shapes}"
            )
        self.num_steps, self.num_exchanges = state["num_steps"], state["num_exchanges"]
        self._due_at = state["due_at"]
        self._hook.warms_up = self.num_steps < self.warmup_steps
        for part, anchor, snapshot, mean in zip(
            parts, state["anchors"], state["snapshots"], state["means"], strict=True
        ):
            if part.anchor is not None:
                part.anchor.detach().copy_(anchor)
            part.snapshot, part.mean, part.future = _copy(snapshot), _copy(mean), None
        load_state(self.compression, state["compression"])
        self._load_outer_state(state)

    def _outer_state(self) -> dict[str, Any]:
        return {}

    def _load_outer_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `_outer_state` returned."""

    def close(self) -> None:
        """End it; the DDP cannot run backward afterwards."""
        if self._removable is not None:
            self._removable.remove()
        self._node.close()
        self.communicator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class DiLoCo(LocalSGD):
    """Lets an outer optimizer step by what the parameters of all ranks have moved in H steps.

    The mean of it, negated, is the gradient of an optimizer that all ranks hold alike. With plain
    SGD at a rate of 1 that is `LocalSGD`.

    Parameters
    ----------
    ddp, optimizer, sync_every, delay, warmup_steps, compression, plan, topology, timeout_s
        As for `LocalSGD`.
    outer_optimizer : callable
        Makes the outer optimizer of the tensors that it is to step: all parameters of one dtype
        are one. By default SGD with a rate of 0.7 and a Nesterov momentum of 0.9.

    Raises
    ------
    ConfigError
        As `LocalSGD`.
    """

    _steps_outside = True

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sync_every: int = 64,
        outer_optimizer: OuterOptimizer = NESTEROV,
        **options: Unpack[AveragingOptions],
    ) -> None:
        super().__init__(ddp, optimizer, sync_every=sync_every, **options)
        for part in self._parts:
            assert part.anchor is not None
            part.anchor = torch.nn.Parameter(part.anchor)
        self.outer_optimizer = outer_optimizer(
            [part.anchor for part in self._parts if part.anchor is not None]
        )

    def _outer_step(self, means: list[torch.Tensor]) -> None:
        for part, mean in zip(self._parts, means, strict=False):
            assert part.anchor is not None
            part.anchor.grad = mean.neg()
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()

    def _outer_state(self) -> dict[str, Any]:
        return {"outer_optimizer": self.outer_optimizer.state_dict()}

    def _load_outer_state(self, state: Mapping[str, Any]) -> None:
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])


def _by_dtype(tensors: Mapping[str, torch.Tensor]) -> list[_Part]:
    found: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return [_Part(number, named) for number, named in enumerate(found.values())]


def _ranks_of_node(group: dist.ProcessGroup, communicator: Communicator) -> tuple[int, ...]:
    (node,) = (node for node in communicator.nodes if communicator.rank in node)
    return tuple(dist.get_global_rank(group, rank) for rank in node)


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    groups = _node_groups.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[ranks]


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _numel(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
