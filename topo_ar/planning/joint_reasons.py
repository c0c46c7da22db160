"""Why a training plan is what it is, in sentences a person can check."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from topo_ar.planning.codec_costs import CodecCosts
from topo_ar.planning.codecs import NONE
from topo_ar.planning.occupancy import STAGED
from topo_ar.planning.policy import Policy
from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.units import format_rate, format_seconds


def with_reason(plan: TrainingPlan, worth: float, risks: Sequence[str] = ()) -> TrainingPlan:
    """Return `plan` with its reason; a change had to save `worth` of a step's backward and wait.

    `risks` says why codecs were left out that the policy's bound allows.
    """
    if plan.world_size == 1:
        return msgspec.structs.replace(
            plan, reason="There is one rank: nothing has to be communicated."
        )
    sentences = [
        _exposed(plan),
        _cap(plan, worth),
        _algorithm(plan),
        _codec(plan, worth),
        f"Left out: {'; '.join(risks)}." if risks and plan.num_nodes > 1 else "",
        _floor(plan),
    ]
    return msgspec.structs.replace(plan, reason=" ".join(filter(None, sentences)))


def notes(costs: CodecCosts, policy: Policy, num_nodes: int) -> tuple[str, ...]:
    """Return what a reader must know of the figures behind the codecs."""
    if num_nodes < 2 or not policy.allowed:
        return ()
    assumed = [codec for codec in map(str, policy.allowed) if codec not in costs.measured]
    text = f"Codec costs are {costs.source}"
    if costs.measured and assumed:
        text += f", those of {', '.join(assumed)} assumed"
    return (f"{text}.",)


def cap_name(cap_mib: float | None) -> str:
    """Return a bucket cap as a person calls it."""
    return "torch's default of 25 MiB" if cap_mib is None else f"{cap_mib:g} MiB"


def _exposed(plan: TrainingPlan) -> str:
    total = format_seconds(plan.communication_seconds)
    if not plan.backward_seconds:
        return f"Nothing is hidden, backward taking no time: {total} of communication are exposed."
    hidden = 1 - plan.exposed_seconds / plan.communication_seconds
    return (
        f"Of {total} of communication {format_seconds(plan.exposed_seconds)} stay exposed behind "
        f"{format_seconds(plan.backward_seconds)} of backward ({max(0, hidden):.1%} hidden)."
    )


def _cap(plan: TrainingPlan, worth: float) -> str:
    if plan.bucket_cap_mib == plan.reference_cap_mib:
        other = min(plan.caps, key=lambda cap: cap.exposed_seconds)
        gain = plan.exact_exposed_seconds - other.exposed_seconds
        if other.bucket_cap_mib == plan.bucket_cap_mib or gain <= 0:
            return f"Keep the bucket cap, {cap_name(plan.bucket_cap_mib)}: no other exposes less."
        return (
            f"Keep the bucket cap, {cap_name(plan.bucket_cap_mib)}: the best other, "
            f"{cap_name(other.bucket_cap_mib)}, would save {format_seconds(gain)} of exact "
            f"communication, less than {worth:.0%} of backward and what is exposed."
        )
    return (
        f"Set the bucket cap to {cap_name(plan.bucket_cap_mib)}: exact, "
        f"{cap_name(plan.reference_cap_mib)} exposes "
        f"{format_seconds(plan.reference_exposed_seconds)}."
    )


def _algorithm(plan: TrainingPlan) -> str:
    counts = Counter(bucket.family for bucket in plan.buckets)
    used = ", ".join(f"{family} for {count}" for family, count in counts.most_common())
    used += f" of {len(plan.buckets)} buckets"
    if counts.keys().isdisjoint(STAGED):
        why = (
            "on one node there is no wire to spare"
            if plan.num_nodes == 1
            else "no hierarchy is faster for these sizes here"
        )
        return f"Stay flat ({used}): {why}."
    text = f"Algorithms: {used}"
    flat_seconds, exact = plan.flat_exposed_seconds, plan.exact_exposed_seconds
    if exact < flat_seconds:
        text += (
            f"; exact, the flat ring in {cap_name(plan.reference_cap_mib)} exposes "
            f"{format_seconds(flat_seconds)}, this {format_seconds(exact)}"
        )
    return text + "."


def _codec(plan: TrainingPlan, worth: float) -> str:
    if plan.num_nodes < 2:
        return "Do not compress: there is no wire between nodes."
    coded = Counter(bucket.codec for bucket in plan.buckets if bucket.codec != str(NONE))
    if coded:
        codec, count = coded.most_common(1)[0]
        text = (
            f"Compress with {codec} between nodes, {count} of {len(plan.buckets)} buckets: exact, "
            f"{format_seconds(plan.exact_exposed_seconds)} would be exposed."
        )
        if count < len(plan.buckets):
            text += " The other buckets are hidden anyway, or it does not make them smaller."
        return text
    if plan.policy == "exact":
        return "Nothing is compressed, as the policy is exact."
    tried = [verdict for verdict in plan.codecs if verdict.exposed_seconds is not None]
    if not tried:
        return "Do not compress: the policy leaves no codec."
    best = min(tried, key=lambda verdict: verdict.exposed_seconds or 0)
    seconds = best.exposed_seconds or 0
    text = f"Do not compress: the best codec, {best.codec}, would expose {format_seconds(seconds)}"
    if seconds < plan.exact_exposed_seconds:
        text += (
            f" in place of {format_seconds(plan.exact_exposed_seconds)}, a gain of less than "
            f"{worth:.0%} of backward and what is exposed"
        )
    else:
        text += f", an exact sum {format_seconds(plan.exact_exposed_seconds)}"
    pays = best.overlapped_break_even
    if pays is not None and pays != float("inf"):
        text += f"; it begins to pay where a node's NICs carry less than {format_rate(pays)}"
    return text + "."


def _floor(plan: TrainingPlan) -> str:
    floor = plan.floor_ratio
    if floor is None:
        return ""
    if floor >= 1:
        return (
            f"The floor rho* is {floor:.3g}: the ports inside the nodes are the limit, so that no "
            "ratio helps a pipelined all-reduce."
        )
    return (
        f"The floor rho* is {floor:.3g}: below that ratio the ports inside the nodes are the "
        "limit, and smaller brings nothing."
    )
