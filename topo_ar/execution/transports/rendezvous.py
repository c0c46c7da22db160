"""Connecting the flows of a job: every pair once, proved by a nonce of this job."""

import contextlib
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topo_ar.errors import ExecutionError
from topo_ar.execution.network import Nic
from topo_ar.execution.transports.tcp import Flow

NONCE_NBYTES = 16
_HELLO = struct.Struct(f"<{NONCE_NBYTES}sI")


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
) -> dict[int, Flow]:
    """Return one flow to every rank of `ways`; the lower rank of a pair calls the higher.

    A connection that does not present this job's `nonce` is dropped, so that a stray process or a
    former run of the job cannot take a place.

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
        while waiting:
            peer, sock = _accept(listeners, nonce, waiting, end)
            waiting.remove(peer)
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
    listeners: Sequence[socket.socket], nonce: bytes, waiting: set[int], end: float
) -> tuple[int, socket.socket]:
    by_fd = {listener.fileno(): listener for listener in listeners}
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while True:
        remaining = end - time.monotonic()
        if remaining <= 0:
            addresses = ", ".join(listener.getsockname()[0] for listener in listeners)
            raise ExecutionError(
                f"ranks {sorted(waiting)} did not connect to {addresses} in time", ranks=waiting
            )
        for fd, _ in poll.poll(1e3 * remaining):
            by_fd[fd].settimeout(remaining)  # who called may have gone
            try:
                sock, _ = by_fd[fd].accept()
            except OSError:
                continue
            sock.settimeout(min(5.0, remaining))
            hello = b""
            with contextlib.suppress(OSError):
                hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                theirs, peer = _HELLO.unpack(hello)
                if theirs == nonce and peer in waiting:
                    return peer, sock
            sock.close()
