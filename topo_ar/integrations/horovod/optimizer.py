"""``DistributedOptimizer``: an optimizer whose gradients are reduced as backward makes them."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from topo_ar.execution.torch_private import mark_hooked
from topo_ar.integrations.horovod.codec import CodecReducer
from topo_ar.integrations.horovod.compression import Compression, Compressor, codec_of
from topo_ar.integrations.horovod.job import ProcessSet, global_process_set
from topo_ar.integrations.horovod.operations import (
    Average,
    ReduceOp,
    chosen_op,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from topo_ar.integrations.horovod.requests import Handle

_hooks: Any = WeakTensorKeyDictionary()
# Of gradients that a codec takes at once: as much as DDP has in a bucket.
_BUCKET_NBYTES = 25 << 20


@dataclass(slots=True, eq=False)
class _Unit:
    """Parameters whose gradients are reduced together, and how far they are in this step."""

    name: str
    parameters: list[torch.Tensor]
    num_ready: int = 0
    handle: Handle | None = None
    contexts: list[Any] = field(default_factory=list)


class GradientReducer:
    """Reduces the gradients of an optimizer's parameters from hooks of autograd."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.passes = passes
        self.synchronized = False
        self.wanted = True
        self._compression = compression
        self._op = op
        self._factors = (1 / predivide, predivide)
        self._sparse_as_dense = sparse_as_dense
        self._groups = optimizer.param_groups
        self._process_set = process_set
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = _names(parameters, named_parameters)
        trained = [p for p in parameters if p.requires_grad]
        codec = codec_of(compression)
        if codec and groups is None:
            groups = _buckets(trained)
        self._units = _units(trained, names, groups, next(process_set.engine.numbers))
        self._codec: CodecReducer | None = None
        if codec:
            named = [{names[p]: p for p in unit.parameters} for unit in self._units]
            self._codec = CodecReducer(named, codec, process_set)
        self._unit_of = {p: unit for unit in self._units for p in unit.parameters}
        self._left = dict.fromkeys(self._unit_of, passes)
        self._alone = process_set.size() == 1
        if not self._alone:
            for parameter in self._unit_of:
                if parameter in _hooks:  # the last one that was made reduces
                    _hooks.pop(parameter).remove()
                hooked: Any = parameter
                _hooks[parameter] = hooked.register_post_accumulate_grad_hook(self._ready)

    @property
    def begun(self) -> bool:
        """Whether gradients of this step are on their way, or passes were made towards it."""
        return any(left != self.passes for left in self._left.values())

    def set_passes(self, passes: int) -> None:
        """Expect another number of backward passes from the next step on."""
        self.passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._left[parameter] == 0:
            raise AssertionError(
                "a gradient was computed more often than backward_passes_per_step="
                f"{self.passes} before step(); raise it, or call step() or synchronize()"
            )
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            unit = self._unit_of[parameter]
            unit.num_ready += 1
            if self._codec is not None:  # its buckets go in their order
                for each in self._units:
                    if each.num_ready < len(each.parameters):
                        break
                    if each.handle is None:
                        self._reduce(each)
            elif unit.num_ready == len(unit.parameters):
                self._reduce(unit)

    def _reduce(self, unit: _Unit) -> None:
        """Begin to reduce a unit. What has no gradient takes part with zeros: others may have."""
        gradients = []
        for parameter in unit.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse and self._sparse_as_dense:
                parameter.grad = parameter.grad.to_dense()
            gradients.append(parameter.grad)
        if len(gradients) == 1 and gradients[0].is_sparse:
            unit.contexts = [None]
            unit.handle = sparse_allreduce_async(
                gradients[0], unit.name, self._op, self._process_set, repeats=True
            )
            return
        if self._codec is not None:
            unit.contexts = [None] * len(gradients)
            number = self._units.index(unit)
            unit.handle = self._codec.reduce(number, unit.name, gradients)
            return
        small, contexts = zip(*map(self._compression.compress, gradients), strict=True)
        unit.contexts = list(contexts)
        unit.handle = grouped_allreduce_async_(
            small, None, unit.name, self._op, *self._factors, self._process_set, repeats=True
        )

    def synchronize(self) -> None:
        """Return when the gradients of all parameters are reduced."""
        self.synchronized = True
        if self._alone:
            return
        later = [p for group in self._groups for p in group["params"] if p not in self._unit_of]
        if any(p.requires_grad and p.grad is not None for p in later):
            raise ValueError(
                "parameters that were added, or began to be trained, after DistributedOptimizer "
                "was made would not be reduced, of shapes "
                f"{[tuple(p.shape) for p in later][:5]}; make it again"
            )
        try:
            for unit in self._units:
                if unit.handle is None:
                    self._reduce(unit)
            for unit in self._units:
                assert unit.handle is not None
                self._put(unit, unit.handle.wait())
        finally:
            self._left = dict.fromkeys(self._left, self.passes)
            for unit in self._units:
                unit.num_ready, unit.handle, unit.contexts = 0, None, []

    def _put(self, unit: _Unit, results: Any) -> None:
        if isinstance(results, torch.Tensor):  # sparse
            unit.parameters[0].grad = results
            return
        for parameter, result, context in zip(unit.parameters, results, unit.contexts, strict=True):
            gradient = self._compression.decompress(result, context)
            assert parameter.grad is not None
            if gradient is not parameter.grad:
                parameter.grad.copy_(gradient)


class DistributedMethods:
    """What `DistributedOptimizer` puts before the methods of an optimizer's class."""

    _reducer: GradientReducer

    def synchronize(self) -> None:
        """Return when all gradients are reduced, to clip or unscale them before `step`."""
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` reduce nothing inside: `synchronize` has done so."""
        self._reducer.wanted = False
        try:
            yield
        finally:
            self._reducer.wanted = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect another number of backward passes from the next step on."""
        self._reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients and take a step; those that `closure` makes are waited for."""
        reducer = self._reducer
        if reducer.wanted and reducer.synchronized:
            warnings.warn(
                "step() reduces gradients that synchronize() has reduced already; put it into "
                "`with optimizer.skip_synchronize():`",
                stacklevel=2,
            )
        if reducer.wanted and closure is not None:
            inner = closure

            def reduced_closure() -> Any:
                loss = inner()
                reducer.synchronize()
                return loss

            closure = reduced_closure
        elif reducer.wanted:
            reducer.synchronize()
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            reducer.synchronized = False

    mark_hooked(step)

    def zero_grad(self, *args: Any, **named: Any) -> None:
        """Reset the gradients.

        Raises
        ------
        AssertionError
            If they are being reduced: between backward and `step` or `synchronize`.
        """
        if self._reducer.begun:
            raise AssertionError(
                "zero_grad() was called while gradients are being reduced; call step() or "
                "synchronize() after backward() first"
            )
        super().zero_grad(*args, **named)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class whose `step` takes the ranks' averaged gradients.

    Gradients are reduced while backward goes on, whatever the order in which they become ready on
    each rank. It shares parameters and state with `optimizer`, which is not to be stepped itself.

    Parameters
    ----------
    optimizer : Optimizer
        What steps.
    named_parameters : iterable of (str, Parameter), optional
        ``model.named_parameters()``: by their names gradients find each other; else by their order.
    compression : Compressor
        See `Compression`.
    backward_passes_per_step : int
        How often backward adds to the gradients before they are reduced.
    op : ReduceOp
        What is made of the ranks' gradients.
    gradient_predivide_factor : float
        An average divides by this before it adds and by the rest after.
    num_groups, groups : optional
        How many groups of gradients, or which, are reduced as soon as all of a group are there.
    sparse_as_dense : bool
        Reduce sparse gradients as dense ones.
    process_set : ProcessSet
        The ranks.

    Raises
    ------
    ValueError
        If names are missing or occur twice, or an option cannot be.
    NotImplementedError
        For Adasum.
    """
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} is not positive")
    if op != Average and codec_of(compression):
        raise ValueError("codecs are for op=hvd.Average")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average")
    if isinstance(compression, type) and not issubclass(compression, Compressor):
        raise ValueError(f"compression={compression!r} is not a hvd.Compression")
    if num_groups < 0:
        raise ValueError(f"num_groups={num_groups} is negative")
    original = type(optimizer)
    made = cast(
        torch.optim.Optimizer,
        object.__new__(type(original.__name__, (DistributedMethods, original), {})),
    )
    # A scheduler that wraps step() of the original would put that in place of ours.
    made.__dict__.update({name: it for name, it in vars(optimizer).items() if name != "step"})
    made._reducer = GradientReducer(  # type: ignore[attr-defined]
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        chosen_op(op),
        gradient_predivide_factor,
        groups if groups is not None else num_groups or None,
        sparse_as_dense,
        process_set,
    )
    return made


def _names(
    parameters: Sequence[torch.Tensor],
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """Return the name of each parameter."""
    if named_parameters is None:
        return {parameter: f"unnamed.{number}" for number, parameter in enumerate(parameters)}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("named_parameters must be pairs (name, parameter), as of a model")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has names twice: {', '.join(twice)}")
    found = {parameter: name for name, parameter in pairs}
    missing = [tuple(p.shape) for p in parameters if p not in found]
    if missing:
        raise ValueError(
            f"named_parameters does not name {len(missing)} of the optimizer's parameters, of "
            f"shapes {missing[:5]}; give those of the whole model"
        )
    return found


def _buckets(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the parameters of one dtype at a time, last ones first, in buckets of some size."""
    found: list[list[torch.Tensor]] = []
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        room = -1
        for parameter in reversed([p for p in parameters if p.dtype == dtype]):
            if parameter.nbytes > room:
                found.append([])
                room = _BUCKET_NBYTES
            found[-1].append(parameter)
            room -= parameter.nbytes
    return found


def _units(
    parameters: Sequence[torch.Tensor],
    names: dict[torch.Tensor, str],
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    number: int,
) -> list[_Unit]:
    """Return what is reduced together; parameters in no group are by themselves."""
    if isinstance(groups, int):
        size, more = divmod(len(parameters), groups)
        bounds = [size * i + min(i, more) for i in range(groups + 1)]
        chosen = [list(parameters[a:b]) for a, b in itertools.pairwise(bounds)]
    else:
        chosen = [[p for p in group if p.requires_grad] for group in groups or ()]
    grouped = [p for group in chosen for p in group]
    if len(set(grouped)) < len(grouped) or not set(grouped) <= set(parameters):
        raise ValueError("groups may have each parameter of the optimizer once, and no others")
    alone = [[p] for p in parameters if p not in set(grouped)]
    return [
        _Unit(f"optimizer{number}.{names[unit[0]]}", unit) for unit in [*chosen, *alone] if unit
    ]
