"""The communication thread of a rank: one event loop over tickets, in the order they were taken.

Each turn moves what can be moved. When nothing moved, the thread yields its core a bounded number
of times (cheap where compute waits for the core) and then blocks until a peer wakes it, a socket is
ready, a co-located process ends or the deadline passes.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from topo_ar.errors import ExecutionError
from topo_ar.execution.alive import let_end
from topo_ar.execution.errand import Errand
from topo_ar.execution.flight import Collective
from topo_ar.execution.gather import Unreachable
from topo_ar.execution.groups import Groups
from topo_ar.execution.guard import Failure, Reported, failure_of
from topo_ar.execution.job import Job
from topo_ar.execution.kernels import Kernel
from topo_ar.execution.line import Line, collective_of
from topo_ar.execution.lookout import Lookout
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.program import ChunkProgram
from topo_ar.execution.recovery import Fallback, Recovery
from topo_ar.execution.straight import Straight, stage_of
from topo_ar.execution.switching import PromptSwitching
from topo_ar.execution.ticket import Broken, GroupWork, Ticket
from topo_ar.execution.waiting import interest, waits_for
from topo_ar.planning.schedule import Stage

logger = logging.getLogger("topo_ar")

YIELDS_BEFORE_BLOCKING = 5
_PATIENCE = 0.05
_PATIENCE_S = 1.0
# What a thread that gives up needs for patience and to tell its peers.
_FAREWELL_S = 5.0
# How long who leaves stays at hand for ranks that are still at work on what it took part in.
_LINGER_S = 2.0

_T = TypeVar("_T")


class Loop:
    """Runs tickets on a thread of its own until it is closed or a collective fails.

    Parameters
    ----------
    pipeline : Pipeline
        The chunk pipeline of this rank.
    job : Job
        Closed by the thread as its last act.
    timeout_s : float
        How long nothing may move while a ticket is open.
    recovery : Recovery, optional
        How to leave the fast path; without it every failure ends the loop.
    rail : sequence of int, optional
        The ranks in this one's place on all nodes; without it there is no work with groups.

    Attributes
    ----------
    error : ExecutionError or None
        The failure that ended the loop.
    fallback : Fallback or None
        The failure after which every ticket takes the plain path.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        job: Job,
        timeout_s: float,
        recovery: Recovery | None = None,
        rail: Sequence[int] = (),
    ) -> None:
        self.pipeline = pipeline
        self.timeout_s = timeout_s
        self.error: ExecutionError | None = None
        self.fallback: Fallback | None = None
        self._job = job
        self._recovery = recovery
        self._thrown: Exception | None = None
        self._unsettled = False  # since all ranks agreed to be done, a ticket took the fast path
        self._last_completed = -1
        self._node = pipeline.node
        self._straight = Straight(pipeline)
        self._groups: Groups | None = None
        if rail:
            self._groups = Groups(self._node, rail, pipeline.rank, pipeline.flows, self._attend)
        self._incoming: deque[Ticket] = deque()
        self._open: dict[int, Ticket] = {}
        # Reentrant: the garbage collector may `abandon` a loop anywhere.
        self._lock = threading.RLock()
        self._closing = False
        self._give_up_at = float("inf")
        self._last_move = time.monotonic()
        pipeline.finished = self._finished
        # The idle thread listens to the doorbell alone: peers that ring for another driver, and
        # tickets that the caller drives itself, must not cost it a switch.
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lookout = Lookout(pipeline, self._doorbell)
        self._idle = select.epoll()
        self._idle.register(self._doorbell, select.EPOLLIN)
        self._driving = threading.Lock()
        self._driver = 0
        self._thread = threading.Thread(target=self._run, name="topo_ar", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket; its future fails at once when the loop has failed or is closed."""
        if self._accept(ticket):
            self._ring()

    def claim(self, ticket: Ticket) -> bool:
        """Queue a ticket and tell whether the caller shall `drive` it, because nothing is open."""
        claimed = self._driving.acquire(blocking=False)
        if claimed and (self._incoming or self.pipeline.busy):
            self._driving.release()
            claimed = False
        if self._accept(ticket) and not claimed:
            self._ring()
        return claimed

    def claim_idle(self) -> bool:
        """Let the caller `drive_straight` the next collective, if nothing is open."""
        if not self._driving.acquire(blocking=False):
            return False
        ended = self.error is not None or self.fallback is not None or self._closing
        if ended or self._incoming or self.pipeline.busy:
            self._driving.release()
            return False
        return True

    def line(
        self, program: tuple[ChunkProgram, ...], kernel: Kernel, fingerprint: int
    ) -> Line | None:
        """Return what `drive_straight` needs for a program for which `is_straight` is true.

        None where the kernel sends between the nodes something other than elements.
        """
        rails = [segment.rail for segment in program[0].segments]
        if any(kernel.partial_nbytes(rank) != kernel.itemsize for rail in rails for rank in rail):
            return None
        return Line(self.pipeline, program, kernel, fingerprint)

    def drive_straight(self, line: Line, number: int, pointer: int) -> Collective | None:
        """Run a claimed collective on the calling thread; see `Straight.run`.

        What is returned takes longer or has failed: the caller has to `drive_adopted` its ticket.
        """
        self._driver = threading.get_ident()
        left, first = None, self.pipeline.end
        self._unsettled = True
        try:
            left = self._straight.run(line, number, pointer)
            if left is None:
                self._last_completed = number
        except Exception as error:
            self._thrown = error
            left = collective_of(line, number, pointer)
            left.first = first
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._driver = 0
            if left is None:
                self._release_driving()
        return left

    def drive_adopted(self, ticket: Ticket) -> None:
        """Drive the ticket of a collective that `drive_straight` left to the lanes."""
        self._open[ticket.number] = ticket
        self._last_move = time.monotonic()
        self.drive(ticket)

    def drive(self, ticket: Ticket) -> None:
        """Run the loop on the calling thread until a claimed `ticket` is done.

        An exception that is not a failed collective, such as KeyboardInterrupt, fails the job and
        is raised.
        """
        try:
            self._serve_or_fail(ticket.future.done)
        finally:
            self._release_driving()

    def give_up(self, error: BaseException) -> None:
        """Fail the job because of what interrupted a caller that was waiting for its ticket."""
        self._thrown = Reported(failure_of(error, self.pipeline.rank, Stage.FLAT, -1))
        self._ring()

    def _release_driving(self) -> None:
        # What is still to be sent, or was queued meanwhile, is the thread's.
        if self.pipeline.busy or self._incoming or self._closing:
            self._ring()
        self._driving.release()

    def drives_here(self) -> bool:
        """Tell whether the calling thread is at work in this loop, so that it must not wait."""
        return self._driver == threading.get_ident()

    def _accept(self, ticket: Ticket) -> bool:
        with self._lock:
            if self.error is None and not self._closing:
                self._incoming.append(ticket)
                return True
        ticket.fail(self.error or ExecutionError("the communicator is closed"))
        return False

    def close(self, timeout_s: float) -> None:
        """Finish open tickets, fail what is not done in time, and end the thread."""
        self._give_up_at = time.monotonic() + timeout_s
        self.abandon()
        if not self.drives_here():  # else a callback closes; the thread ends after it
            self._thread.join(timeout_s + _FAREWELL_S)

    def abandon(self) -> None:
        """Let the thread end when open tickets are done; does not wait for it."""
        self._closing = True
        let_end(self._thread)
        self._ring()

    def disown(self) -> None:
        """Refuse every ticket: this process is a fork, in which the thread does not run."""
        self.error = ExecutionError("a forked process cannot use the communicator of its parent")
        self._lock = threading.RLock()
        self._driving = threading.Lock()
        self._doorbell = -1

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _ring(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # rung already
            if self._doorbell >= 0:
                os.eventfd_write(self._doorbell, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._idle.poll()
                self._take_turns()
            self._take_turns()  # what was accepted before
        finally:
            with self._driving:
                self._leave()

    def _take_turns(self) -> None:
        with self._driving, PromptSwitching():
            self._hush()
            self._serve_or_fail(lambda: False)

    def _serve_or_fail(self, enough: Callable[[], bool]) -> None:
        if self.error is not None:
            return
        self._driver = threading.get_ident()
        try:
            # An inf or nan in a gradient is the training's business, also under -W error.
            with np.errstate(all="ignore"):
                while not self._served(enough):
                    continue
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._driver = 0

    def _served(self, enough: Callable[[], bool]) -> bool:
        """Serve; return False where a failure interrupted it and the job has recovered."""
        try:
            self._raise_thrown()
            self._serve(enough)
        except Exception as error:
            failure = self._failure(error)
            if not failure.recoverable or not self._may_recover():
                raise
            self._recover(failure)
            return False
        return True

    def _raise_thrown(self) -> None:
        if self._thrown is not None:
            thrown, self._thrown = self._thrown, None
            raise thrown

    def _may_recover(self) -> bool:
        return (
            self._recovery is not None
            and self.fallback is None
            and not self._lookout.asked
            and all(
                ticket.plain is not None and isinstance(ticket.work, Collective)
                for ticket in self._open.values()
            )
        )

    def _recover(self, failure: Failure) -> None:
        """Leave the fast path together with all other ranks."""
        recovery = self._recovery
        assert recovery is not None
        self._lookout.tell(failure)
        try:
            self._in_touch(lambda: recovery.agree(failed=True))
            self._fall_back(failure)
        except ExecutionError as error:
            if not (isinstance(error, LostTouch) or failure.own):
                raise  # what broke was the first sign of it
            told = error.failure if isinstance(error, Reported) else None
            if told is not None and told.text.startswith(failure.text):
                raise  # another one has put both together
            raise Reported(failure.and_then(error)) from None

    def _fall_back(self, failure: Failure | None) -> None:
        assert self._recovery is not None
        recovery, tickets = self._recovery, list(self._open.values())
        self.fallback = self._in_touch(lambda: recovery.finish(failure, tickets))
        if self.pipeline.rank == 0:
            logger.warning(
                "plain all-reduce from now on: %s", self.fallback.reason(self._job.nodes)
            )
        self._lookout.abandon_flows()
        self._in_touch(self._job.reconnect)
        self._lookout.hear_from(self._job.flows.values())
        self._open.clear()
        rest = [ticket for ticket in tickets if ticket.leave_fast_path(self.fallback.chunk)]
        self._incoming.extendleft(reversed(rest))
        for ticket in tickets[: len(tickets) - len(rest)]:
            self._last_completed = ticket.number
            ticket.complete()

    def _leave(self) -> None:
        if self.error is None:
            self._say_farewell()
            self._linger()
        with self._lock:
            doorbell, self._doorbell = self._doorbell, -1
        self._lookout.close()
        self._idle.close()
        os.close(doorbell)
        self.pipeline.release()
        self._job.close()

    def _say_farewell(self) -> None:
        left = Failure("it closed its communicator", (self.pipeline.rank,), "", -1, left=True)
        self._node.owned.segment.write_failure(left.encode())
        self._node.wake_everyone()

    def _linger(self) -> None:
        """Take part in the fallback of ranks that fail while this one has all it needs."""
        recovery = self._recovery
        if recovery is None or not self._unsettled or self.fallback is not None:
            return
        # Who does not come in time either works on without this rank, or is at its end.
        with contextlib.suppress(ExecutionError):
            if not recovery.agree(failed=False, timeout_s=_LINGER_S):
                self._fall_back(None)
                self._say_farewell()

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._doorbell)

    def _serve(self, enough: Callable[[], bool]) -> None:
        """Take turns until nothing is open, or `enough` says so; the caller holds `_driving`."""
        idle = 0
        while True:
            if self._incoming:
                self._admit()
            if not self.pipeline.busy:
                if not self._incoming:
                    return
            elif self.pipeline.turn():
                self._last_move = time.monotonic()
                idle = 0
                if enough():
                    return
            else:
                idle = self._rest(idle)

    def _admit(self) -> None:
        while self._incoming:
            ticket = self._incoming[0]
            if isinstance(ticket.work, Collective) and self.fallback is not None:
                ticket.leave_fast_path(0)
            if isinstance(ticket.work, Collective):
                if not self.pipeline.busy:
                    self._last_move = time.monotonic()
                self._open[ticket.number] = ticket
                self._incoming.popleft()
                self._unsettled = True
                line = ticket.work.line
                if self.pipeline.busy or line is None:
                    self.pipeline.enqueue(ticket.work)
                    continue
                ticket.work.first = self.pipeline.end
                if not self._straight.run(line, ticket.number, ticket.tensor.data_ptr()):
                    self._complete(ticket.number)
            elif self.pipeline.busy:
                return
            elif isinstance(ticket.work, GroupWork) and self._cannot_do(ticket):
                self._incoming.popleft()
            elif isinstance(ticket.work, GroupWork | Broken) or self._settled():
                self._open[ticket.number] = ticket
                self._incoming.popleft()
                self._do(ticket)
                self._complete(ticket.number)

    def _cannot_do(self, ticket: Ticket) -> bool:
        """Fail the future of work with groups that has no plain counterpart, if it needs one."""
        if self.fallback is None or ticket.plain is not None:
            return False
        why = self.fallback.reason(self._job.nodes)
        ticket.fail(ExecutionError(f"codecs need the fast path, which the job has left: {why}"))
        return True

    def _settled(self) -> bool:
        """See that no rank needs this one on the fast path, before gloo blocks it.

        Return False where one did: what it lacked comes first.
        """
        recovery = self._recovery
        if not self._unsettled or self.fallback is not None or recovery is None:
            return True
        self._unsettled = False
        if self._in_touch(lambda: recovery.agree(failed=False)):
            return True
        self._fall_back(None)
        return False

    def _do(self, ticket: Ticket) -> None:
        """Do what is not for the pipeline, which must be idle."""
        work = ticket.work
        if isinstance(work, Broken):
            me = self.pipeline.rank
            raise ExecutionError(f"rank {me}: {work.why}", ranks=(me,), stage=Stage.FLAT)
        if isinstance(work, GroupWork):
            assert self._groups is not None
            if self.fallback is None:
                self._last_move = time.monotonic()
                self._groups.do(work)
                return
            assert ticket.plain is not None
            work = partial(ticket.plain, ticket.tensor)
        assert not isinstance(work, Collective)
        try:
            self._in_touch(work)
        except ExecutionError:
            raise
        except Exception as error:  # the others are at work on it: no way back
            text = f"{type(error).__name__}: {error}"
            raise ExecutionError(text, ranks=(self.pipeline.rank,), stage=Stage.FLAT) from error

    def _attend(self, errand: Errand) -> None:
        """Do an errand of a group to its end, waiting as for the pipeline."""
        self.pipeline.errand = errand
        idle = 0
        while not errand.done():
            if errand.turn():
                self._last_move = time.monotonic()
                idle = 0
            else:
                idle = self._rest(idle)
        self._last_move = time.monotonic()
        self.pipeline.errand = None

    def _finished(self, collective: Collective) -> None:
        self._complete(collective.number)

    def _complete(self, number: int) -> None:
        self._last_completed = number
        self._open.pop(number).complete()

    def _in_touch(self, call: Callable[[], _T]) -> _T:
        """Return what a call returns that needs gloo; if that fails, find out why."""
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, ExecutionError) and not isinstance(error, Unreachable):
                raise
            self._lookout.ask()
            raise LostTouch(f"gloo: {error}", stage=Stage.FLAT) from error

    def _rest(self, idle: int) -> int:
        """Yield the core, or wait after so many `idle` turns; return how many there are now."""
        if idle < YIELDS_BEFORE_BLOCKING:
            os.sched_yield()
            return idle + 1
        self._wait()
        return 0

    def _wait(self) -> None:
        self._raise_thrown()
        now = time.monotonic()
        overdue_s = now - self._last_move - self.timeout_s
        if overdue_s >= 0:
            step_s = max(_PATIENCE_S, _PATIENCE * self.timeout_s)
            self._require_patience(overdue_s, step_s, f"nothing moved for {self.timeout_s:g} s")
        if now >= self._give_up_at:
            self._require_patience(
                now - self._give_up_at, _PATIENCE_S, "the communicator was closed"
            )
        self._node.sleep_for(interest(self.pipeline))
        # What came before the peers could see the mask would wake nobody: look once more.
        if self.pipeline.turn():
            self._last_move = time.monotonic()
        else:
            self._lookout.block(needed=bool(self._open))
        self._node.sleep_for(0)

    def _require_patience(self, overdue_s: float, step_s: float, why: str) -> None:
        # Who sees the culprit itself speaks first; those further away would name a fellow victim.
        wait = waits_for(self.pipeline)
        if overdue_s < wait.distance * step_s:
            return
        who = f"ranks {list(wait.ranks)} {wait.what}" if wait.ranks else "nothing moves"
        raise ExecutionError(f"{why}: {who}", ranks=wait.ranks, stage=wait.stage)

    def _failure(self, error: BaseException) -> Failure:
        """Return the report for an exception of this rank, or the one that it carries."""
        stage: str = Stage.FLAT
        number = min(self._open, default=-1)
        if self.pipeline.busy:
            stage = waits_for(self.pipeline).stage
            chunk = self.pipeline.chunks.get(self.pipeline.next_out)
            number = number if chunk is None else chunk.collective.number
        elif number in self._open and isinstance(self._open[number].work, Collective):
            stage = stage_of(error)  # past the lanes, which know of nothing
        return failure_of(error, self.pipeline.rank, stage, number)

    def _fail(self, error: BaseException) -> None:
        failure = msgspec.structs.replace(self._failure(error), recoverable=False)
        job = self._job
        final = failure.error(
            self.pipeline.rank, job.nodes, self._last_completed, job.channel.ranks
        )
        final.__cause__ = None if isinstance(error, ExecutionError) else error
        with self._lock:
            self.error = final
            tickets = [*self._open.values(), *self._incoming]
            self._open.clear()
            self._incoming.clear()
        try:
            # The peers first: who learns of it here may end the process.
            self._lookout.tell(failure)
            self._job.cut()
            logger.error("%s", final)
        finally:
            for ticket in tickets:
                ticket.fail(final)


class LostTouch(ExecutionError):  # noqa: N818 - an event that the loop turns into a message
    """Gloo cannot reach a rank, and nobody says why."""
