"""A communicator that is made when it is first needed, while its caller goes on."""

import threading
from collections import deque
from collections.abc import Callable

from topo_ar.errors import ExecutionError
from topo_ar.execution.communicator import Communicator

# A call, and what to do instead where no communicator can be made.
_Call = tuple[Callable[[Communicator], None], Callable[[BaseException], None]]


class LazyCommunicator:
    """Makes a communicator at the first call and hands it all calls, in their order.

    Making one waits for the other ranks. It is done on a thread of its own, so that ranks which
    come to their groups in different orders do not wait for each other in a circle.

    Parameters
    ----------
    make : callable
        Makes the communicator; collective over its ranks.
    """

    def __init__(self, make: Callable[[], Communicator]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._thread: threading.Thread | None = None
        self._made: Communicator | None = None
        self._error: BaseException | None = None

    @property
    def ready(self) -> Communicator | None:
        """The communicator, when it is made and every call before has been handed to it."""
        return self._made

    def call(
        self, use: Callable[[Communicator], None], fail: Callable[[BaseException], None]
    ) -> None:
        """Call `use` with the communicator, now or when it is made; `fail` where it cannot be."""
        with self._lock:
            if self._made is None and self._error is None:
                self._waiting.append((use, fail))
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="topo_ar set-up", daemon=True
                    )
                    self._thread.start()
                return
        if self._made is not None:
            use(self._made)
        else:
            assert self._error is not None
            fail(self._error)

    def wait(self) -> Communicator:
        """Return the communicator when it is made and has been handed the calls before.

        Raises
        ------
        TopoError
            If it cannot be made.
        """
        if self._made is None:
            done = threading.Event()
            self.call(lambda _: done.set(), lambda _: done.set())
            done.wait()
            with self._lock:
                thread = self._thread
            if thread is not None:
                thread.join()
            if self._made is None:
                assert self._error is not None
                raise self._error
        return self._made

    def close(self, timeout_s: float = 10.0) -> None:
        """Close the communicator if there is one; calls afterwards fail."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        with self._lock:
            made, self._made = self._made, None
            self._error = self._error or ExecutionError("the process group is destroyed")
        if made is not None:
            made.close(timeout_s)

    def _run(self) -> None:
        try:
            made: Communicator | BaseException = self._make()
        except BaseException as error:
            made = error
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    if isinstance(made, Communicator):
                        self._made = made
                    else:
                        self._error = made
                    return
                use, fail = self._waiting.popleft()
            if isinstance(made, Communicator):
                use(made)
            else:
                fail(made)
