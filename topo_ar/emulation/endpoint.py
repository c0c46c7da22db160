"""One end of the self-check's TCP connection: ping-pong, then a copy each way.

``python -I -S endpoint.py serve|connect ADDRESS PORT SECONDS PACE``. Prints ``ready`` when it
listens and, at the end, a line of JSON: ``received`` bytes/s, the round trips in seconds, the share
of the CPUs that was busy, and the congestion control of its socket. Standard library only, so that
it starts in a few milliseconds.
"""

import json
import socket
import sys
import time

_PINGS = 50
_WARM_UP = 0.3
_DEADLINE = 20.0
_PIECE = 1 << 16
_SO_MAX_PACING_RATE = 47


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


def _send(peer: socket.socket, seconds: float) -> None:
    data = bytes(_PIECE)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)


def _receive(peer: socket.socket, seconds: float) -> float:
    """Return the bytes/s that arrive until the peer ends, without the start."""
    space = bytearray(_PIECE)
    if not peer.recv_into(space):
        return 0.0
    begun = time.monotonic()
    first = last = 0.0
    received = 0
    while count := peer.recv_into(space):
        now = time.monotonic()
        if first:
            received += count
            last = now
        elif now - begun >= _WARM_UP * seconds:
            first = now
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
    role, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    seconds, pace = float(sys.argv[4]), int(sys.argv[5])
    with _open(role, address, port) as peer:
        peer.settimeout(_DEADLINE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Slow start would flood the bucket's queue, and recover for longer than the copy lasts.
        peer.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace)
        trips = _round_trips(peer, first=role == "connect")
        control = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        total, idle = _cpu_seconds()
        if role == "connect":
            _send(peer, seconds)
        received = _receive(peer, seconds)
        if role == "serve":
            _send(peer, seconds)
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
