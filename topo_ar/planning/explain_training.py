"""The plan of a training step, and the memory of a replica, as text for a person."""

import math
import textwrap
from collections.abc import Iterable

from topo_ar.planning.joint_reasons import cap_name
from topo_ar.planning.memory import Memory
from topo_ar.planning.training_plan import BucketPlan, CodecVerdict, TrainingPlan
from topo_ar.units import format_rate, format_seconds, format_size

_WIDTH = 100
_MAX_BUCKETS = 6


def explain_training(plan: TrainingPlan) -> str:
    """Return several lines: the step, the choice, buckets, caps, codecs, the reason."""
    count = f"{plan.num_nodes} node" + ("s" if plan.num_nodes > 1 else "")
    lines = [
        f"Training step on {plan.world_size} ranks of {count}: {plan.num_parameters:,} parameters, "
        f"{_size(plan.gradient_nbytes)} of gradients"
    ]
    hidden = format_seconds(plan.backward_seconds)
    facts = [
        ("backward", f"{hidden}. {plan.backward_source}"),
        ("bucket cap", f"{cap_name(plan.bucket_cap_mib)}: {len(plan.buckets)} buckets"),
        ("algorithms", f'plan="{plan.mode}"'),
        ("policy", plan.policy),
        (
            "exposed",
            f"{format_seconds(plan.exposed_seconds)} of "
            f"{format_seconds(plan.communication_seconds)} of communication",
        ),
    ]
    lines += [f"  {name:<11} {text}" for name, text in facts]
    lines += ["", *_buckets(plan.buckets), "", *_caps(plan)]
    if plan.codecs:
        lines += ["", *_codecs(plan.codecs)]
    lines += ["", *_wrapped(plan.reason)]
    lines += [line for note in plan.notes for line in _wrapped(f"Note: {note}")]
    return "\n".join(lines)


def explain_memory(memory: Memory, optimizer: str) -> str:
    """Return several lines: bytes by what they are for, the sum, and the way out if any."""
    rows = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        (f"optimizer ({optimizer})", memory.optimizer),
        ("DDP's buckets", memory.buckets),
        ("staging", memory.staging),
        ("residuals", memory.residuals),
        ("sum", memory.nbytes),
    ]
    lines = ["Memory of one rank"]
    lines += [f"  {name:<28} {_size(nbytes):>12}" for name, nbytes in rows]
    if memory.device_nbytes is not None:
        device = _size(memory.device_nbytes)
        verdict = "fits" if memory.fits else "does NOT fit"
        lines += _wrapped(f"A replica {verdict} a device of {device}.")
    if memory.hsdp is not None:
        h = memory.hsdp
        lines += _wrapped(
            f"HSDP: shard over {h.shard_size} ranks inside each node, {h.num_replicas} replicas: "
            f"{_size(h.nbytes)} a rank. Communication of a step, before overlap: "
            f"{format_seconds(h.seconds)} ({format_seconds(h.gather_seconds)} to gather parameters "
            f"twice and {format_seconds(h.scatter_seconds)} to reduce-scatter gradients inside "
            f"nodes, {format_seconds(h.reduce_seconds)} to all-reduce the shards)."
        )
    lines += [line for note in memory.notes for line in _wrapped(f"Note: {note}")]
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    return format_size(nbytes, like=1)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _buckets(buckets: tuple[BucketPlan, ...]) -> Iterable[str]:
    yield (
        f"  {'bucket':>6} {'size':>10} {'ready':>10} {'done':>10} {'alone':>10} "
        f"{'algorithm':<24} {'chunks':>6} codec"
    )
    numbered = list(enumerate(buckets))
    half = _MAX_BUCKETS // 2
    left_out = len(buckets) - _MAX_BUCKETS
    for number, bucket in numbered if left_out <= 0 else [*numbered[:half], *numbered[-half:]]:
        if left_out > 0 and number == len(buckets) - half:
            yield f"  {'...':>6} {left_out} more"
        yield (
            f"  {number:>6} {_size(bucket.nbytes):>10} "
            f"{format_seconds(bucket.ready_seconds):>10} {format_seconds(bucket.done_seconds):>10} "
            f"{format_seconds(bucket.seconds):>10} {bucket.family:<24} {bucket.num_chunks:>6} "
            f"{bucket.codec}"
        )


def _caps(plan: TrainingPlan) -> Iterable[str]:
    yield f"  {'bucket cap':<24} {'buckets':>7} {'exposed, exact':>15}"
    for cap in plan.caps:
        mark = "*" if cap.bucket_cap_mib == plan.bucket_cap_mib else " "
        yield (
            f"{mark} {cap_name(cap.bucket_cap_mib):<24} {cap.num_buckets:>7} "
            f'{format_seconds(cap.exposed_seconds):>15}  plan="{cap.mode}"'
        )


def _codecs(codecs: tuple[CodecVerdict, ...]) -> Iterable[str]:
    yield (
        f"  {'codec':<14} {'rho':>7} {'error <=':>8} {'rounds':>6} {'exposed':>10}  "
        "pays below (NICs of a node: overlapped / in sequence)"
    )
    for verdict in codecs:
        exposed = verdict.exposed_seconds
        shown = "-" if exposed is None else format_seconds(exposed)
        rates = [_rate(verdict.overlapped_break_even), _rate(verdict.sequential_break_even)]
        yield (
            f"  {verdict.codec:<14} {verdict.ratio:>7.4f} {verdict.relative_error:>8.2g} "
            f"{verdict.rounds:>6} {shown:>10}  {' / '.join(rates)}"
        )


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "never"
    return "always" if math.isinf(bytes_per_s) else format_rate(bytes_per_s)
