"""How busy all cores of this machine are, whoever keeps them so.

CPU seconds of the ranks miss what the kernel does in interrupts and what other processes do; here
both count.
"""

from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _COUNTED = 3, 4, 8


@dataclass(frozen=True, slots=True)
class CpuTicks:
    """Ticks of all cores since the machine started."""

    busy: int
    total: int


def cpu_ticks(stat: Path = _STAT) -> CpuTicks | None:
    """Return the ticks so far; None where the kernel does not tell.

    Idle and waiting for input are not busy; time stolen by a hypervisor is. Source: proc(5).
    """
    try:
        name, *fields = stat.read_text().split("\n", 1)[0].split()
    except (OSError, ValueError):
        return None
    # Guests' time, which comes after, is in the user's already.
    ticks = [int(field) for field in fields[:_COUNTED]]
    if name != "cpu" or len(ticks) <= _IOWAIT:
        return None
    total = sum(ticks)
    return CpuTicks(total - ticks[_IDLE] - ticks[_IOWAIT], total)


def busy_share(spans: list[tuple[CpuTicks | None, CpuTicks | None]]) -> float | None:
    """Return the busy share of all cores over `spans` together, 0 to 1.

    None where the kernel does not tell or no tick has passed.
    """
    busy = total = 0
    for begin, end in spans:
        if begin is None or end is None:
            return None
        busy += end.busy - begin.busy
        total += end.total - begin.total
    return busy / total if total > 0 else None
