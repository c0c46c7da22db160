"""How tickets come to the communication thread: in the order of the calls, on every rank.

A tensor of a GPU is first copied to the host, which takes until the GPU gets there. What is called
meanwhile, also for tensors on CPU, waits behind it: ranks whose GPUs are not equally far would
otherwise start the same collectives in different orders.
"""

import threading
from collections import deque
from typing import Protocol

from topo_ar.execution.loop import Loop
from topo_ar.execution.ticket import Broken, Ticket


class Ready(Protocol):
    """What a ticket waits for, such as an event of CUDA."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Entrance:
    """Hands tickets to a loop. All calls are made under one lock of the caller's.

    Parameters
    ----------
    loop : Loop
        What does the work.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Ticket, Ready | None]] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, ticket: Ticket, ready: Ready | None = None) -> None:
        """Queue a ticket, to be begun when it is `ready`."""
        with self._lock:
            if ready is None and not self._waiting:
                self._loop.submit(ticket)
                return
            self._waiting.append((ticket, ready))
            if self._thread is None:
                # It lives as long as something waits, so that nobody has to end it.
                self._thread = threading.Thread(
                    target=self._run, name="topo_ar copies", daemon=True
                )
                self._thread.start()

    def claim(self, ticket: Ticket) -> bool:
        """Queue a ticket and tell whether the caller shall drive it; see `Loop.claim`."""
        with self._lock:
            if not self._waiting:
                return self._loop.claim(ticket)
            self._waiting.append((ticket, None))
            return False

    def claim_idle(self) -> bool:
        """Tell whether the caller shall drive what comes next; see `Loop.claim_idle`."""
        return not self._waiting and self._loop.claim_idle()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is with the loop, or for so long."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                ticket, ready = self._waiting[0]
            if ready is not None:
                try:
                    ready.synchronize()
                except RuntimeError as error:
                    # The others are waiting for this rank's part: let the loop tell them.
                    ticket.work = Broken(f"its tensor did not come to the host: {error}")
            with self._lock:
                self._loop.submit(ticket)
                self._waiting.popleft()
