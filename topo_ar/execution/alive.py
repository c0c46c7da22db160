"""Communicators that nobody has closed yet: closed at exit, and let go of in a forked child."""

import atexit
import os
import threading
import weakref
from typing import Protocol

_EXIT_TIMEOUT_S = 5.0


class Closeable(Protocol):
    """What must not outlive its process, nor work in a child of it."""

    def close(self, timeout_s: float) -> None:
        """Finish what is open and release everything."""
        ...

    def forget_after_fork(self) -> None:
        """Let go of everything in a forked child."""
        ...


_alive: "weakref.WeakSet[Closeable]" = weakref.WeakSet()
_ending: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def add(made: Closeable) -> None:
    """Take care of what was made, for as long as somebody holds it."""
    _alive.add(made)


def discard(closed: Closeable) -> None:
    """Take no more care of what is closed."""
    _alive.discard(closed)


def let_end(thread: threading.Thread) -> None:
    """Wait at exit for a thread that ends by itself.

    The interpreter takes the ground from under a thread that is still in torch's code, which then
    aborts the process.
    """
    _ending.add(thread)


@atexit.register
def _close_all() -> None:
    for made in list(_alive):
        made.close(timeout_s=_EXIT_TIMEOUT_S)
    for thread in list(_ending):
        thread.join(_EXIT_TIMEOUT_S)


def _after_fork() -> None:
    for made in list(_alive):
        made.forget_after_fork()
    _alive.clear()
    _ending.clear()


os.register_at_fork(after_in_child=_after_fork)
