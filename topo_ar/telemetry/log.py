"""The package's log on stderr, for people who set ``TOPO_AR_LOG``."""

import logging
import os

LOG_ENV = "TOPO_AR_LOG"
_LEVELS = ("debug", "info", "warning", "error")
_log = logging.getLogger("topo_ar")


def log_to_stderr() -> None:
    """Write the package's log to stderr from the level on that ``TOPO_AR_LOG`` names.

    Without the variable nothing changes: warnings appear as Python or the application shows them.
    A level that does not exist is reported once and read as ``warning``.
    """
    wanted = os.environ.get(LOG_ENV, "").lower()
    if not wanted or _log.handlers:
        return
    rank = os.environ.get("RANK")
    who = "topo-ar" if rank is None else f"topo-ar rank {rank}"
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(f"{who} %(asctime)s.%(msecs)03d %(levelname)s: %(message)s", "%H:%M:%S")
    )
    _log.addHandler(handler)
    _log.propagate = False
    _log.setLevel(wanted.upper() if wanted in _LEVELS else logging.WARNING)
    if wanted not in _LEVELS:
        _log.warning("%s=%s is not one of %s", LOG_ENV, wanted, ", ".join(_LEVELS))
