"""From a call to the communication thread: tickets, numbered in the order of the calls."""

import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from topo_ar.execution.arguments import is_plain_memory
from topo_ar.execution.entrance import Entrance, Ready
from topo_ar.execution.flight import Collective
from topo_ar.execution.gather import Channel
from topo_ar.execution.kernels import CODES, Kernel
from topo_ar.execution.line import Line
from topo_ar.execution.loop import Loop
from topo_ar.execution.plain import reduce_plainly
from topo_ar.execution.plans import Plans, Prepared
from topo_ar.execution.program import ChunkProgram
from topo_ar.execution.shared_inputs import STAGED, SharedInputs
from topo_ar.execution.ticket import GroupWork, Pending, Ticket

OnDone = Callable[[], None] | None
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class Calls:
    """The calls of one communicator on this rank; several threads may make them.

    Parameters
    ----------
    loop : Loop
        Does the work.
    channel : Channel
        All ranks, for the plain path.
    shared : SharedInputs
        The tensors that are read where they lie.
    """

    def __init__(self, loop: Loop, channel: Channel, shared: SharedInputs) -> None:
        self._loop, self._channel, self._shared = loop, channel, shared
        self._entrance = Entrance(loop)
        self._lock = threading.Lock()
        self._next_ticket = 0
        self._plans: Plans | None = None
        # By number of elements, dtype and operation: small tensors that need no more looking up.
        self._lines: dict[tuple[int, torch.dtype, dist.ReduceOp.RedOpType], Line] = {}

    def plan_with(self, plans: Plans) -> None:
        """Look up plans here from now on; nothing is in flight."""
        self._plans = plans
        self._lines.clear()

    def prepared(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> Prepared | None:
        """Return what is planned for the tensor; None where only the plain path will do."""
        assert self._plans is not None
        planned = CODES if tensor.device.type == "cpu" else _SUMS
        if op in planned and tensor.layout is torch.strided:
            return self._plans.prepared(_real(tensor))
        return None

    def settled(self, tensor: torch.Tensor, on_done: OnDone) -> Pending:
        """Return the future of a tensor for which there is nothing to do."""
        ticket = Ticket(-1, tensor, Pending(self._loop.drives_here), _nothing, on_done)
        ticket.complete()
        return ticket.future

    def reduce(
        self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType", on_done: OnDone, *, plain: bool
    ) -> Pending:
        """Queue the all-reduce of a tensor on the CPU."""
        prepared = None if plain else self.prepared(tensor, op)
        with self._lock:
            ticket = self._ticket(tensor, op, prepared, on_done)
            self._entrance.submit(ticket)
        return ticket.future

    def reduce_when(
        self,
        ready: Ready | None,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        prepared: Prepared | None,
        and_then: Callable[[torch.futures.Future[torch.Tensor]], None],
    ) -> None:
        """Queue the all-reduce of a tensor that is there when `ready` is; its future is passed on.

        `and_then` takes it when it is complete.
        """
        with self._lock:
            ticket = self._ticket(tensor, op, prepared)
            ticket.future.add_done_callback(and_then)
            self._entrance.submit(ticket, ready)

    def reduce_here(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> torch.Tensor:
        """Reduce a tensor on the CPU; the calling thread does it where nothing is in flight."""
        prepared = self.prepared(tensor, op)
        with self._lock:
            ticket = self._ticket(tensor, op, prepared)
            claimed = self._entrance.claim(ticket)
        if claimed:
            self._loop.drive(ticket)
        try:
            return ticket.future.wait()
        except Exception:
            raise
        except BaseException as error:
            self._loop.give_up(error)
            raise

    def reduce_known(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> bool:
        """Reduce a small tensor like one before, without ticket and future; False where it is not.

        Nor where something is in flight.
        """
        line = self._lines.get((tensor.numel(), tensor.dtype, op))
        if line is None or not is_plain_memory(tensor):
            return False
        with self._lock:
            if not self._entrance.claim_idle():
                return False
            number = self._number()
        left = self._loop.drive_straight(line, number, tensor.data_ptr())
        if left is not None:
            plain = partial(reduce_plainly, self._channel, op=op)
            pending = Pending(self._loop.drives_here)
            ticket = Ticket(number, tensor, pending, left, None, plain)
            self._loop.drive_adopted(ticket)
            ticket.future.wait()
        return True

    def reduce_in_node(self, tensor: torch.Tensor, program: tuple[ChunkProgram, ...]) -> None:
        """Run a program of this node alone, before the first call."""
        kernel = Kernel(tensor.dtype)
        number = self._number()
        work = Collective(number, tensor.numel(), program, kernel, kernel.view(tensor))
        ticket = Ticket(number, tensor, Pending(self._loop.drives_here), work)
        self._loop.submit(ticket)
        ticket.future.wait()

    def submit(
        self,
        tensor: torch.Tensor,
        work: GroupWork | Callable[[], None],
        on_done: OnDone = None,
        plain: Callable[[torch.Tensor], None] | None = None,
    ) -> Pending:
        """Let the communication thread do `work` in the order of the calls."""
        with self._lock:
            number = self._number()
            ticket = Ticket(number, tensor, Pending(self._loop.drives_here), work, on_done, plain)
            self._entrance.submit(ticket)
        return ticket.future

    def drain(self, timeout_s: float) -> None:
        """Wait until all calls are with the loop, or for so long; forget what was looked up."""
        self._lines.clear()  # their views would keep the memory mapped
        self._entrance.drain(timeout_s)

    def forget_after_fork(self) -> None:
        """Begin anew in a forked child, whose calls the loop will refuse."""
        self._lock = threading.Lock()
        self._entrance = Entrance(self._loop)

    def _number(self) -> int:
        number = self._next_ticket
        self._next_ticket = number + 1
        return number

    def _ticket(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        prepared: Prepared | None,
        on_done: OnDone = None,
    ) -> Ticket:
        # What fails on one rank alone must not take a number.
        number = self._next_ticket
        plain = partial(reduce_plainly, self._channel, op=op)
        work = self._collective(number, tensor, op, prepared) or partial(plain, tensor)
        self._next_ticket = number + 1
        return Ticket(number, tensor, Pending(self._loop.drives_here), work, on_done, plain)

    def _collective(
        self,
        number: int,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        prepared: Prepared | None,
    ) -> Collective | None:
        if prepared is None or prepared.program is None:
            return None
        assert self._plans is not None
        kernel = self._plans.kernel(tensor.dtype, op)
        fingerprint = prepared.fingerprint ^ CODES[op]
        line = None
        if prepared.straight:
            key = (tensor.numel(), tensor.dtype, op)
            line = self._lines.get(key)
            if line is None:
                line = self._loop.line(prepared.program, kernel, fingerprint)
                if line is not None:
                    self._lines[key] = line
        return Collective(
            number=number,
            fingerprint=fingerprint,
            program=prepared.program,
            kernel=kernel,
            buffer=kernel.view(_real(tensor)),
            line=line,
            source=STAGED if prepared.straight else self._shared.source(tensor),
        )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _nothing() -> None:
    """Do the work of an empty all-reduce."""
