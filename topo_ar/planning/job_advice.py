"""What would make a job's steps shorter, from what was seen of it: suggestions with their gains.

A step is what it computes and what it waits: for the last rank, and for its gradients after the
last of them was handed over. Computing is taken to stay as it is; what an alternative would expose
comes from `plan_training`, for the plain ring scaled by how well it predicts what the job exposes.
"""

from collections.abc import Sequence
from statistics import median

import msgspec

from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.units import format_rate, format_seconds

SCHEMA_VERSION = 1
# Assumed: by what share predicted exposed times may be off, which the intervals show.
_MODEL_ERROR = 0.25
_WORTH = 1.03
_OFTEN = 0.6
_FASTER_NIC = 1.3
_ACCUMULATED = 4


class Interface(msgspec.Struct, frozen=True):
    """A NIC of rank 0's host: what it carries in bytes/s, and whether the job uses it."""

    name: str
    rate: float
    used: bool


class Observed(msgspec.Struct, frozen=True):
    """What was seen of a job's steps; a row a rank, a figure a step, in seconds.

    Attributes
    ----------
    step_seconds : list of list of float
        From the first bucket of a step to that of the next.
    first_seconds : list of list of float
        From a rank's first bucket to its average: the last rank waits for nobody.
    exposed_seconds : list of list of float
        From the last bucket's call to the last average.
    cap_mib : float or None
        DDP's bucket cap; None for torch's default.
    interfaces : list of Interface
        Of rank 0's host.
    cautions : list of str
        What keeps its times from being those of the job alone.
    """

    step_seconds: list[list[float]]
    first_seconds: list[list[float]]
    exposed_seconds: list[list[float]]
    cap_mib: float | None
    interfaces: list[Interface] = []
    cautions: list[str] = []


class Suggestion(msgspec.Struct, frozen=True):
    """A change and what it would gain.

    Attributes
    ----------
    kind : str
        ``interface``, ``late_rank``, ``bucket_cap``, ``plan``, ``bf16``, ``codec``,
        ``accumulation`` or ``larger_batch``.
    gain, low, high : float
        How many times as fast a step would be (a sample, for the last two), and where it may lie.
    why : str
        A sentence.
    line : str
        What to paste.
    value : str
        What the line sets.
    """

    kind: str
    gain: float
    low: float
    high: float
    why: str
    line: str
    value: str = ""


class Advice(msgspec.Struct, frozen=True):
    """What was seen, and suggestions in order of their gains; none for a job that computes.

    Gains take a core for each rank for granted, and communication not to slow down computation;
    `cautions` say where that is not so.
    """

    world_size: int
    num_nodes: int
    steps: int
    step_seconds: float
    exposed_seconds: float
    waiting_seconds: float
    predicted_exposed_seconds: float
    suggestions: list[Suggestion]
    verdict: str
    cautions: list[str] = []
    schema: int = SCHEMA_VERSION


def advise(observed: Observed, flat: TrainingPlan, planned: TrainingPlan) -> Advice:
    """Return what would make the steps shorter.

    Parameters
    ----------
    observed : Observed
        At least one step.
    flat : TrainingPlan
        Of the plain ring: the cap in use against all others.
    planned : TrainingPlan
        Of all algorithms, under a policy that allows codecs.
    """
    step = median(map(_mean, zip(*observed.step_seconds, strict=True)))
    exposed = median(map(min, zip(*observed.exposed_seconds, strict=True)))
    exposed = min(exposed, step)
    late, waiting = _late_rank(observed.first_seconds)
    base = _Base(step, exposed, waiting, flat.reference_exposed_seconds)
    found = [
        *_interface(observed, base),
        *_cap(observed, base, flat),
        *_plans(base, planned),
        *_bigger_steps(base),
    ]
    if late is not None and waiting > 0:
        gain = step / max(step - waiting, 1e-9)
        found.append(
            Suggestion(
                "late_rank",
                gain,
                1.0,
                gain,
                f"rank {late} is last in most steps; the others wait {format_seconds(waiting)}",
                "topo-ar doctor  # on that rank's host",
                str(late),
            )
        )
    worth = [each for each in found if each.gain >= _WORTH]
    worth.sort(key=lambda each: -each.gain)
    return Advice(
        world_size=planned.world_size,
        num_nodes=planned.num_nodes,
        steps=len(observed.step_seconds[0]),
        step_seconds=step,
        exposed_seconds=exposed,
        waiting_seconds=waiting,
        predicted_exposed_seconds=flat.reference_exposed_seconds,
        suggestions=worth,
        verdict=_verdict(worth, step, exposed),
        cautions=observed.cautions,
    )


class _Base:
    """The step as it is, and what becomes of it when something else is exposed."""

    def __init__(self, step: float, exposed: float, waiting: float, predicted: float) -> None:
        self.step, self.exposed = step, exposed
        self.compute = max(step - exposed, 1e-9)
        # Below a tenth of a step the model's share of what is seen says little.
        known = exposed > 0.1 * step and predicted > 0
        self.scale = exposed / predicted if known else 1.0

    def suggestion(
        self, kind: str, seconds: float, why: str, line: str, value: str, error: float
    ) -> Suggestion:
        """Return what exposing `seconds` instead would gain, `error` of them being uncertain.

        What is hidden behind backward may come out too: a part of what is exposed now is the least
        that may be left.
        """
        least, most = seconds * (1 - error), seconds * (1 + error) + error * 0.2 * self.exposed
        gain, low, high = (self.step / (self.compute + each) for each in (seconds, most, least))
        return Suggestion(kind, gain, low, high, why, line, value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _late_rank(first: Sequence[Sequence[float]]) -> tuple[int | None, float]:
    """Return the rank that is last in most steps, if one is, and how long the others wait for it.

    All ranks have the first average at about the same time: who has waited least for it came last.
    That needs no clocks that agree.
    """
    steps = [*zip(*first, strict=True)]
    last = [min(range(len(row)), key=row.__getitem__) for row in steps]
    usual = max(set(last), key=last.count)
    waiting = median(_mean(row) - min(row) for row in steps)
    if len(first) < 2 or last.count(usual) < _OFTEN * len(steps):
        return None, waiting
    return usual, waiting


def _interface(observed: Observed, base: _Base) -> list[Suggestion]:
    used = [each for each in observed.interfaces if each.used]
    idle = [each for each in observed.interfaces if not each.used]
    if not used or not idle:
        return []
    best, now = max(idle, key=lambda each: each.rate), max(each.rate for each in used)
    if best.rate < _FASTER_NIC * now:
        return []
    names = f"GLOO_SOCKET_IFNAME={best.name} NCCL_SOCKET_IFNAME={best.name}"
    return [
        base.suggestion(
            "interface",
            base.exposed * now / best.rate,
            f"the job uses {', '.join(each.name for each in used)} with {format_rate(now)}; "
            f"{best.name} carries {format_rate(best.rate)}",
            f"export {names}",
            best.name,
            _MODEL_ERROR,
        )
    ]


def _cap(observed: Observed, base: _Base, flat: TrainingPlan) -> list[Suggestion]:
    best = min(flat.caps, key=lambda cap: cap.exposed_seconds)
    if best.bucket_cap_mib is None or best.bucket_cap_mib == observed.cap_mib:
        return []
    cap = f"{best.bucket_cap_mib:g}"
    return [
        base.suggestion(
            "bucket_cap",
            best.exposed_seconds * base.scale,
            f"smaller or larger buckets begin at another time: {best.num_buckets} of {cap} MiB",
            f"DistributedDataParallel(..., bucket_cap_mb={cap})",
            cap,
            _MODEL_ERROR,
        )
    ]


def _plans(base: _Base, planned: TrainingPlan) -> list[Suggestion]:
    found = [
        base.suggestion(
            "plan",
            planned.exact_exposed_seconds,
            "the planned all-reduce is exact and crosses the slow link once",
            "topo-ar run ...  # in place of python, or topo_ar.attach(model)",
            "",
            _MODEL_ERROR,
        )
    ]
    tried = [each for each in planned.codecs if each.exposed_seconds is not None]
    halves = [each for each in tried if each.codec == "bf16"]
    others = [each for each in tried if each.codec not in ("bf16", "fp16")]
    for kind, verdicts in (("bf16", halves), ("codec", others)):
        if not verdicts:
            continue
        best = min(verdicts, key=lambda each: each.exposed_seconds or 0.0)
        found.append(
            base.suggestion(
                kind,
                best.exposed_seconds or 0.0,
                f"{best.codec} sends {best.ratio:.2g} of the bytes between nodes, with error "
                f"feedback; one encoding errs by {best.relative_error:.2g} at most",
                f"topo-ar run --compression {best.codec} ...  # watch the loss",
                best.codec,
                _MODEL_ERROR,
            )
        )
    return found


def _bigger_steps(base: _Base) -> list[Suggestion]:
    """Return what fewer, larger steps gain for a sample: what is exposed is exposed less often."""
    found = []
    for kind, times, why, line in (
        (
            "accumulation",
            _ACCUMULATED,
            f"{_ACCUMULATED} batches share one all-reduce; the batch of a step grows with it",
            "with model.no_sync(): ...  # in all but the last of "
            f"{_ACCUMULATED} batches; scale the loss and look at the learning rate",
        ),
        (
            "larger_batch",
            2,
            "a batch twice as large, if it takes twice as long and memory allows; less if not",
            "--batch-size twice what it is  # look at the learning rate",
        ),
    ):
        each = base.suggestion(kind, base.exposed / times, why, line, str(times), _MODEL_ERROR)
        found.append(each)
    return found


def _verdict(worth: Sequence[Suggestion], step: float, exposed: float) -> str:
    share = f"{exposed / step:.0%} of a step of {format_seconds(step)} is exposed communication"
    if worth:
        return f"{share}."
    return f"Your job is compute-bound: change nothing. {share}."
