"""A switch that delays: run inside the emulated network where the spec asks for a latency.

``python -I -S relay.py SECONDS PORT,PORT,... [PORT,PORT,... ...]``; each argument is one learning
switch over its devices. Every frame leaves `SECONDS` after it came. Standard library only, and no
import from the package: it starts in a few milliseconds and shares the cores with the ranks.
"""

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15  # whole segments of 64 KiB pass; without it Python is too slow for 1 Gbit/s
_PACKET_IGNORE_OUTGOING = 23
_BUFFERS = ((33, 8), (32, 7))  # SO_RCVBUFFORCE else SO_RCVBUF, SO_SNDBUFFORCE else SO_SNDBUF
_VNET_HEADER = 10
_LARGEST_FRAME = 70_000


def _open_port(device: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for forced, plain in _BUFFERS:
        try:
            port.setsockopt(socket.SOL_SOCKET, forced, 8 << 20)
        except PermissionError:
            port.setsockopt(socket.SOL_SOCKET, plain, 8 << 20)
    port.bind((device, _ETH_P_ALL))
    port.setblocking(False)
    return port


class _Switch:
    """Ports that belong together, and which of them leads to which station."""

    def __init__(self, devices: str) -> None:
        self.ports = [_open_port(device) for device in devices.split(",")]
        self._stations: dict[bytes, socket.socket] = {}

    def outlets(self, frame: bytes, came_from: socket.socket) -> list[socket.socket]:
        target = frame[_VNET_HEADER : _VNET_HEADER + 6]
        self._stations[frame[_VNET_HEADER + 6 : _VNET_HEADER + 12]] = came_from
        known = self._stations.get(target)
        if known is not None:
            return [known] if known is not came_from else []
        return [port for port in self.ports if port is not came_from]


def _relay(delay: float, switches: list[_Switch]) -> None:
    owner = {port: switch for switch in switches for port in switch.ports}
    waiting: deque[tuple[float, list[socket.socket], bytes]] = deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        # epoll would round its time-out up to a millisecond.
        for port in select.select(list(owner), [], [], pause)[0]:
            due = time.monotonic() + delay
            with contextlib.suppress(OSError):  # nothing more to read, or the cable is out
                for _ in range(64):
                    frame = port.recv(_LARGEST_FRAME)
                    waiting.append((due, owner[port].outlets(frame, port), frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, outlets, frame = waiting.popleft()
            for port in outlets:
                # A full queue or a cable that is out loses the frame, as a real switch does.
                with contextlib.suppress(OSError):
                    port.send(frame)


def main() -> None:
    """Open the ports, say ``up``, and relay until killed."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    switches = [_Switch(devices) for devices in sys.argv[2:]]
    sys.stdout.write("up\n")
    sys.stdout.flush()
    _relay(float(sys.argv[1]), switches)


if __name__ == "__main__":
    main()
