"""Holds the steps of a job against targets, and gives up what misses them, on all ranks at once.

Each step's figures go round while the next one computes, so that all ranks judge the same numbers,
one step later, by arithmetic that rounds alike everywhere.
"""

import logging
import math
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
import torch

from topo_ar.integrations.path_choice import UNDECIDED
from topo_ar.integrations.path_trial import Path as Way
from topo_ar.integrations.step_traffic import ring_bytes
from topo_ar.telemetry.breaches import WELL_STEPS, Breach, BreachWatch
from topo_ar.telemetry.bucket_trace import BucketTrace, StepTrace
from topo_ar.telemetry.incidents import Incident, RankAccount
from topo_ar.telemetry.prices import PriceList
from topo_ar.telemetry.records import manifest
from topo_ar.telemetry.targets import Targets
from topo_ar.telemetry.window_figures import LATE_SHARE
from topo_ar.units import format_seconds

if TYPE_CHECKING:
    from topo_ar.integrations.ddp import Handle

logger = logging.getLogger("topo_ar")

_TRACED_STEPS = 4
_MOST_ACTIONS = 3
_WARNED = "warned"
_NOTHING_LEFT = "warned: there is nothing else to try"


class TargetMonitor:
    """Watches a job's targets; all ranks have one, and call it in every step.

    Parameters
    ----------
    handle : Handle
        Of the job.
    targets : Targets
        The same on all ranks.
    directory : Path
        Where rank 0 writes incidents.

    Attributes
    ----------
    incidents : list of Incident
        So far; the same on all ranks but for the time.
    """

    def __init__(self, handle: "Handle", targets: Targets, directory: Path) -> None:
        self.incidents: list[Incident] = []
        self._handle = handle
        self._communicator = handle.communicator
        self._directory = directory
        self._loss = math.nan
        self._sent_before = handle.communicator.nbytes_sent_between
        self._rows: deque[list[list[float]]] = deque(maxlen=max(8, targets.patience_steps))
        self._pending: torch.futures.Future[torch.Tensor] | None = None
        self._actions = 0
        self._exhausted = False
        self.set_targets(targets)

    def set_targets(self, targets: Targets) -> None:
        """Judge by other targets from the next step on; the same on all ranks."""
        self.targets = targets
        self._watch = BreachWatch(targets)

    def report_loss(self, loss: float) -> None:
        """Take in this rank's loss of the step at hand."""
        self._loss = loss

    def step_ended(self, step: int, seconds: float, exposed_seconds: float, nbytes: int) -> None:
        """Judge the step before the one that has ended, and say what that one took. Collective.

        Parameters
        ----------
        step : int
            The one that has ended.
        seconds, exposed_seconds : float
            What it took, and what was exposed of communication.
        nbytes : int
            Of its buckets.
        """
        if self._pending is not None:
            rows: list[list[float]] = self._pending.wait().tolist()
            self._judge(step - 1, rows, nbytes)
        sent = self._communicator.nbytes_sent_between
        row = [seconds, exposed_seconds, float(sent - self._sent_before), self._loss]
        self._sent_before, self._loss = sent, math.nan
        mine = torch.tensor(row, dtype=torch.float64, device="cpu")
        self._pending = self._communicator.gather_rows(mine)

    def _judge(self, step: int, rows: list[list[float]], nbytes: int) -> None:
        self._rows.append(rows)
        path = self._handle.choice.path
        if step < self.targets.warm_up_steps or path == UNDECIDED:
            self._watch.restart()
            return
        losses = [row[3] for row in rows if row[3] == row[3]]
        breach = self._watch.add(
            step, self._figures(rows, nbytes, path), fmean(losses) if losses else None
        )
        if self._watch.well_steps >= WELL_STEPS:
            self._actions, self._exhausted = 0, False
        if breach is not None:
            # The step that begins is the second one after the one that was judged.
            self._act(step + 2, breach)
            self._watch.restart()

    def _figures(self, rows: list[list[float]], nbytes: int, path: str) -> dict[str, float]:
        seconds, exposed = fmean(row[0] for row in rows), fmean(row[1] for row in rows)
        between = math.fsum(row[2] for row in rows)
        if path == str(Way.PLAIN):
            between = float(ring_bytes(self._communicator.nodes, nbytes)[1])
        found = {
            "step_seconds": seconds,
            "exposed_share": exposed / seconds if seconds else 0.0,
            "step_bytes_between": between,
        }
        if isinstance(self.targets.prices, PriceList):
            nodes, ranks = len(self._communicator.nodes), self._communicator.world_size
            found["cost_per_step"] = self.targets.prices.cost(seconds, nodes, ranks, between)
        return found

    def _act(self, step: int, breach: Breach) -> None:
        if self._exhausted:
            return
        before, plans_before = self._handle.choice.path, self._plan_hashes()
        late, cause = self._cause(breach)
        action = self._done_about(step, breach, late=late)
        self._exhausted = action.startswith(_WARNED)
        incident = Incident(
            unix_seconds=time.time(),
            first_missed_step=breach.first_step,
            breach_step=breach.last_step,
            acted_step=step,
            limits={name: self.targets.limit(name) for name in breach.values},
            values=breach.values,
            action=action,
            cause=cause,
            path_before=before,
            path_after=self._handle.choice.path,
            plans_before=plans_before,
            plans_after=self._plan_hashes(),
            nodes=self._communicator.nodes,
            ranks=self._accounts(),
            manifest=manifest(),
        )
        self.incidents.append(incident)
        if self._communicator.rank == 0:
            self._write(incident)

    def _done_about(self, step: int, breach: Breach, *, late: bool) -> str:
        if self.targets.on_breach == "warn" or late:
            return _WARNED
        why = f"{', '.join(breach.values)} above target"
        compression = self._handle.hook.compression
        if set(breach.values) == {"loss_drift"}:
            if compression is None or compression.stays_exact:
                return _NOTHING_LEFT
            compression.end(why)
            return "gradients are exact again"
        path = self._handle.hook.path
        assert path is not None
        self._actions += 1
        if self._actions > _MOST_ACTIONS:
            return _NOTHING_LEFT
        return path.give_way(step, why, again=self._actions > 1) or _NOTHING_LEFT

    def _cause(self, breach: Breach) -> tuple[bool, str]:
        """Tell whether a rank alone is to blame, and what the steps of the breach show."""
        # While it begins, some ranks' steps are already long and others' not yet.
        rows = list(self._rows)[min(breach.first_step - breach.last_step, -1) :]
        ranks = range(self._communicator.world_size)
        compute = [fmean(step[rank][0] - step[rank][1] for step in rows) for rank in ranks]
        seconds = fmean(row[0] for step in rows for row in step)
        exposed = fmean(row[1] for step in rows for row in step)
        slowest = max(ranks, key=lambda rank: compute[rank])
        usual = sorted(compute)[(len(compute) - 1) // 2]
        excess = compute[slowest] - usual
        limit = self.targets.limit("step_seconds") if "step_seconds" in breach.values else 0.0
        # Without what it takes longer the target would be met.
        late = excess >= LATE_SHARE * seconds and 0.0 < seconds - excess <= limit
        text = (
            f"steps take {format_seconds(seconds)}, of which {format_seconds(exposed)} wait for "
            f"communication; half of the ranks compute {format_seconds(usual)}, rank {slowest} "
            f"{format_seconds(compute[slowest])}"
        )
        return late, text + ("; no other plan helps against that" if late else "")

    def _plan_hashes(self) -> tuple[str, ...]:
        path = self._handle.hook.path
        assert path is not None
        return path.plan_hashes()

    def _accounts(self) -> tuple[RankAccount, ...]:
        rank = self._communicator.rank
        trace = self._handle.trace()
        # Names and shapes would make it large, and are the same on all ranks.
        steps = tuple(
            StepTrace(
                step.step,
                [msgspec.structs.replace(call, parameters=(), shapes=()) for call in step.buckets],
            )
            for step in trace.steps[-_TRACED_STEPS - 1 :]
            if step.buckets
        )
        mine = RankAccount(
            rank,
            tuple(rows[rank][0] for rows in self._rows),
            tuple(rows[rank][0] - rows[rank][1] for rows in self._rows),
            BucketTrace(trace.world_size, steps),
        )
        blobs = self._communicator.gather(msgspec.json.encode(mine))
        return tuple(msgspec.json.decode(blob, type=RankAccount) for blob in blobs)

    def _write(self, incident: Incident) -> None:
        missed = ", ".join(
            f"{name} {value:.4g} of {incident.limits[name]:.4g}"
            for name, value in incident.values.items()
        )
        where = ""
        try:
            where = f"; see {incident.write(self._directory)}"
        except OSError as error:
            where = f"; no record of it: {error}"
        logger.warning(
            "targets missed since step %d (%s): %s; from step %d on: %s%s",
            incident.first_missed_step,
            missed,
            incident.cause,
            incident.acted_step,
            incident.action,
            where,
        )
