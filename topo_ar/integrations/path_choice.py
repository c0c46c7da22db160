"""Never slower than plain DDP: planned all-reduce has to prove itself in the job that it serves.

Both paths are exact: only the time of a step and the order of summation depend on the choice.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from topo_ar.execution.communicator import Communicator
from topo_ar.execution.torch_private import GradBucket
from topo_ar.integrations.observer import Observer
from topo_ar.integrations.path_trial import LOOKS, ORDER, TURN_STEPS, Path, Verdict, judge
from topo_ar.integrations.turns import Turns
from topo_ar.planning.plan import Family, Plan
from topo_ar.telemetry.metrics import RatioInterval

logger = logging.getLogger("topo_ar")

UNDECIDED = "undecided"
_VERDICT_NUMEL = 6
# DDP rebuilds its buckets after the first step or the second, and the first steps are no measure.
_AFTER_STEPS = 4


class MayCompress(Protocol):
    """What reduces buckets in place of the communicator."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing is compressed now nor will be."""
        ...


@dataclass(frozen=True, slots=True)
class PathChoice:
    """How a job's exact steps are reduced; the same on all ranks.

    Attributes
    ----------
    path : str
        ``planned``, ``plain``, or ``undecided`` while both take turns or are yet to.
    reason : str
        Why, in a sentence.
    speedup : RatioInterval or None
        How many times faster planned steps were than plain ones, with the 95 % interval; None where
        they were not compared.
    steps : int
        How many steps were in the comparison.
    since_step : int or None
        The synchronised step from which on the choice holds, counted from 0; None if undecided.
    trials : int
        How often the paths were compared, or begun to be.
    """

    path: str
    reason: str
    speedup: RatioInterval | None = None
    steps: int = 0
    since_step: int | None = None
    trials: int = 0


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket as far as its plan depends on it."""

    index: int
    nbytes: int
    dtype: torch.dtype
    device: str
    dense: bool


class PathChooser(Observer):
    """Lets planned and plain steps take turns, and keeps to those that are faster.

    Begins when compression, if there is any, has come to nothing and the buckets have stayed the
    same for a step, and begins anew when they change.

    Parameters
    ----------
    communicator : Communicator
        Of the gradients.
    plan : str or Plan
        What it was made with: only ``auto`` leaves something to choose.
    compression : MayCompress, optional
        What may reduce the buckets otherwise.

    Attributes
    ----------
    plain : bool
        Whether the step at hand takes the plain path.
    choice : PathChoice
        What holds.
    """

    def __init__(
        self,
        communicator: Communicator,
        plan: str | Plan = "auto",
        compression: MayCompress | None = None,
    ) -> None:
        self.plain = False
        self._communicator = communicator
        self._compression = compression
        self._turns: Turns | None = None
        self._seen: list[_Bucket] = []
        self._buckets: tuple[_Bucket, ...] = ()
        only = _only_path(communicator, plan)
        self._chooses = only is None
        self.choice = only or PathChoice(UNDECIDED, "training has just begun")

    def called(self, bucket: GradBucket, tensor: torch.Tensor) -> None:
        """Take note of a bucket."""
        dense = tensor.layout is torch.strided
        nbytes = tensor.nbytes if dense else 0
        self._seen.append(_Bucket(bucket.index(), nbytes, tensor.dtype, tensor.device.type, dense))

    def begin(self, step: int) -> None:
        """Say how a step is reduced that is about to begin. Collective; nothing is in flight."""
        now = time.monotonic()
        buckets, self._seen = tuple(self._seen), []
        same, self._buckets = buckets == self._buckets, buckets
        if not self._chooses:
            return
        if self._compression is not None and not self._compression.is_exact:
            self._wait("gradients are compressed, or will be")
        elif not same:
            self._wait("the buckets are new")
        elif self._turns is not None:
            self._take_turns(self._turns, step, now)
        elif self.choice.path == UNDECIDED and step >= _AFTER_STEPS:
            self._start(step, now)

    def _wait(self, why: str) -> None:
        self.plain, self._turns = False, None
        self.choice = replace(self.choice, path=UNDECIDED, reason=why, since_step=None)

    def _start(self, step: int, now: float) -> None:
        if all(self._is_flat(bucket) for bucket in self._buckets):
            reason = "the plan is plain all-reduce for every bucket"
            self.choice = replace(self.choice, path=str(Path.PLAIN), reason=reason, since_step=step)
            return
        reason = "planned and plain steps take turns"
        self.choice = PathChoice(UNDECIDED, reason, trials=self.choice.trials + 1)
        self._turns = Turns(ORDER, TURN_STEPS)
        self.plain = self._turns.next(now) == Path.PLAIN

    def _is_flat(self, bucket: _Bucket) -> bool:
        if not bucket.dense or not bucket.nbytes:
            return True
        itemsize = bucket.dtype.to_real().itemsize
        plan = self._communicator.plan_for(bucket.nbytes, itemsize, bucket.device)
        return plan.family is Family.FLAT_RING

    def _take_turns(self, turns: Turns, step: int, now: float) -> None:
        self.plain = turns.next(now) == Path.PLAIN
        if not turns.turn_begins or turns.num_turns not in LOOKS:
            return
        verdict = self._look(turns)
        if verdict.path is None:
            self.choice = replace(
                self.choice, speedup=verdict.speedup, steps=turns.num_turns * TURN_STEPS
            )
        else:
            self._decide(verdict, verdict.path, step, turns.num_turns * TURN_STEPS)

    def _look(self, turns: Turns) -> Verdict:
        """Return what rank 0 says of the steps of all ranks: a library may be older elsewhere."""
        communicator = self._communicator
        planned, plain = (turns.seconds[path] for path in (Path.PLANNED, Path.PLAIN))
        mine = torch.tensor([*planned, *plain], dtype=torch.float64, device="cpu")
        rows = communicator.gather_rows(mine).wait().tolist()
        mine = torch.zeros(_VERDICT_NUMEL, dtype=torch.float64, device="cpu")
        if communicator.rank == 0:
            n = len(planned)
            last = turns.num_turns == LOOKS[-1]
            verdict = judge([row[:n] for row in rows], [row[n:] for row in rows], last=last)
            mine = torch.tensor(verdict.to_row(), dtype=torch.float64, device="cpu")
        return Verdict.from_row(communicator.gather_rows(mine).wait()[0].tolist())

    def _decide(self, verdict: Verdict, path: Path, step: int, steps: int) -> None:
        self._turns = None
        self.plain = path is Path.PLAIN
        found = verdict.speedup
        reason = (
            f"in {steps} steps in turns planned all-reduce made a step {found.ratio:.3f} "
            f"({found.low:.3f} - {found.high:.3f}) times as fast as plain"
        )
        self.choice = replace(
            self.choice,
            path=str(path),
            reason=reason,
            speedup=found,
            steps=steps,
            since_step=step,
        )
        if self._communicator.rank == 0:
            logger.info("%s all-reduce from step %d on: %s", path, step, reason)


def _only_path(communicator: Communicator, plan: str | Plan) -> PathChoice | None:
    """Return the choice where there is none, None where there is."""
    if communicator.plain_reason is not None:
        return PathChoice(str(Path.PLAIN), communicator.plain_reason, since_step=0)
    if plan != "auto":
        flat = (plan.family if isinstance(plan, Plan) else plan) in ("flat", Family.FLAT_RING)
        name = plan.family if isinstance(plan, Plan) else plan
        path = Path.PLAIN if flat else Path.PLANNED
        return PathChoice(str(path), f"plan={name} was asked for", since_step=0)
    if communicator.reproducible:
        reason = "reproducible=True fixes the order of summation, which plain all-reduce does not"
        return PathChoice(str(Path.PLANNED), reason, since_step=0)
    return None
