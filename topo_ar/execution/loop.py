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

import numpy as np

from topo_ar.errors import ExecutionError
from topo_ar.execution.agreement import DisagreementError
from topo_ar.execution.errand import Errand
from topo_ar.execution.flight import Collective
from topo_ar.execution.groups import Groups
from topo_ar.execution.guard import Failure, decode_failure, failure_of
from topo_ar.execution.kernels import Kernel
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.program import ChunkProgram
from topo_ar.execution.straight import Line, Straight
from topo_ar.execution.switching import PromptSwitching
from topo_ar.execution.ticket import GroupWork, Ticket
from topo_ar.execution.transports.tcp import abort_all
from topo_ar.execution.waiting import interest, needs, waits_for
from topo_ar.planning.schedule import Stage

logger = logging.getLogger("topo_ar")

YIELDS_BEFORE_BLOCKING = 5
# A wake-up can be missed when two ranks finish a stage within one store buffer; it costs this much.
_RECHECK_S = 0.02
_PATIENCE = 0.05
_PATIENCE_S = 0.5
# News of a dead rank comes within milliseconds of gloo's error, if it comes.
_NEWS_S = 1.0
# What a thread that gives up needs for patience and to tell its peers.
_FAREWELL_S = 2.5


class Loop:
    """Runs tickets on a thread of its own until it is closed or a collective fails.

    Parameters
    ----------
    pipeline : Pipeline
        The chunk pipeline of this rank.
    timeout_s : float
        How long nothing may move while a ticket is open.
    release : callable
        Called once, by the thread as its last act: nothing of the pipeline is used any more.
    rail : sequence of int, optional
        The ranks in this one's place on all nodes; without it there is no work with groups.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        timeout_s: float,
        release: Callable[[], object],
        rail: Sequence[int] = (),
    ) -> None:
        self.pipeline = pipeline
        self.timeout_s = timeout_s
        self.error: ExecutionError | None = None
        self._node = pipeline.node
        self._straight = Straight(pipeline)
        self._flows = list(pipeline.flows.values())
        self._groups: Groups | None = None
        if rail:
            self._groups = Groups(self._node, rail, pipeline.rank, pipeline.flows, self._attend)
        self._incoming: deque[Ticket] = deque()
        self._open: dict[int, Ticket] = {}
        self._release = release
        # Reentrant: the garbage collector may `abandon` a loop anywhere.
        self._lock = threading.RLock()
        self._closing = False
        self._give_up_at = float("inf")
        self._last_move = time.monotonic()
        self._epoll = select.epoll()
        self._interest: dict[int, int] = {}
        self._wake_fd = self._node.owned.wake_read_fd
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._pid_fds = {peer.pid_fd: peer.rank for peer in self._node.peers}
        self._ended: set[int] = set()
        for fd in self._pid_fds:
            self._epoll.register(fd, select.EPOLLIN)
        pipeline.finished = self._finished
        # The idle thread listens to the doorbell alone: peers that ring for another driver, and
        # tickets that the caller drives itself, must not cost it a switch.
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._doorbell, select.EPOLLIN)
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
        if self._incoming or self.pipeline.busy or self.error is not None or self._closing:
            self._driving.release()
            return False
        return True

    def line(
        self, program: tuple[ChunkProgram, ...], kernel: Kernel, fingerprint: int
    ) -> Line | None:
        """Return what `drive_straight` needs for a program for which `is_straight` is true.

        None where the kernel sends between the nodes something other than elements.
        """
        if kernel.partial != kernel.storage:
            return None
        return Line(self.pipeline, program, kernel, fingerprint)

    def drive_straight(self, line: Line, number: int, pointer: int) -> Collective | None:
        """Run a claimed collective on the calling thread; see `Straight.run`.

        What is returned takes longer: the caller has to `drive_adopted` its ticket.

        Raises
        ------
        ExecutionError
            If the collective failed.
        """
        self._driver = threading.get_ident()
        left = None
        try:
            left = self._straight.run(line, number, pointer)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            assert self.error is not None
            raise self.error from None
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
                self._serve(enough)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._driver = 0

    def _leave(self) -> None:
        if self.error is None:
            left = Failure("it closed its communicator", (self.pipeline.rank,), "", -1, left=True)
            self._node.owned.segment.write_failure(left.encode())
            self._node.wake_everyone()
        with self._lock:
            doorbell, self._doorbell = self._doorbell, -1
        self._epoll.close()
        self._idle.close()
        os.close(doorbell)
        self._release()

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
            elif idle < YIELDS_BEFORE_BLOCKING:
                idle += 1
                os.sched_yield()
            else:
                self._wait()
                idle = 0

    def _admit(self) -> None:
        while self._incoming:
            ticket = self._incoming[0]
            if isinstance(ticket.work, Collective):
                if not self.pipeline.busy:
                    self._last_move = time.monotonic()
                self._open[ticket.number] = ticket
                self._incoming.popleft()
                line = ticket.work.line
                if self.pipeline.busy or line is None:
                    self.pipeline.enqueue(ticket.work)
                elif not self._straight.run(line, ticket.number, ticket.tensor.data_ptr()):
                    self._complete(ticket.number)
            elif self.pipeline.busy:
                return
            else:
                self._open[ticket.number] = ticket
                self._incoming.popleft()
                if isinstance(ticket.work, GroupWork):
                    assert self._groups is not None
                    self._last_move = time.monotonic()
                    self._groups.do(ticket.work)
                else:
                    self._reduce_plainly(ticket.work)
                self._complete(ticket.number)

    def _attend(self, errand: Errand) -> None:
        """Do an errand of a group to its end, waiting as for the pipeline."""
        self.pipeline.errand = errand
        idle = 0
        while not errand.done():
            if errand.turn():
                self._last_move = time.monotonic()
                idle = 0
            elif idle < YIELDS_BEFORE_BLOCKING:
                idle += 1
                os.sched_yield()
            else:
                self._wait()
                idle = 0
        self._last_move = time.monotonic()
        self.pipeline.errand = None

    def _finished(self, collective: Collective) -> None:
        self._complete(collective.number)

    def _complete(self, number: int) -> None:
        self._open.pop(number).complete()

    def _reduce_plainly(self, work: Callable[[], None]) -> None:
        try:
            work()
        except DisagreementError:
            raise
        except RuntimeError as error:
            # Gloo knows an address at best; who sees the culprit tells the others.
            end = time.monotonic() + _NEWS_S
            while time.monotonic() < end:
                for flow in self._flows:
                    flow.receive(self.pipeline)
                self._block(_RECHECK_S)
            raise ExecutionError(f"gloo: {error}", stage=Stage.FLAT) from error

    def _wait(self) -> None:
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
            self._block(_RECHECK_S)
        self._node.sleep_for(0)

    def _block(self, timeout_s: float) -> None:
        self._look_for_failures()
        self._register_flows()
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            elif fd == self._doorbell:
                self._hush()
            elif fd in self._pid_fds:
                self._epoll.unregister(fd)
                self._ended.add(self._pid_fds[fd])

    def _look_for_failures(self) -> None:
        for rank, data in self._node.failures():
            failure = decode_failure(data, rank)
            if not failure.left:
                raise _Reported(failure)
            self._require_not_needed(rank, f"rank {rank} closed its communicator")
        for rank in self._ended:
            self._require_not_needed(rank, f"the process of rank {rank} ended")

    def _require_not_needed(self, rank: int, what: str) -> None:
        # A rank that has finished every open collective may go: what it published stays mapped.
        if self.pipeline.busy:
            if needs(self.pipeline, rank):
                stage = waits_for(self.pipeline).stage
                raise ExecutionError(what, ranks=(rank,), stage=stage)
        elif self._open:  # gloo needs every rank to the end
            raise ExecutionError(what, ranks=(rank,), stage=Stage.FLAT)

    def _register_flows(self) -> None:
        for flow in self._flows:
            wanted = 0
            if flow.outstanding and not flow.gated:
                wanted |= select.EPOLLIN
            if flow.wants_out:
                wanted |= select.EPOLLOUT
            fd = flow.fileno()
            current = self._interest.get(fd, 0)
            if wanted == current:
                continue
            if not current:
                self._epoll.register(fd, wanted)
            elif wanted:
                self._epoll.modify(fd, wanted)
            else:
                self._epoll.unregister(fd)
            self._interest[fd] = wanted

    def _require_patience(self, overdue_s: float, step_s: float, why: str) -> None:
        # Who sees the culprit itself speaks first; those further away would name a fellow victim.
        wait = waits_for(self.pipeline)
        if overdue_s < wait.distance * step_s:
            return
        who = f"ranks {list(wait.ranks)} {wait.what}" if wait.ranks else "nothing moves"
        raise ExecutionError(f"{why}: {who}", ranks=wait.ranks, stage=wait.stage)

    def _fail(self, error: BaseException) -> None:
        stage: str = Stage.FLAT
        if self.pipeline.busy:
            stage = waits_for(self.pipeline).stage
        failure = (
            error.failure
            if isinstance(error, _Reported)
            else failure_of(error, self.pipeline.rank, stage)
        )
        final = failure.error(self.pipeline.rank)
        final.__cause__ = None if isinstance(error, ExecutionError) else error
        with self._lock:
            self.error = final
            tickets = [*self._open.values(), *self._incoming]
            self._open.clear()
            self._incoming.clear()
        try:
            # The peers first: who learns of it here may end the process.
            data = failure.encode()
            self._node.owned.segment.write_failure(data)
            self._node.wake_everyone()
            abort_all(self._flows, data.decode())
            logger.error("%s", final)
        finally:
            for ticket in tickets:
                ticket.fail(final)


class _Reported(ExecutionError):  # noqa: N818 - carries a peer's report to `_fail`
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text, ranks=failure.ranks, stage=failure.stage)
        self.failure = failure
