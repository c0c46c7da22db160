"""How scripts that are not verbs of the command line end."""

import sys
from collections.abc import Callable

from topo_ar.errors import TopoError

_INTERRUPTED = 130


def exit_code_of(run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a script and return its exit code.

    Bad input becomes one line on stderr and the error's code; Ctrl-C becomes 130, with the line
    `interrupted`.
    """
    try:
        return run()
    except TopoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return _INTERRUPTED
