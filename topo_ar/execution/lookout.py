"""What a rank that cannot go on listens to: sockets, wake-ups, and signs that somebody failed."""

import contextlib
import os
import select
import time
from collections.abc import Iterable

from topo_ar.errors import ExecutionError
from topo_ar.execution.guard import Failure, Reported, decode_failure, report_of
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.transports.tcp import Aborted, BadFrame, Discard, Flow, abort_all
from topo_ar.execution.waiting import needs, waits_for
from topo_ar.planning.schedule import Stage

# A wake-up can be missed when two ranks finish a stage within one store buffer; it costs this much.
_RECHECK_S = 0.02
# News of a dead rank comes within milliseconds of gloo's error, if it comes.
_NEWS_S = 1.0


class Lookout:
    """Blocks until something may have moved, and raises what it learns of other ranks.

    Parameters
    ----------
    pipeline : Pipeline
        Of this rank.
    doorbell : int
        An eventfd that ends a block, too.

    Attributes
    ----------
    lenient : bool
        Failures that all ranks may survive are of no interest: they have been dealt with.
    """

    def __init__(self, pipeline: Pipeline, doorbell: int) -> None:
        self.lenient = False
        self._pipeline = pipeline
        self._node = pipeline.node
        self._flows = list(pipeline.flows.values())
        self._doorbell = doorbell
        self._asking = False
        self._epoll = select.epoll()
        self._interest: dict[int, int] = {}
        self._wake_fd = self._node.owned.wake_read_fd
        self._pid_fds = {peer.pid_fd: peer.rank for peer in self._node.peers}
        self._ended: set[int] = set()
        for fd in (self._wake_fd, doorbell, *self._pid_fds):
            self._epoll.register(fd, select.EPOLLIN)

    def block(self, *, needed: bool) -> None:
        """Wait for anything to happen, not for long.

        Parameters
        ----------
        needed : bool
            Whether a call is open for which every rank is needed to its end.

        Raises
        ------
        ExecutionError
            If a rank has failed, died or left that is still needed.
        """
        self._look_for_failures(needed)
        self._register_flows()
        for fd, _ in self._epoll.poll(_RECHECK_S):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            elif fd == self._doorbell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif fd in self._pid_fds:
                self._epoll.unregister(fd)
                self._ended.add(self._pid_fds[fd])

    def ask(self) -> None:
        """Look for who is to blame after gloo has lost touch: it knows an address at best.

        Raises
        ------
        ExecutionError
            If somebody is found. After this call the communicator is at its end either way.
        """
        end = time.monotonic() + _NEWS_S
        self._asking = self.lenient = True
        while time.monotonic() < end:
            for flow in self._flows:
                if not flow.ended:
                    self._hear(flow)
            self.block(needed=True)

    @property
    def asked(self) -> bool:
        """Whether `ask` was called."""
        return self._asking

    def tell(self, failure: Failure) -> None:
        """Tell all peers of a failure, as far as they can be reached."""
        data = failure.encode()
        self._node.owned.segment.write_failure(data)
        self._node.wake_everyone()
        abort_all(self._flows, data.decode())

    def abandon_flows(self) -> None:
        """Close the flows, with what is on its way in them, and look at failures anew."""
        self.lenient = True
        self._node.owned.segment.clear_failure()
        for fd, wanted in self._interest.items():
            if wanted:
                self._epoll.unregister(fd)
        self._interest.clear()
        for flow in self._flows:
            flow.close()
        self._flows.clear()

    def hear_from(self, flows: Iterable[Flow]) -> None:
        """Listen to other flows from now on, for news only."""
        self._flows = list(flows)

    def close(self) -> None:
        """Stop listening."""
        self._epoll.close()

    def _hear(self, flow: Flow) -> None:
        try:
            flow.receive(Discard())
        except Aborted as error:
            if not report_of(error).recoverable:
                raise
        except BadFrame:
            flow.ended = True

    def _look_for_failures(self, needed: bool) -> None:
        for rank, data in self._node.failures():
            failure = decode_failure(data, rank)
            if failure.recoverable and self.lenient:
                continue
            if not failure.left:
                raise Reported(failure)
            self._require_not_needed(rank, f"rank {rank} closed its communicator", needed)
        for rank in self._ended:
            self._require_not_needed(rank, f"the process of rank {rank} ended", needed)

    def _require_not_needed(self, rank: int, what: str, needed: bool) -> None:
        # A rank that has finished every open collective may go: what it published stays mapped.
        if self._pipeline.busy and not self._asking:
            if needs(self._pipeline, rank):
                stage = waits_for(self._pipeline).stage
                raise ExecutionError(what, ranks=(rank,), stage=stage)
        elif needed:  # gloo needs every rank to the end
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
