"""Connecting the flows of a job: every pair once, proved by a nonce of this job."""

import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from topo_ar.errors import ExecutionError
from topo_ar.execution.network import Nic
from topo_ar.execution.transports.tcp import Flow

NONCE_NBYTES = 16
_HELLO = struct.Struct(f"<{NONCE_NBYTES}sI")
_MOST_SILENT = 256
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Way:
    """Where a peer listens, and from which NIC to call it; None leaves that to the system."""

    address: str
    port: int
    source: Nic | None = None


def listen(nic: Nic) -> socket.socket:
    """Return a socket that listens on a free port of `nic`."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        nic.bind(listener)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(
    listeners: Sequence[socket.socket],
    rank: int,
    ways: Mapping[int, Way],
    nonce: bytes,
    deadline_s: float,
    look: Callable[[], None] = lambda: None,
) -> dict[int, Flow]:
    """Return one flow to every rank of `ways`; the lower rank of a pair calls the higher.

    A connection that does not present this job's `nonce` is dropped, so that a stray process or a
    former run of the job cannot take a place. `look` is called now and then, and may raise.

    Raises
    ------
    ExecutionError
        If a peer does not connect within `deadline_s` seconds; names the ranks and addresses.
    """
    end = time.monotonic() + deadline_s
    flows: dict[int, Flow] = {}
    waiting = set()
    try:
        for peer in sorted(ways):
            if peer < rank:
                waiting.add(peer)
                continue
            sock = _call(ways[peer], peer, end)
            sock.sendall(_HELLO.pack(nonce, rank))
            flows[peer] = Flow(sock, peer)
        for peer, sock in _accept(listeners, nonce, waiting, end, look):
            flows[peer] = Flow(sock, peer)
    except BaseException:
        for flow in flows.values():
            flow.close()
        raise
    return flows


def _call(way: Way, peer: int, end: float) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if way.source is not None:
            way.source.bind(sock)
        sock.settimeout(max(0.1, end - time.monotonic()))
        sock.connect((way.address, way.port))
        return sock
    except OSError as error:
        sock.close()
        by = f" from {way.source.name}" if way.source else ""
        raise ExecutionError(
            f"rank {peer} at {way.address}:{way.port} cannot be reached{by}: {error}; name the "
            "interface that joins the nodes in GLOO_SOCKET_IFNAME, or those in "
            "TOPO_AR_SOCKET_IFNAME",
            ranks=(peer,),
        ) from None


def _accept(
    listeners: Sequence[socket.socket],
    nonce: bytes,
    waiting: set[int],
    end: float,
    look: Callable[[], None],
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the connections of the ranks in `waiting`, whoever else calls meanwhile.

    All callers are heard at once: one that says nothing keeps nobody else waiting.
    """
    callers = Callers(listeners)
    try:
        while waiting:
            look()
            if end <= time.monotonic():
                addresses = ", ".join(listener.getsockname()[0] for listener in listeners)
                raise ExecutionError(
                    f"ranks {sorted(waiting)} did not connect to {addresses} in time",
                    ranks=waiting,
                )
            for hello, sock in callers.hear(min(end, time.monotonic() + _LOOK_S)):
                theirs, peer = _HELLO.unpack(hello)
                if secrets.compare_digest(theirs, nonce) and peer in waiting:
                    waiting.remove(peer)
                    yield peer, sock
                else:
                    sock.close()
    finally:
        callers.close()


class Callers:
    """Those who have called and not yet said who they are.

    Parameters
    ----------
    listeners : sequence of socket
        Where they call.
    """

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._silent: dict[int, tuple[socket.socket, bytearray]] = {}
        self._poll = select.poll()
        for listener in listeners:
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)

    def hear(self, end: float) -> Iterator[tuple[bytes, socket.socket]]:
        """Wait until `end` for somebody to call or speak; yield those who have said enough."""
        for fd, _ in self._poll.poll(1e3 * max(0.0, end - time.monotonic())):
            if fd in self._listeners:
                self._answer(self._listeners[fd])
                continue
            if fd not in self._silent:  # hung up on meanwhile
                continue
            sock, said = self._silent[fd]
            try:
                piece = sock.recv(_HELLO.size - len(said))
            except BlockingIOError:
                continue
            except OSError:
                piece = b""
            said += piece
            if not piece:
                self._forget(fd).close()
            elif len(said) == _HELLO.size:
                yield bytes(said), self._forget(fd)

    def _answer(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # who called has gone
            return
        if len(self._silent) >= _MOST_SILENT:
            # Peers speak as soon as they have called: the first is a stranger.
            self._forget(next(iter(self._silent))).close()
        sock.setblocking(False)
        self._silent[sock.fileno()] = (sock, bytearray())
        self._poll.register(sock, select.POLLIN)

    def _forget(self, fd: int) -> socket.socket:
        self._poll.unregister(fd)
        return self._silent.pop(fd)[0]

    def close(self) -> None:
        """Hang up on all who have said nothing."""
        for sock, _ in self._silent.values():
            sock.close()
