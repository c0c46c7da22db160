"""What every survivor is told when a collective fails: who, where, why, and who saw it."""

from collections.abc import Sequence

import msgspec

from topo_ar.errors import ExecutionError
from topo_ar.execution.transports.segment import FAILURE_NBYTES
from topo_ar.execution.transports.tcp import Aborted, BadFrame, PeerGone

_MOST_NAMED = 64


class Failure(msgspec.Struct, frozen=True):
    """The cause of a failed collective, passed between ranks as JSON.

    `collective` is its number, -1 where there is none. `left` marks a rank that closed its
    communicator on purpose: only a failure for those that still need it. After a `recoverable` one
    all ranks may be alive and willing, which they find out by agreeing on it.
    """

    text: str
    ranks: tuple[int, ...]
    stage: str
    seen_by: int
    left: bool = False
    recoverable: bool = False
    collective: int = -1

    def encode(self) -> bytes:
        """Return the report as JSON of at most `FAILURE_NBYTES` bytes."""
        report = self
        while len(data := msgspec.json.encode(report)) > FAILURE_NBYTES:
            report = msgspec.structs.replace(
                report,
                text=report.text[: len(report.text) // 2],
                ranks=report.ranks[:_MOST_NAMED],
            )
        return data

    @property
    def own(self) -> bool:
        """Whether the rank that saw it is the one at fault, in work of its own."""
        return self.ranks == (self.seen_by,)

    def and_then(self, error: ExecutionError) -> "Failure":
        """Return the report for a failure that could not be survived because of another one."""
        text = f"{self.text}; and the ranks could not agree to go on without it: {error}"
        ranks = tuple(dict.fromkeys((*self.ranks, *error.ranks)))
        return msgspec.structs.replace(self, text=text, ranks=ranks)

    @property
    def place(self) -> str:
        """Where it happened, as part of a sentence: stage and collective as far as known."""
        stage = f" in stage {self.stage}" if self.stage else ""
        return stage + (f" of collective {self.collective}" if self.collective >= 0 else "")

    def error(
        self,
        rank: int,
        nodes: Sequence[tuple[int, ...]],
        last_completed: int,
        in_job: Sequence[int] = (),
    ) -> ExecutionError:
        """Return the exception that `rank` raises for this failure.

        Parameters
        ----------
        nodes : sequence of tuple of int
            The ranks of each node.
        in_job : sequence of int
            What each rank of a smaller group is called in the job.
        last_completed : int
            The number of the last collective that `rank` has completed, -1 for none.
        """
        seen = "" if self.seen_by == rank else f" (reported by rank {self.seen_by})"
        done = f"last completed collective {last_completed}"
        if last_completed < 0:
            done = "none was completed before"
        return ExecutionError(
            f"rank {rank}: all-reduce failed{self.place}: {self.text}{seen}; "
            f"{whereabouts(self.ranks, nodes, in_job)}{done}",
            ranks=self.ranks,
            stage=self.stage,
            nodes=sorted({at for at, node in enumerate(nodes) if set(node) & set(self.ranks)}),
            collective=self.collective,
            last_completed=last_completed,
        )


def whereabouts(
    ranks: Sequence[int], nodes: Sequence[tuple[int, ...]], in_job: Sequence[int] = ()
) -> str:
    """Return on which nodes `ranks` are, as the beginning of a sentence."""
    other = {rank: f" (rank {job} of the job)" for rank, job in enumerate(in_job) if rank != job}
    parts = []
    for at, node in enumerate(nodes):
        there = [f"{rank}{other.get(rank, '')}" for rank in sorted(ranks) if rank in node]
        if there:
            subject = f"rank {there[0]} is" if len(there) == 1 else f"ranks {', '.join(there)} are"
            parts.append(f"{subject} on node {at}")
    return "".join(f"{part}; " for part in parts)


def decode_failure(data: bytes, reporter: int) -> Failure:
    """Return the report that `reporter` left, even when it is unreadable."""
    try:
        return msgspec.json.decode(data, type=Failure)
    except msgspec.DecodeError:
        return Failure("failed without a readable report", (reporter,), "", reporter)


def report_of(error: Aborted) -> Failure:
    """Return the report that came over a flow."""
    return decode_failure(str(error).encode(), error.ranks[0])


class Reported(ExecutionError):  # noqa: N818 - carries a report to where the job fails
    """A failure that has been put into words already, here or by a peer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text, ranks=failure.ranks, stage=failure.stage)
        self.failure = failure


def failure_of(error: BaseException, rank: int, stage: str, collective: int) -> Failure:
    """Return the report for an exception that rank `rank` met while in `stage`.

    What a rank met in its own work, and a connection or a frame that is broken, are recoverable.
    """
    if isinstance(error, Reported):
        return error.failure
    if isinstance(error, Aborted):
        return report_of(error)
    if isinstance(error, ExecutionError):
        return Failure(
            str(error),
            error.ranks,
            error.stage or stage,
            rank,
            recoverable=isinstance(error, PeerGone | BadFrame),
            collective=collective,
        )
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    recoverable = isinstance(error, Exception)
    return Failure(text, (rank,), stage, rank, recoverable=recoverable, collective=collective)
