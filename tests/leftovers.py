"""What a test session may leave behind on a machine, and who left it."""

import os
import time
from pathlib import Path

import psutil

MARK = "TOPO_AR_TEST_SESSION"
PROBE = "topo-ar-probe-"  # namespaces that a session makes for a moment to see if it can
PATIENCE_S = 3.0
_SHM = Path("/dev/shm")
_NAMESPACES = Path("/run/netns")


def mark_session() -> str:
    """Mark every process started from here on; return the mark, also known to nested sessions."""
    own = f"{os.getpid()}.{time.time_ns()}"
    os.environ[MARK] = ":".join(filter(None, [os.environ.get(MARK), own]))
    return own


def snapshot() -> frozenset[Path]:
    """Return the shared memory files and named network namespaces that exist."""
    return frozenset(
        path for root in (_SHM, _NAMESPACES) if root.is_dir() for path in root.iterdir()
    )


def find(before: frozenset[Path], mark: str) -> list[str]:
    """Return one line for each thing left since `before`; what is ending gets time to end."""
    end = time.monotonic() + PATIENCE_S
    while (lines := _processes(mark) + _files(before, mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return lines


def _ours(mark: str) -> dict[int, psutil.Process]:
    own = psutil.Process()
    found = {process.pid: process for process in own.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid != own.pid and mark in _read(Path(f"/proc/{process.pid}/environ")):
            found[process.pid] = process
    return found


def _processes(mark: str) -> list[str]:
    lines = []
    for process in _ours(mark).values():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"process {process.pid}: {' '.join(process.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return lines


def _files(before: frozenset[Path], mark: str) -> list[str]:
    new = snapshot() - before
    if not new:
        return []
    ours = {*_ours(mark), os.getpid()}
    others = [pid for pid in psutil.pids() if pid not in ours]
    used = "".join(_read(Path(f"/proc/{pid}/maps")) for pid in others)
    # A file that another process has mapped is another session's.
    return [f"file {path}" for path in sorted(new) if str(path) not in used]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
