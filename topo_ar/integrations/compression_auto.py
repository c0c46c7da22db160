"""``compression="auto"``: what the planner says, tried against what else it may do, and kept."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from topo_ar.compression.protocol import Compressor
from topo_ar.compression.registry import make
from topo_ar.errors import ExecutionError, TopoError
from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.compressed import CompressedReduction
from topo_ar.integrations.compression_trial import Choice, Trial
from topo_ar.planning.codecs import NONE, Codec, parse_codec
from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.telemetry.bucket_trace import BucketTrace

# DDP rebuilds its buckets after the first step, or the second: the planner looks at those after.
_AFTER_STEPS = 4
# Of the codecs that the planner does not choose: those that send least, one of a kind.
_MOST_OTHERS = 2


@dataclass(frozen=True, slots=True)
class Decision:
    """What the planner says: codecs by parameter, and why; parameters not named stay exact.

    `others` are codecs to be tried against that, on all parameters.
    """

    codecs: Mapping[str, str]
    reason: str
    others: tuple[str, ...] = ()


class Auto:
    """Chooses the codecs of a compression: once, some steps after the first.

    The planner knows the wire, but not how a machine shares its cores between training and
    codecs; so its choice, exact sums and the codecs that send least take turns for some steps,
    and the fastest stays. All of them are within the policy.

    Parameters
    ----------
    compression : CompressedReduction
        Whose codecs it chooses.
    decide : callable
        Asks the planner; called on all ranks for the same answer.

    Attributes
    ----------
    undecided, trying : bool
        Whether the planner is still to be asked; whether choices are being tried.
    decided : callable
        Called when the planner has said which codecs there will be.
    """

    def __init__(self, compression: CompressedReduction, decide: Callable[[], Decision]) -> None:
        self.decided: Callable[[], None] = lambda: None
        self.undecided = True
        self._compression = compression
        self._decide = decide
        self._trial: Trial | None = None
        self._compressors: dict[Codec, Compressor] = {}
        self._current: Choice | None = None

    @property
    def trying(self) -> bool:
        """Whether choices take turns."""
        return self._trial is not None

    @property
    def done(self) -> bool:
        """Whether the choice is final."""
        return not (self.undecided or self.trying)

    def begin(self, num_steps: int) -> None:
        """Take note of a step that begins, the `num_steps`-th; nothing is in flight."""
        if self.undecided and num_steps > _AFTER_STEPS:
            self.undecided = False
            self._ask()
        if self._trial is not None:
            self._try_on(self._trial)

    def _ask(self) -> None:
        compression, decision = self._compression, self._decide()
        self._give_reason(decision.reason)
        choices = [
            Choice(parse_codec(codec), frozenset(decision.codecs))
            for codec in sorted(set(decision.codecs.values()))
        ]
        choices.append(Choice(NONE, frozenset()))
        names = frozenset(compression.parameters)
        choices += [Choice(parse_codec(codec), names) for codec in decision.others]
        coded = [choice for choice in choices if choice.codec != NONE]
        if coded:
            self._take(coded[0])
            self.decided()
            self._trial = Trial(choices)

    def _try_on(self, trial: Trial) -> None:
        choice = trial.next_choice(time.monotonic())
        if choice is not None:
            self._take(choice)
            return
        self._trial = None
        choice, why = trial.winner(self._compression.communicator)
        self._give_reason(f"{self._compression.reason} {why}")
        self._take(choice)
        self._compressors.clear()
        if choice.codec == NONE:
            self._compression.flush()

    def _take(self, choice: Choice) -> None:
        if choice == self._current:
            return
        self._current = choice
        codec, names = choice.codec, choice.names
        if codec == NONE:
            self._compression.pause()
            return
        compressor = self._compressors.setdefault(codec, make(codec))
        self._compression.change(codec, lambda name: codec if name in names else NONE, compressor)

    def _give_reason(self, reason: str) -> None:
        self._compression.reason = reason
        self._compression.say(reason)


def decide(
    communicator: Communicator, trace: BucketTrace, plan: Callable[[], TrainingPlan]
) -> Decision:
    """Return what the planner says on rank 0; collective, while nothing is in flight.

    Measured times differ from rank to rank, so rank 0 asks the planner and all others hear it.

    Parameters
    ----------
    communicator : Communicator
        Over the ranks that decide.
    trace : BucketTrace
        The last steps, whose last one is whole.
    plan : callable
        Plans for that trace, with the buckets as they are.

    Raises
    ------
    ExecutionError
        If rank 0 cannot be heard.
    """
    answer = b""
    if communicator.rank == 0:
        try:
            answer = msgspec.json.encode(_decision(trace, plan()))
        except TopoError as error:
            answer = msgspec.json.encode(Decision({}, f"nothing is compressed: {error}"))
    said = communicator.gather(answer)[0]
    try:
        return msgspec.json.decode(said, type=Decision)
    except msgspec.DecodeError as error:
        raise ExecutionError(
            f"what rank 0 says of compression is unreadable: {error}", ranks=(0,)
        ) from None


def _decision(trace: BucketTrace, plan: TrainingPlan) -> Decision:
    calls = trace.steps[-1].buckets
    codecs = {
        name: bucket.codec
        for call, bucket in zip(calls, plan.buckets, strict=False)
        for name in call.parameters
        if bucket.codec != str(NONE)
    }
    tried = [v for v in plan.codecs if v.exposed_seconds is not None and v.ratio < 1]
    fewest = sorted(tried, key=lambda verdict: verdict.ratio)
    chosen = dict.fromkeys(codecs.values())
    best_of_kind = {parse_codec(v.codec).name: v.codec for v in reversed(fewest)}
    others = [v.codec for v in fewest if v.codec in best_of_kind.values() and v.codec not in chosen]
    # A bucket that is hidden behind backward still takes time of the cores that compute it.
    everywhere = [] if len(codecs) == sum(len(c.parameters) for c in calls) else [*chosen]
    return Decision(codecs, plan.reason, (*everywhere, *others[:_MOST_OTHERS]))
