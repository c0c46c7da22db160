"""What a benchmark and the ranks of another library tell each other: one JSON object a line.

Those ranks are a job of their own. Each connects to the benchmark, says who it is, and then waits
in ``read`` for orders, so that it costs nothing while others are measured. Never imports torch.
"""

import socket
import time
from collections.abc import Callable

import msgspec

PEER_ENV = "TOPO_AR_BENCH_PEER"
# The benchmark's ranks may need this long to start, on a machine that is starting both jobs.
CONNECT_SECONDS = 120.0
_RETRY_SECONDS = 0.05


class PeerPlace(msgspec.Struct, frozen=True):
    """Where the ranks of a library find the benchmark; `token` tells them from strangers."""

    name: str
    address: str
    port: int
    token: str


class Hello(msgspec.Struct, frozen=True):
    """A rank's first line."""

    token: str
    rank: int


class Order(msgspec.Struct, frozen=True):
    """All-reduces to be made by every rank: `calls` timed ones after `warmup` others and a pause.

    With `check` one all-reduce of known numbers is looked at instead. A rank that has not finished
    after `deadline_seconds` ends itself.
    """

    nbytes: int
    calls: int
    warmup: int
    pause_seconds: float
    dtype: str
    op: str
    check: bool
    deadline_seconds: float


class Answer(msgspec.Struct, frozen=True):
    """What every rank answers: its seconds and CPU seconds a call, how many elements are wrong."""

    seconds: float
    cpu_seconds: float
    wrong: int


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send `message` as one line."""
    connection.sendall(msgspec.json.encode(message) + b"\n")


def serve(place: PeerPlace, rank: int, obey: Callable[[Order], Answer]) -> None:
    """Connect as `rank`, obey one order after the other, and return when there are no more.

    Raises
    ------
    OSError
        If the benchmark cannot be reached.
    """
    with _connect(place) as connection:
        send(connection, Hello(place.token, rank))
        with connection.makefile("rb") as lines:
            for line in lines:
                send(connection, obey(msgspec.json.decode(line, type=Order)))


def _connect(place: PeerPlace) -> socket.socket:
    limit = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = socket.create_connection((place.address, place.port), CONNECT_SECONDS)
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
