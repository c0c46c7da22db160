"""What every survivor is told when a collective fails: who, where, why, and who saw it."""

import msgspec

from topo_ar.errors import ExecutionError
from topo_ar.execution.transports.segment import FAILURE_NBYTES
from topo_ar.execution.transports.tcp import Aborted

_MOST_NAMED = 64


class Failure(msgspec.Struct, frozen=True):
    """The cause of a failed job, passed between ranks as JSON.

    `left` marks a rank that closed its communicator on purpose: only a failure for those that
    still need it.
    """

    text: str
    ranks: tuple[int, ...]
    stage: str
    seen_by: int
    left: bool = False

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

    def error(self, rank: int) -> ExecutionError:
        """Return the exception that `rank` raises for this failure."""
        seen = "" if self.seen_by == rank else f" (reported by rank {self.seen_by})"
        stage = f" in stage {self.stage}" if self.stage else ""
        return ExecutionError(
            f"rank {rank}: all-reduce failed{stage}: {self.text}{seen}",
            ranks=self.ranks,
            stage=self.stage,
        )


def decode_failure(data: bytes, reporter: int) -> Failure:
    """Return the report that `reporter` left, even when it is unreadable."""
    try:
        return msgspec.json.decode(data, type=Failure)
    except msgspec.DecodeError:
        return Failure("failed without a readable report", (reporter,), "", reporter)


def failure_of(error: BaseException, rank: int, stage: str) -> Failure:
    """Return the report for an exception that rank `rank` met while in `stage`."""
    if isinstance(error, Aborted):
        return decode_failure(str(error).encode(), error.ranks[0])
    if isinstance(error, ExecutionError):
        return Failure(str(error), error.ranks, error.stage or stage, rank)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(text, (rank,), stage, rank)
