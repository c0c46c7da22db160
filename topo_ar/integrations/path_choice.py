"""Never slower than plain DDP: planned all-reduce has to prove itself in the job that it serves.

Both paths are exact: only the time of a step and the order of summation depend on the choice. It is
kept for as long as steps take what they took; when they do not, the network is measured, planned
for and tried again.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

import torch

from topo_ar.execution.communicator import Communicator
from topo_ar.execution.plans import Plans
from topo_ar.integrations.bucket import Bucket
from topo_ar.integrations.observer import Observer
from topo_ar.integrations.path_trial import LOOKS, ORDER, TURN_STEPS, Path, Verdict, judge
from topo_ar.integrations.turns import Turns
from topo_ar.planning.plan import Family, Plan
from topo_ar.telemetry.drift import StepWatch
from topo_ar.telemetry.metrics import RatioInterval
from topo_ar.topology.model import Topology
from topo_ar.units import format_seconds, format_size

logger = logging.getLogger("topo_ar")

UNDECIDED = "undecided"
_VERDICT_NUMEL = 6
_ASK_STEPS = 16
_COMPRESSED = "codecs take the place of both"
_COMPRESSION_FIRST = "compression is to be decided first"
_ALL_FLAT = "the plan is plain all-reduce for every bucket"
_REPRODUCIBLE = "reproducible=True fixes the order of summation, which plain all-reduce does not"
# DDP rebuilds its buckets after the first step or the second, and the first steps are no measure.
_AFTER_STEPS = 4


class MayCompress(Protocol):
    """What reduces buckets in place of the communicator."""

    @property
    def stays_exact(self) -> bool | None:
        """Whether nothing is compressed from now on; None as long as that is to be decided."""
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
    replans : int
        How often steps had changed for good, so that the network was measured and planned for anew.
    """

    path: str
    reason: str
    speedup: RatioInterval | None = None
    steps: int = 0
    since_step: int | None = None
    trials: int = 0
    replans: int = 0


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket as far as its plan depends on it."""

    index: int
    nbytes: int
    dtype: torch.dtype
    device: str
    dense: bool


@dataclass(frozen=True, slots=True)
class _Settled:
    """What reduces steps: a path, and the plans of the communicator."""

    path: Path
    planning: tuple[Plans, Topology]


class PathChooser(Observer):
    """Lets planned and plain steps take turns, and keeps to those that are faster.

    Begins when compression, if it was to be decided, has come to nothing and the buckets have
    stayed the same for a step, and begins anew when they change.

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
    clock : callable
        Returns the time in seconds, by which steps are timed.
    """

    def __init__(
        self,
        communicator: Communicator,
        plan: str | Plan = "auto",
        compression: MayCompress | None = None,
    ) -> None:
        self.plain = False
        self.clock: Callable[[], float] = time.monotonic
        self._communicator = communicator
        self._compression = compression
        self._turns: Turns | None = None
        self._watch: StepWatch | None = None
        self._began = 0.0
        # What steps were reduced by: now that it is settled, and before that.
        self._settled: _Settled | None = None
        self._before: _Settled | None = None
        self._seen: list[_Bucket] = []
        self._buckets: tuple[_Bucket, ...] = ()
        only = _only_path(communicator, plan, compression)
        self._over = only is not None
        self.choice = only or PathChoice(UNDECIDED, "training has just begun")
        # Once compression has begun, only what was exchanged is known to be the same on all ranks.
        self._exact = compression is None or compression.stays_exact is True

    def called(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Take note of a bucket."""
        dense = tensor.layout is torch.strided
        nbytes = tensor.nbytes if dense else 0
        self._seen.append(_Bucket(bucket.index(), nbytes, tensor.dtype, tensor.device.type, dense))

    def begin(self, step: int) -> None:
        """Say how a step is reduced that is about to begin. Collective; nothing is in flight."""
        if self._over:
            return
        now = self.clock()
        buckets, self._seen = tuple(self._seen), []
        same, self._buckets = buckets == self._buckets, buckets
        if not self._exact:
            self._ask_compression(step)
        elif not same:
            self._wait("the buckets are new")
        elif self._turns is not None:
            self._take_turns(self._turns, step, now)
        elif self._watch is not None:
            self._keep(self._watch, step, now - self._began)
        elif step >= _AFTER_STEPS:
            self._start(step)
        self._began = self.clock()

    def _wait(self, why: str) -> None:
        self.plain, self._turns, self._watch = False, None, None
        self.choice = replace(self.choice, path=UNDECIDED, reason=why, since_step=None)

    def _ask_compression(self, step: int) -> None:
        self._wait(_COMPRESSION_FIRST)
        if self._compression is None or step % _ASK_STEPS:
            return
        mine = self._compression.stays_exact
        said = {row[0] for row in self._gather([-1.0 if mine is None else float(mine)])}
        if self._fell_back(step):
            return
        self._exact = said == {1.0}
        if said == {0.0}:
            self._over = True
            self.choice = replace(self.choice, path=str(Path.PLANNED), reason=_COMPRESSED)

    def _start(self, step: int) -> None:
        """Begin with turns, or with what there is where nothing can take turns."""
        flat = all(plan.family is Family.FLAT_RING for plan in self._plans())
        if flat or self._communicator.reproducible:
            path = Path.PLAIN if flat else Path.PLANNED
            self._settle(step, path, _ALL_FLAT if flat else _REPRODUCIBLE, None)
            return
        reason = "planned and plain steps take turns"
        self.choice = replace(
            self.choice,
            path=UNDECIDED,
            reason=reason,
            speedup=None,
            steps=0,
            since_step=None,
            trials=self.choice.trials + 1,
        )
        self._turns = Turns(ORDER, TURN_STEPS)
        self.plain = self._turns.next(self.clock()) == Path.PLAIN

    def plan_hashes(self) -> tuple[str, ...]:
        """Return the hash of the plan of each bucket, whichever path is taken."""
        return tuple(plan.hash for plan in self._plans())

    def _plans(self) -> list[Plan]:
        return [
            self._communicator.plan_for(each.nbytes, each.dtype.to_real().itemsize, each.device)
            for each in self._buckets
            if each.nbytes
        ]

    def _settle(self, step: int, path: Path, reason: str, level_seconds: float | None) -> None:
        self._turns, self._watch = None, StepWatch(level_seconds)
        self._take(step, path, reason)

    def _take(self, step: int, path: Path, reason: str) -> None:
        settled = _Settled(path, self._communicator.planning)
        if self._settled is not None and self._settled != settled:
            self._before = self._settled
        self._settled = settled
        self.plain = path is Path.PLAIN
        self.choice = replace(self.choice, path=str(path), reason=reason, since_step=step)

    def give_way(self, step: int, why: str, *, again: bool) -> str:
        """Reduce the step that begins, and later ones, in another way: targets are missed.

        What steps were reduced by before comes first. Where there was nothing before and the paths
        may be compared, the network is measured and planned for anew and they take turns; else, or
        where that was done, steps go the plain way. All ranks call it in the same step.

        Parameters
        ----------
        step : int
            The step that begins.
        why : str
            In a few words.
        again : bool
            Whether something was tried already.

        Returns
        -------
        str
            What is done, in a sentence; empty where there is nothing else to do.
        """
        communicator, before = self._communicator, self._before
        if communicator.fallbacks or communicator.plain_reason is not None:
            return ""
        if before is not None:
            done = f"back to the {before.path} all-reduce of before"
            communicator.restore(before.planning)
            self._settled, self._before = None, None
            self._go(step, before.path, f"{done}: {why}")
        elif not (self._over or again):
            communicator.plan_anew()
            done = "the network is measured and planned for anew"
            self.choice = replace(self.choice, replans=self.choice.replans + 1)
            self._start(step)
        elif self.choice.path == str(Path.PLANNED) and not communicator.reproducible:
            done = "plain all-reduce"
            self._go(step, Path.PLAIN, f"{done}: {why}")
        else:
            return ""
        return done

    def _go(self, step: int, path: Path, reason: str) -> None:
        if self._over:
            self._take(step, path, reason)
        else:
            self._settle(step, path, reason, None)

    def _take_turns(self, turns: Turns, step: int, now: float) -> None:
        self.plain = turns.next(now) == Path.PLAIN
        if not turns.turn_begins or turns.num_turns not in LOOKS:
            return
        verdict = self._look(turns)
        if self._fell_back(step):
            return
        found, steps = verdict.speedup, turns.num_turns * TURN_STEPS
        self.choice = replace(self.choice, speedup=found, steps=steps)
        if verdict.path is None:
            return
        reason = (
            f"in {steps} steps in turns planned all-reduce made a step {found.ratio:.3f} "
            f"({found.low:.3f} - {found.high:.3f}) times as fast as plain"
        )
        self._settle(step, verdict.path, reason, verdict.seconds)
        self._say("%s all-reduce from step %d on: %s", verdict.path, step, reason)

    def _look(self, turns: Turns) -> Verdict:
        """Return what rank 0 says of the steps of all ranks: a library may be older elsewhere."""
        planned, plain = (turns.seconds[path] for path in (Path.PLANNED, Path.PLAIN))
        rows = self._gather([*planned, *plain])
        said = [0.0] * _VERDICT_NUMEL
        if self._communicator.rank == 0:
            n, last = len(planned), turns.num_turns == LOOKS[-1]
            said = judge([row[:n] for row in rows], [row[n:] for row in rows], last=last).to_row()
        return Verdict.from_row(self._gather(said)[0])

    def _gather(self, mine: list[float]) -> list[list[float]]:
        row = torch.tensor(mine, dtype=torch.float64, device="cpu")
        rows: list[list[float]] = self._communicator.gather_rows(row).wait().tolist()
        return rows

    def _fell_back(self, step: int) -> bool:
        """Tell whether the fast path is gone; after a gathering all ranks know the same."""
        if not self._communicator.fallbacks:
            return False
        self._over, self.plain = True, True
        why = self._communicator.plain_reason or ""
        self.choice = replace(self.choice, path=str(Path.PLAIN), reason=why, since_step=step)
        return True

    def _keep(self, watch: StepWatch, step: int, seconds: float) -> None:
        mine = watch.add(seconds)
        if mine is None:
            return
        agreed, before = fmean(row[0] for row in self._gather([mine])), watch.level_seconds
        if self._fell_back(step) or not watch.drifts(agreed):
            return
        assert before is not None
        old = self._plans()
        self._communicator.plan_anew()
        self.choice = replace(self.choice, replans=self.choice.replans + 1)
        self._say(
            "step %d: steps take %s instead of %s, so the network was measured anew; %s",
            step,
            format_seconds(agreed),
            format_seconds(before),
            _changes(old, self._plans()),
        )
        self._start(step)

    def _say(self, text: str, *values: object) -> None:
        if self._communicator.rank == 0:
            logger.info(text, *values)


def _changes(old: Sequence[Plan], new: Sequence[Plan]) -> str:
    """Return in words what became of the plans of the same buckets."""
    changed = dict.fromkeys(
        (a.nbytes, a.family, a.hash[:8], b.family, b.hash[:8])
        for a, b in zip(old, new, strict=True)
        if a.hash != b.hash
    )
    return (
        "; ".join(
            f"{format_size(nbytes)}: {ours} ({mine}) becomes {theirs} ({other})"
            for nbytes, ours, mine, theirs, other in changed
        )
        or "the plans are the same"
    )


def _only_path(
    communicator: Communicator, plan: str | Plan, compression: MayCompress | None
) -> PathChoice | None:
    """Return the choice where there is none, None where there is."""
    if communicator.plain_reason is not None:
        return PathChoice(str(Path.PLAIN), communicator.plain_reason, since_step=0)
    if plan != "auto":
        name = plan.family if isinstance(plan, Plan) else plan
        path = Path.PLAIN if name in ("flat", Family.FLAT_RING) else Path.PLANNED
        return PathChoice(str(path), f"plan={name} was asked for", since_step=0)
    if compression is not None and compression.stays_exact is False:
        return PathChoice(str(Path.PLANNED), _COMPRESSED, since_step=0)
    return None
