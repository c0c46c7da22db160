"""A shorter switch interval of the interpreter while collectives are in flight on a thread.

A thread that waits for the interpreter's lock asks for it after the switch interval, 5 ms by
default. A training step that runs Python meanwhile would stretch every turn of the event loop by so
much.
"""

import sys
import threading
from types import TracebackType

_INTERVAL_S = 5e-4

_lock = threading.Lock()
_users = 0
_usual_s = 0.0


class PromptSwitching:
    """Shortens the interval while entered; the last one to leave restores what was set before."""

    def __enter__(self) -> None:
        global _users, _usual_s
        with _lock:
            _users += 1
            if _users == 1:
                _usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_usual_s, _INTERVAL_S))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _users
        with _lock:
            _users -= 1
            if _users == 0:
                sys.setswitchinterval(_usual_s)
