"""One end of the self-check's TCP connection: ping-pong, then a copy in both directions at once.

``python -I -S endpoint.py serve|connect ADDRESS PORT SECONDS``. Prints ``ready`` when it listens
and a line of JSON at the end: ``received`` bytes/s and, from the connecting end, the round trips in
seconds, the share of the CPUs that was busy, and the congestion control of its socket. Standard
library only, so that it starts in a few milliseconds.
"""

import json
import select
import socket
import sys
import time

_PINGS = 50
_WARM_UP = 0.25
_DEADLINE = 20.0
_PIECE = 1 << 18


def _cpu_seconds() -> tuple[int, int]:
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _round_trips(peer: socket.socket, first: bool) -> list[float]:
    trips = []
    for _ in range(_PINGS):
        begun = time.perf_counter()
        if first:
            peer.sendall(b"x")
        if not peer.recv(1):
            raise ConnectionError("the peer ended during the ping-pong")
        if not first:
            peer.sendall(b"x")
        trips.append(time.perf_counter() - begun)
    return sorted(trips)


def _copy(peer: socket.socket, seconds: float) -> float:
    """Send and receive for `seconds` and return the received bytes/s, slow start left out."""
    data, space = memoryview(bytes(_PIECE)), bytearray(_PIECE)
    peer.setblocking(False)
    begun = time.monotonic()
    first = last = 0.0
    received, sending = 0, True
    while True:
        ready, writable, _ = select.select([peer], [peer] if sending else [], [], _DEADLINE)
        now = time.monotonic()
        if not ready and not writable:
            raise TimeoutError("the peer is silent")
        if sending and now - begun >= seconds:
            sending = False
            peer.shutdown(socket.SHUT_WR)
        elif writable:
            peer.send(data)
        if ready:
            count = peer.recv_into(space)
            if not count:
                break
            if now - begun >= _WARM_UP * seconds and now - begun <= seconds:
                received += count if first else 0
                first, last = first or now, now
    return received / (last - first) if last > first else 0.0


def _open(role: str, address: str, port: int) -> socket.socket:
    if role == "connect":
        return socket.create_connection((address, port), _DEADLINE)
    with socket.create_server((address, port)) as server:
        server.settimeout(_DEADLINE)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        return server.accept()[0]


def main() -> None:
    """Run the role named on the command line."""
    role, address, port, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    with _open(role, address, port) as peer:
        peer.settimeout(_DEADLINE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = _round_trips(peer, first=role == "connect")
        control = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        total, idle = _cpu_seconds()
        received = _copy(peer, seconds) if seconds > 0 else 0.0
        total, idle = (now - then for now, then in zip(_cpu_seconds(), (total, idle), strict=True))
    result = {
        "received": received,
        "round_trips": trips,
        "cpu_busy": (total - idle) / total if total else 0.0,
        "congestion_control": control.rstrip(b"\0").decode(),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
