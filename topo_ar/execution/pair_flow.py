"""One TCP connection between two ranks: a ping-pong, and a flow that its receiver clocks."""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import numpy as np

from topo_ar.errors import ExecutionError

_BLOCK = 64 << 10
_UNSENT = 128 << 10
_RAMP = 0.35
_STRETCHES = 25
_MOST_PINGS = 400


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure and the interquartile range of what it was taken from."""

    value: float
    spread: float


@contextlib.contextmanager
def _words(peer: int, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExecutionError(f"rank {peer} failed while {doing}: {error}", ranks=(peer,)) from None


class PairFlow:
    """A connected socket to rank `peer`, every operation on it with a deadline.

    Parameters
    ----------
    sock : socket
        The connection; the flow closes it.
    peer : int
        Whom errors name.
    deadline_s : float
        For one ping or one block of 64 KiB.
    """

    def __init__(self, sock: socket.socket, peer: int, deadline_s: float) -> None:
        sock.settimeout(deadline_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Little may wait unsent, so that a flow ends soon after its time on a slow link as well.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        self._sock = sock
        self._peer = peer

    def __enter__(self) -> "PairFlow":
        return self

    def __exit__(self, *error: object) -> None:
        self._sock.close()

    def ping(self, seconds: float) -> Spread:
        """Return half of the round trips of one byte in seconds; the peer answers with `pong`."""
        trips: list[float] = []
        begun = time.perf_counter()
        with _words(self._peer, "answering pings"):
            while len(trips) < 5 or (
                len(trips) < _MOST_PINGS and time.perf_counter() - begun < seconds
            ):
                sent = time.perf_counter()
                self._sock.sendall(b"p")
                self._read(memoryview(bytearray(1)))
                trips.append((time.perf_counter() - sent) / 2)
            self._sock.sendall(b"e")
        return _spread(trips)

    def pong(self) -> None:
        """Answer pings until the peer ends."""
        byte = bytearray(1)
        with _words(self._peer, "pinging"):
            while True:
                self._read(memoryview(byte))
                if byte == b"e":
                    return
                self._sock.sendall(byte)

    def send(self, seconds: float, most: int) -> None:
        """Send for some `seconds` or about `most` bytes, and wait until the peer has them all."""
        block = bytearray(_BLOCK)
        sent = 0
        end = time.perf_counter() + seconds
        with _words(self._peer, "receiving a flow"):
            while not block[0]:
                sent += _BLOCK
                block[0] = sent >= most or time.perf_counter() >= end
                self._sock.sendall(block)
            self._read(memoryview(bytearray(1)))

    def receive(self) -> Spread:
        """Return the bytes/s at which the peer's flow arrives, without its start."""
        block = memoryview(bytearray(_BLOCK))
        marks: list[tuple[float, int]] = []
        total = 0
        with _words(self._peer, "sending a flow"):
            while not block[0] or total % _BLOCK:
                count = self._sock.recv_into(block[total % _BLOCK :])
                if not count:
                    raise OSError("it closed the connection")
                total += count
                marks.append((time.perf_counter(), total))
            self._sock.sendall(b"k")
        return rate_of(marks)

    def _read(self, view: memoryview) -> None:
        if not self._sock.recv_into(view):
            raise OSError("it closed the connection")


def rate_of(marks: Sequence[tuple[float, int]]) -> Spread:
    """Return the rate of a flow from (seconds, bytes so far) at each arrival.

    The first third is left out: there a flow still grows, and a shaped link spends its credit. The
    rate is the median over all stretches of half of what is left, so that a moment in which the
    receiver did not read, and the rush after it, count little.
    """
    times = np.array([seconds for seconds, _ in marks])
    begin = times[0] + _RAMP * (times[-1] - times[0])
    half = (times[-1] - begin) / 2
    if half <= 0:
        # All of it came at once; the clock's tick bounds what can be said.
        return Spread(marks[-1][1] / time.get_clock_info("perf_counter").resolution, 0.0)
    starts = begin + half * np.linspace(0, 1, _STRETCHES)
    nbytes = np.array([total for _, total in marks], dtype=float)
    gained = np.interp(starts + half, times, nbytes) - np.interp(starts, times, nbytes)
    return _spread((gained / half).tolist())


def _spread(values: list[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0] if values else 0.0, 0.0)
    low, _, high = quantiles(values, n=4)
    return Spread(median(values), high - low)
