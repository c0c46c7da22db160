"""Backward as the planner sees it: which gradient is ready when, and DDP's buckets of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from topo_ar.errors import ConfigError
from topo_ar.planning.parameters import Parameter, Shape
from topo_ar.telemetry.bucket_trace import BucketCall, BucketTrace

MIB = 1 << 20
# torch.nn.parallel.DistributedDataParallel: without `bucket_cap_mb` a first bucket of 1 MiB, then
# 25 MiB; with it, all buckets have that cap.
DEFAULT_CAP_MIB = 25
FIRST_BUCKET_NBYTES = MIB


@dataclass(frozen=True, slots=True)
class Backward:
    """Gradients in the order in which they become ready, and when; seconds from backward's begin.

    Attributes
    ----------
    parameters : tuple of Parameter
        In order of readiness.
    ready_seconds : tuple of float
        Of each, never falling.
    seconds : float
        The length of backward; with the last gradient it is over.
    source : str
        A sentence: where the times come from.
    """

    parameters: tuple[Parameter, ...]
    ready_seconds: tuple[float, ...]
    seconds: float
    source: str

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together, and when the last of them is ready."""

    shapes: tuple[Shape, ...]
    nbytes: int
    itemsize: int
    ready_seconds: float


def uniform_backward(parameters: Sequence[Parameter], seconds: float) -> Backward:
    """Return a backward of `seconds` through `parameters`, given in the order of the forward pass.

    Gradients become ready last to first, each after a time in proportion to its bytes: an
    assumption, since early layers of convolutional networks compute longer for fewer bytes.

    Raises
    ------
    ConfigError
        If there are no parameters or `seconds` is negative.
    """
    if not parameters:
        raise ConfigError("there are no parameters, so there is no gradient to reduce")
    if not seconds >= 0:
        raise ConfigError(f"backward cannot take {seconds} s; give 0 or more")
    ordered = tuple(reversed(parameters))
    total = sum(parameter.nbytes for parameter in ordered)
    done, ready = 0, []
    for parameter in ordered:
        done += parameter.nbytes
        ready.append(seconds * (done / total) if total else seconds)
    return Backward(
        ordered, tuple(ready), seconds, "Gradients are assumed to become ready at an even rate."
    )


def backward_of(trace: BucketTrace) -> Backward:
    """Return the backward that `trace` shows: medians over its steps with the last step's buckets.

    DDP changes its buckets after the first step, so that steps with other buckets are left out.
    Between two calls of the hook gradients are taken to become ready at an even rate. Backward
    ends with the last call: its last bucket holds its last gradients.

    Raises
    ------
    ConfigError
        If the trace holds no bucket, or a dtype is not known.
    """
    steps = [step.buckets for step in trace.steps if step.buckets]
    if not steps:
        raise ConfigError("the bucket trace holds no bucket; train at least one step first")
    layout = [(call.parameters, call.numel) for call in steps[-1]]
    alike = [s for s in steps if [(call.parameters, call.numel) for call in s] == layout]
    parameters: list[Parameter] = []
    ready: list[float] = []
    before = 0.0
    for position, last in enumerate(steps[-1]):
        called = max(before, median(calls[position].call_seconds for calls in alike))
        found = _parameters(last)
        total = sum(parameter.numel for parameter in found)
        done = 0
        for parameter in found:
            done += parameter.numel
            part = done / total if total else 1.0
            ready.append(called if part == 1 else before + (called - before) * part)
        parameters += found
        before = called
    count = f"{len(alike)} step" + ("s" if len(alike) > 1 else "")
    return Backward(
        tuple(parameters), tuple(ready), before, f"Ready times are medians of {count} of a trace."
    )


def trace_buckets(trace: BucketTrace) -> list[Bucket]:
    """Return the buckets of `trace` as they were, with the ready times of `backward_of`.

    Raises
    ------
    ConfigError
        As `backward_of`.
    """
    backward = backward_of(trace)
    calls = next(step.buckets for step in reversed(trace.steps) if step.buckets)
    made, first = [], 0
    for call in calls:
        members = backward.parameters[first : first + max(1, len(call.shapes))]
        first += len(members)
        made.append(
            Bucket(
                shapes=tuple(parameter.shape for parameter in members),
                nbytes=sum(parameter.nbytes for parameter in members),
                itemsize=_itemsize(members[0]),
                ready_seconds=backward.ready_seconds[first - 1],
            )
        )
    return made


def _parameters(call: BucketCall) -> list[Parameter]:
    if not call.shapes:  # an early trace: the bucket cannot be divided
        return [Parameter("+".join(call.parameters) or "?", (call.numel,), call.dtype)]
    return [
        Parameter(name, shape, call.dtype)
        for name, shape in zip(call.parameters, call.shapes, strict=True)
    ]


def ddp_buckets(backward: Backward, cap_mib: float | None) -> list[Bucket]:
    """Return the buckets that DDP makes after its first step, in the order of their hooks.

    Gradients of one dtype fill a bucket in order of readiness until it holds at least the cap;
    the one that fills it is still its own. Source: ``compute_bucket_assignment_by_size`` of
    torch 2.13, against which a test compares.

    Parameters
    ----------
    backward : Backward
        The gradients.
    cap_mib : float or None
        ``bucket_cap_mb`` (which are MiB); None for torch's default, in which the first bucket of
        each dtype ends at 1 MiB.
    """
    return [
        Bucket(
            shapes=tuple(backward.parameters[i].shape for i in members),
            nbytes=sum(backward.parameters[i].nbytes for i in members),
            itemsize=_itemsize(backward.parameters[members[0]]),
            ready_seconds=backward.ready_seconds[members[-1]],
        )
        for members in assign(backward.parameters, cap_mib)
    ]


def assign(parameters: Sequence[Parameter], cap_mib: float | None) -> list[list[int]]:
    """Return the positions of the members of each bucket, buckets in order of their last member."""
    cap = int((DEFAULT_CAP_MIB if cap_mib is None else cap_mib) * MIB)
    open_buckets: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    limits: dict[str, int] = {}
    made: list[list[int]] = []
    for position, parameter in enumerate(parameters):
        dtype = parameter.dtype
        open_buckets.setdefault(dtype, []).append(position)
        sizes[dtype] = sizes.get(dtype, 0) + parameter.nbytes
        if sizes[dtype] >= limits.get(dtype, cap if cap_mib is not None else FIRST_BUCKET_NBYTES):
            made.append(open_buckets.pop(dtype))
            sizes[dtype] = 0
            limits[dtype] = cap
    return sorted([*made, *open_buckets.values()], key=lambda members: members[-1])


def _itemsize(parameter: Parameter) -> int:
    return parameter.nbytes // parameter.numel if parameter.numel else 4
