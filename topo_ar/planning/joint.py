"""The joint choice for a training step: bucket cap, algorithm, chunks and codec of every bucket.

What counts is not the time of an all-reduce but the communication that is left when backward is
over. Every cap is tried with every mode of a communicator, exact and with every codec that the
policy allows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from topo_ar.errors import PlanError
from topo_ar.planning import joint_reasons
from topo_ar.planning.buckets import Backward, Bucket, ddp_buckets, uniform_backward
from topo_ar.planning.calibration import Calibration
from topo_ar.planning.candidates import Setting
from topo_ar.planning.codec_costs import (
    CodecCosts,
    costs_of,
    overlapped_break_even,
    sequential_break_even,
)
from topo_ar.planning.codecs import NONE, Codec
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.nccl_search import NcclMachine
from topo_ar.planning.occupancy import MODES, Pricing
from topo_ar.planning.overlap import Job, exposed_seconds, finish
from topo_ar.planning.parameters import Parameter, total_numel
from topo_ar.planning.plan import Family
from topo_ar.planning.policy import Policy, parse_policy
from topo_ar.planning.runtime import CPU_RUNTIME, Runtime
from topo_ar.planning.training_plan import BucketPlan, CapChoice, CodecVerdict, TrainingPlan
from topo_ar.topology.levels import Levels

CAPS_MIB: tuple[float | None, ...] = (None, 1, 2, 4, 8, 16, 32, 64, 128, 256)

# A change must save this part of backward and exposed communication together.
_WORTH = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """One point of the search and what it exposes."""

    cap_mib: float | None
    mode: str
    codec: Codec
    buckets: tuple[Bucket, ...]
    codecs: tuple[Codec, ...]
    exposed: float


def balanced_backward(
    levels: Levels,
    parameters: Sequence[Parameter],
    *,
    runtime: Runtime = CPU_RUNTIME,
    families: Collection[Family] | None = None,
    cap_mib: float | None = None,
    nccl: NcclMachine | None = None,
) -> Backward:
    """Return a backward through `parameters` that takes as long as their exact communication.

    It stands for one of unknown length: a longer one hides everything but the last bucket, a
    shorter one hides little, and in between the bucket cap matters most. The same on every rank.

    Raises
    ------
    ConfigError
        If there are no parameters.
    PlanError
        If the levels contradict themselves.
    """
    pricing = _pricing(levels, runtime, None, None, families, nccl)
    backward = uniform_backward(parameters, 0.0)
    buckets = ddp_buckets(backward, cap_mib)
    seconds = sum(pricing.candidate(bucket.nbytes, MODES[0]).seconds for bucket in buckets)
    source = "Backward is assumed to take as long as the exact communication."
    backward = uniform_backward(parameters, seconds)
    return replace(backward, source=f"{source} {backward.source}")


def plan_training(
    levels: Levels,
    backward: Backward,
    *,
    policy: Policy | None = None,
    topology_hash: str = "",
    runtime: Runtime = CPU_RUNTIME,
    calibration: Calibration | None = None,
    costs: CodecCosts | None = None,
    families: Collection[Family] | None = None,
    caps_mib: Sequence[float | None] = CAPS_MIB,
    reference_cap_mib: float | None = None,
    modes: Sequence[str] = MODES,
    nccl: NcclMachine | None = None,
) -> TrainingPlan:
    """Return the plan that exposes least communication.

    A pure function: equal arguments give equal JSON on every rank. A setting that is not simpler
    than another must save 1 % of backward and exposed communication together. Simplest are the
    reference cap, the first mode and no codec; among codecs, the one with the smallest error.

    Parameters
    ----------
    levels : Levels
        The nodes with their ports.
    backward : Backward
        Gradients and their ready times.
    policy : Policy, optional
        The codecs that may be used; exact sums only when left out.
    topology_hash : str
        Kept in the plan.
    runtime : Runtime
        What will run the all-reduces.
    calibration : Calibration, optional
        Measured times of whole all-reduces.
    costs : CodecCosts, optional
        What codecs cost a rank; by default the starting values for `runtime`.
    families : collection of Family, optional
        What can be run; everything when left out.
    caps_mib : sequence of float or None
        Caps to try, in the unit of DDP's ``bucket_cap_mb``; None is torch's default.
    reference_cap_mib : float or None
        The cap that the job has without advice; it is tried too.
    modes : sequence of str
        Of `MODES`, those to try; the first is the one that the job has without advice.
    nccl : NcclMachine, optional
        Where NCCL runs the flat all-reduce: what it knows of the machine.

    Raises
    ------
    PlanError
        If the levels contradict themselves or no gradient has a byte.
    """
    if backward.nbytes == 0:
        raise PlanError("the gradients hold no bytes, so there is nothing to plan")
    policy = policy or parse_policy()
    pricing = _pricing(levels, runtime, calibration, costs, families, nccl)
    search = _Search(pricing, backward, reference_cap_mib, modes[0])
    caps = tuple(dict.fromkeys([reference_cap_mib, *caps_mib]))
    exact = search.choices(caps, modes, NONE)
    best_exact = search.simplest(exact)
    coded = {codec: search.simplest(search.choices(caps, modes, codec)) for codec in policy.allowed}
    by_error = sorted(coded.values(), key=lambda c: (c.codec.relative_error, str(c.codec)))
    least_exact = min(exact, key=lambda c: c.exposed)
    chosen = search.good_enough([best_exact, least_exact, *by_error])[0]
    if chosen.codec != NONE:
        chosen = search.fewest_coded(chosen)
    verdicts = _verdicts(pricing, backward, policy, coded)
    reference = exact[0]
    (flat,) = search.choices([reference_cap_mib], ["flat"], NONE)
    p = pricing.setting.parameters
    k1, k2 = pricing.slopes if p.num_nodes > 1 else (0.0, 0.0)
    buckets = _bucket_plans(pricing, chosen)
    best_of_cap = [
        min((c for c in exact if c.cap_mib == cap), key=lambda c: c.exposed) for cap in caps
    ]
    made = TrainingPlan(
        topology_hash=topology_hash,
        world_size=p.world_size,
        num_nodes=p.num_nodes,
        policy=policy.text,
        num_parameters=total_numel(backward.parameters),
        gradient_nbytes=backward.nbytes,
        backward_seconds=backward.seconds,
        backward_source=backward.source,
        bucket_cap_mib=chosen.cap_mib,
        mode=chosen.mode,
        buckets=buckets,
        communication_seconds=sum(bucket.seconds for bucket in buckets),
        exposed_seconds=chosen.exposed,
        exact_exposed_seconds=(best_exact if chosen.codec != NONE else chosen).exposed,
        reference_cap_mib=reference_cap_mib,
        reference_exposed_seconds=reference.exposed,
        flat_exposed_seconds=flat.exposed,
        floor_ratio=k1 / k2 if k2 else None,
        caps=tuple(CapChoice(c.cap_mib, len(c.buckets), c.mode, c.exposed) for c in best_of_cap),
        codecs=verdicts,
        reason="",
        notes=(*policy.warnings, *joint_reasons.notes(pricing.costs, policy, p.num_nodes)),
    )
    return joint_reasons.with_reason(made, _WORTH, policy.risks)


def _pricing(
    levels: Levels,
    runtime: Runtime,
    calibration: Calibration | None,
    costs: CodecCosts | None,
    families: Collection[Family] | None,
    nccl: NcclMachine | None,
) -> Pricing:
    parameters = CostParameters.from_levels(levels, runtime=runtime)
    return Pricing(
        Setting(parameters, runtime=runtime, calibration=calibration, families=families, nccl=nccl),
        costs or costs_of(runtime),
    )


class _Search:
    """Evaluates points of the search on one cluster and one backward."""

    def __init__(
        self,
        pricing: Pricing,
        backward: Backward,
        reference_cap_mib: float | None,
        reference_mode: str,
    ) -> None:
        self._pricing = pricing
        self._backward = backward
        self._reference_cap = reference_cap_mib
        self._reference_mode = reference_mode
        self._buckets: dict[float | None, tuple[Bucket, ...]] = {}

    def choices(
        self, caps_mib: Sequence[float | None], modes: Sequence[str], codec: Codec
    ) -> list[Choice]:
        """Return all choices with `codec` on every bucket that it makes smaller."""
        return [self._choice(cap, mode, codec) for cap in caps_mib for mode in modes]

    def _choice(self, cap_mib: float | None, mode: str, codec: Codec) -> Choice:
        if cap_mib not in self._buckets:
            self._buckets[cap_mib] = tuple(ddp_buckets(self._backward, cap_mib))
        buckets = self._buckets[cap_mib]
        codecs = tuple(
            codec if codec != NONE and self._pricing.suits(bucket, mode, codec) else NONE
            for bucket in buckets
        )
        return self._evaluated(cap_mib, mode, codec, buckets, codecs)

    def _evaluated(
        self,
        cap_mib: float | None,
        mode: str,
        codec: Codec,
        buckets: tuple[Bucket, ...],
        codecs: tuple[Codec, ...],
    ) -> Choice:
        exposed = exposed_seconds(
            jobs(self._pricing, buckets, mode, codecs), self._backward.seconds
        )
        return Choice(cap_mib, mode, codec, buckets, codecs, exposed)

    def good_enough(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return those that are about as good as the best, in the order given."""
        best = min(choice.exposed for choice in choices)
        limit = best + _WORTH * (self._backward.seconds + best)
        return [choice for choice in choices if choice.exposed <= limit]

    def simplest(self, choices: Sequence[Choice]) -> Choice:
        """Return the one that changes least of those that are about as good as the best."""
        return min(
            self.good_enough(choices),
            key=lambda c: (
                (c.cap_mib != self._reference_cap) + (c.mode != self._reference_mode),
                c.exposed,
            ),
        )

    def fewest_coded(self, choice: Choice) -> Choice:
        """Leave as many early buckets exact as cost nothing: backward hides them anyway."""
        low, high, best = 0, len(choice.buckets), choice
        while low < high:
            exact = (low + high + 1) // 2
            codecs = (NONE,) * exact + choice.codecs[exact:]
            tried = self._evaluated(
                choice.cap_mib, choice.mode, choice.codec, choice.buckets, codecs
            )
            if tried.exposed <= choice.exposed:
                low, best = exact, tried
            else:
                high = exact - 1
        return best


def jobs(
    pricing: Pricing, buckets: Sequence[Bucket], mode: str, codecs: Sequence[Codec]
) -> list[Job]:
    """Return what each bucket occupies."""
    return [pricing.job(bucket, mode, codec) for bucket, codec in zip(buckets, codecs, strict=True)]


def _bucket_plans(pricing: Pricing, choice: Choice) -> tuple[BucketPlan, ...]:
    made = jobs(pricing, choice.buckets, choice.mode, choice.codecs)
    plans = []
    for bucket, codec, job, done in zip(
        choice.buckets, choice.codecs, made, finish(made), strict=True
    ):
        candidate = pricing.candidate(bucket.nbytes, choice.mode)
        (alone,) = finish([job])
        plans.append(
            BucketPlan(
                nbytes=bucket.nbytes,
                ready_seconds=bucket.ready_seconds,
                done_seconds=done,
                seconds=alone - bucket.ready_seconds,
                family=candidate.family,
                num_chunks=len(job.chunks) if not job.alone else len(candidate.chunk_nbytes),
                codec=str(codec),
            )
        )
    return tuple(plans)


def _verdicts(
    pricing: Pricing, backward: Backward, policy: Policy, coded: dict[Codec, Choice]
) -> tuple[CodecVerdict, ...]:
    p = pricing.setting.parameters
    if p.num_nodes < 2:
        return ()
    shapes = [parameter.shape for parameter in backward.parameters]
    itemsize = round(backward.nbytes / total_numel(backward.parameters))
    found = []
    for codec, excluded in [*((codec, "") for codec in policy.allowed), *policy.excluded]:
        ratio = codec.ratio(shapes, p.num_nodes, itemsize)
        slope = pricing.costs.per_byte(codec) / pricing.sharing
        choice = coded.get(codec)
        found.append(
            CodecVerdict(
                codec=str(codec),
                ratio=ratio,
                relative_error=codec.relative_error,
                rounds=len(codec.messages(shapes, p.num_nodes, itemsize)),
                linear=codec.linear,
                slope=slope,
                overlapped_break_even=overlapped_break_even(
                    slope, pricing.slopes[0], ratio, p.num_nodes
                ),
                sequential_break_even=sequential_break_even(slope, ratio, p.num_nodes),
                exposed_seconds=choice.exposed if choice else None,
                excluded=excluded,
            )
        )
    return tuple(found)
