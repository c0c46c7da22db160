"""What a rank asks for, the handle that its caller holds, and the streams that lie between."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from topo_ar.errors import ExecutionError
from topo_ar.integrations.horovod.negotiation import Signature

logger = logging.getLogger("topo_ar")

_STALL_S = 60.0


class Fence:
    """A point in the current stream of CUDA tensors' device; for tensors on CPU it is nothing."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.is_cuda]
        self._event = None
        if self._tensors:
            self._event = torch.cuda.current_stream(self._tensors[0].device).record_event()

    def wait(self) -> None:
        """Let the current stream wait for that point, and own the tensors from there on."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            stream.wait_event(self._event)
            for tensor in self._tensors:
                tensor.record_stream(stream)


class Waiter(Protocol):
    """Who wants to know of those that wait.

    Attributes
    ----------
    timeout_s : float
        How long a request waits for other ranks to make it too.
    """

    timeout_s: float

    def count_waiting(self, change: int) -> None:
        """Take note that one more waits, or one less."""

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not asked for something yet, as far as is known."""


class Handle:
    """What an asynchronous operation returns; see `synchronize` and `poll`.

    Parameters
    ----------
    name : str
        What it is called in errors.
    waiter : Waiter, optional
        Without one it waits for as long as it takes.
    """

    def __init__(self, name: str, waiter: Waiter | None = None) -> None:
        self.name = name
        self._waiter = waiter
        self._launched = threading.Event()
        self._finish: Callable[[], Any] = lambda: None
        self._is_done: Callable[[], bool] = lambda: True
        self._error: BaseException | None = None

    def launch(self, finish: Callable[[], Any], is_done: Callable[[], bool]) -> None:
        """Say that it is under way: `finish` waits for it and returns what it gave."""
        self._finish, self._is_done = finish, is_done
        self._launched.set()

    def fail(self, error: BaseException) -> None:
        """Say why there is no result."""
        self._error = error
        self._launched.set()

    def done(self) -> bool:
        """Tell whether `wait` would return or raise at once."""
        return self._launched.is_set() and (self._error is not None or self._is_done())

    def wait(self) -> Any:
        """Return the result when it is there.

        Raises
        ------
        ValueError
            If ranks asked for different things, or for something that cannot be.
        ExecutionError
            If a rank failed, or asked for nothing of that name in time.
        """
        if self._waiter is None:
            self._launched.wait()
        elif not self._launched.is_set():
            self._waiter.count_waiting(1)
            try:
                self._await_launch(self._waiter)
            finally:
                self._waiter.count_waiting(-1)
        if self._error is not None:
            raise self._error
        return self._finish()

    def _await_launch(self, waiter: Waiter) -> None:
        end = time.monotonic() + waiter.timeout_s
        while not self._launched.wait(max(0.0, min(_STALL_S, end - time.monotonic()))):
            missing = waiter.missing(self.name)
            text = f"{self.name!r} waits for ranks {missing}, which have not asked for it"
            if time.monotonic() >= end:
                raise ExecutionError(f"{text} in {waiter.timeout_s:g} s", ranks=missing)
            logger.warning("%s", text)


@dataclass(slots=True)
class Request:
    """What a rank wants done; all-reduces and broadcasts write to `tensors`.

    Attributes
    ----------
    result : callable or None
        What the handle returns, of the output; the tensors themselves, or the one, if None.
    work : callable or None
        What is to be done in the group when all ranks have asked for it; its future has the output.
    """

    signature: Signature
    tensors: list[torch.Tensor]
    handle: Handle
    result: Callable[[Any], Any] | None = None
    work: Callable[[dist.ProcessGroup], "torch.futures.Future[torch.Tensor]"] | None = None
    fence: Fence = field(init=False)

    def __post_init__(self) -> None:
        self.fence = Fence(self.tensors)

    def give(self, output: Any = None) -> Any:
        """Return what the caller gets."""
        if output is None:
            output = self.tensors if len(self.tensors) > 1 else self.tensors[0]
        return output if self.result is None else self.result(output)
