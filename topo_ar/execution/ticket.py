"""One call: what is to be done for it, and the future that its caller holds."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from topo_ar.errors import ExecutionError
from topo_ar.execution.flight import Collective

if TYPE_CHECKING:
    from topo_ar.execution.node_group import NodeGroup
    from topo_ar.execution.rail_group import RailGroup

logger = logging.getLogger("topo_ar")


class Pending(torch.futures.Future[torch.Tensor]):
    """A future that tells a callback at once that it would wait for itself.

    Parameters
    ----------
    drives_here : callable
        Tells whether the calling thread is the one that has to complete this future.
    devices : sequence of torch.device
        CUDA devices that the result is on: who waits makes their current streams wait.
    """

    def __init__(
        self, drives_here: Callable[[], bool], devices: Sequence[torch.device] = ()
    ) -> None:
        super().__init__(devices=list(devices))
        self._drives_here = drives_here

    def wait(self) -> torch.Tensor:
        """Return the result when it is there.

        Raises
        ------
        ExecutionError
            If the collective failed, or if a callback of another future waits here: it runs on the
            thread that would have to do the work.
        """
        if not self.done() and self._drives_here():
            raise ExecutionError(
                "a callback waits for an all-reduce that only its own thread can do; return the "
                "future from then(), or wait for it elsewhere"
            )
        return super().wait()


@dataclass(frozen=True, slots=True)
class GroupWork:
    """What a rank does with its groups; `fingerprint` tells works apart that ranks must not mix."""

    work: "Callable[[NodeGroup, RailGroup], None]"
    fingerprint: int


@dataclass(frozen=True, slots=True)
class Broken:
    """What a rank cannot do, and why; it ends the job when its turn comes."""

    why: str


@dataclass(slots=True)
class Ticket:
    """One call of all_reduce, or of what is done with groups.

    `work` is a `Collective` for the pipeline, a `GroupWork`, or a function that reduces by the
    plain path; `on_done` runs before anyone who waits for the future learns of it. `plain` reduces
    the tensor of a `Collective`, or the rest of it, where the fast path has to be left, and that of
    a `GroupWork` where it was left before.
    """

    number: int
    tensor: torch.Tensor
    future: Pending
    work: Collective | GroupWork | Broken | Callable[[], None]
    on_done: Callable[[], None] | None = None
    plain: Callable[[torch.Tensor], None] | None = None

    def leave_fast_path(self, chunk: int) -> bool:
        """Leave what begins with chunk number `chunk` to `plain`; tell whether that is anything."""
        assert isinstance(self.work, Collective)
        assert self.plain is not None
        at = max(0, chunk - self.work.first)
        if at >= len(self.work.program):
            return False
        begin = self.work.program[at].begin
        self.work = partial(self.plain, _elements(self.tensor)[begin:])
        return True

    def complete(self) -> None:
        """Complete the future; a mistake of the caller's fails the caller's future, not the job."""
        try:
            if self.on_done is not None:
                self.on_done()
            self.future.set_result(self.tensor)
        except BaseException as error:
            logger.exception("an all-reduce is done, but its caller cannot be told")
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def fail(self, error: BaseException) -> None:
        """Fail the future, unless somebody has completed it."""
        if not self.future.done():
            self.future.set_exception(error)  # type: ignore[arg-type]


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flat tensor whose elements the chunks of a collective count."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
