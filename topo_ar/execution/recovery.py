"""From the fast path to the plain one: all ranks agree where, and what was in flight is finished.

After a failure that everyone survived, each rank tells how many chunks it has copied out, over a
gloo group that carries nothing else. Chunks that all ranks have are done. Those that only some
have lie in the result slots of the nodes that had them (see `RESULT_SLOTS`) and are handed to the
others; their callers may have overwritten the buffers. From the first chunk that nobody has, the
buffers are untouched input, and plain all-reduce takes over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from topo_ar.execution.flight import Collective
from topo_ar.execution.gather import Channel
from topo_ar.execution.guard import Failure, Reported, whereabouts
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.ticket import Ticket
from topo_ar.planning.schedule import Stage


class Report(msgspec.Struct, frozen=True):
    """What a rank tells the others once it is clear that the fast path has to be left.

    Attributes
    ----------
    failure : Failure or None
        The failure that brought the rank here.
    sizes : tuple of int
        Bytes of the chunks that it lacks and some other rank has, in order.
    collectives : dict
        Number and fingerprint of each collective in flight.
    """

    failure: Failure | None
    sizes: tuple[int, ...]
    collectives: dict[int, int]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why the fast path was left, and the first chunk that was not finished on it."""

    cause: Failure
    chunk: int

    def reason(self, nodes: Sequence[tuple[int, ...]]) -> str:
        """Return the cause in a sentence."""
        where = whereabouts(self.cause.ranks, nodes)
        return f"{where}the fast path failed{self.cause.place}: {self.cause.text}"


class Recovery:
    """One rank's part in leaving the fast path. Every method is collective over the ranks.

    Parameters
    ----------
    control : Channel
        All ranks; with a longer deadline than that of a collective, for whoever waits here must
        not fail before those that are to come.
    pipeline : Pipeline
        Not used any more by its lanes when `finish` is called.
    """

    def __init__(self, control: Channel, pipeline: Pipeline) -> None:
        self._control = control
        self._pipeline = pipeline
        self._progress: list[int] = []

    def agree(self, *, failed: bool, timeout_s: float | None = None) -> bool:
        """Tell whether all ranks are done with the fast path so far; else all have to `finish`.

        Raises
        ------
        ExecutionError
            If a rank is gone or does not come, within `timeout_s` where that is given.
        """
        status = self._control.all_gather_words([failed, self._pipeline.next_out], timeout_s)
        self._progress = [next_out for _, next_out in status]
        return not any(failed for failed, _ in status)

    def finish(self, failure: Failure | None, tickets: Sequence[Ticket]) -> Fallback:
        """Complete the chunks that some ranks have and some lack, and end the pipeline.

        Parameters
        ----------
        failure : Failure or None
            What this rank knows of the failure.
        tickets : sequence of Ticket
            What is in flight here, in order.

        Raises
        ------
        ExecutionError
            If a rank is gone, or the ranks do not run the same collectives.
        """
        first, end = min(self._progress), max(self._progress)
        lacking = _chunks(tickets, self._pipeline.next_out, end)
        mine = Report(
            failure,
            tuple(chunk.nbytes for chunk in lacking.values()),
            {t.number: t.work.fingerprint for t in tickets if isinstance(t.work, Collective)},
        )
        gathered = self._control.all_gather(msgspec.json.encode(mine))
        reports = [msgspec.json.decode(data, type=Report) for data in gathered]
        _require_equal(reports, self._control.rank)
        sizes = reports[self._progress.index(first)].sizes
        for index, nbytes in zip(range(first, end), sizes, strict=True):
            root = next(rank for rank, done in enumerate(self._progress) if done > index)
            self._control.broadcast(self._place(index, nbytes, root, lacking.get(index)), root)
        self._pipeline.abandon()
        return Fallback(_cause(reports), end)

    def _place(
        self, index: int, nbytes: int, root: int, lacking: NDArray[np.uint8] | None
    ) -> torch.Tensor:
        if lacking is not None:
            return torch.from_numpy(lacking)
        if self._control.rank == root:
            return torch.from_numpy(self._pipeline.node.result(index)[:nbytes])
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _chunks(tickets: Sequence[Ticket], begin: int, end: int) -> dict[int, NDArray[np.uint8]]:
    """Return the bytes of the callers' buffers that belong to the chunks ``begin .. end - 1``."""
    found = {}
    for ticket in tickets:
        collective = ticket.work
        if not isinstance(collective, Collective):
            continue
        for index in range(max(begin, collective.first), min(end, collective.end)):
            program = collective.program[index - collective.first]
            found[index] = collective.buffer[program.begin : program.end].view(np.uint8)
    return found


def _require_equal(reports: Sequence[Report], me: int) -> None:
    """Refuse to go on where ranks take one collective for different ones."""
    first: dict[int, tuple[int, int]] = {}
    for rank, report in enumerate(reports):
        for number, fingerprint in report.collectives.items():
            other, expected = first.setdefault(number, (rank, fingerprint))
            if fingerprint != expected:
                text = (
                    f"collective {number}: rank {rank} runs another size, dtype, operation or plan "
                    f"than rank {other}; all ranks must call all_reduce with equal arguments in "
                    "equal order"
                )
                raise Reported(Failure(text, (rank, other), Stage.FLAT, me, collective=number))


def _cause(reports: Sequence[Report]) -> Failure:
    """Return the failure to tell of: that of a rank which blames itself, if there is one."""
    failures = [report.failure for report in reports if report.failure is not None]
    return min(failures, key=lambda failure: not failure.own)
