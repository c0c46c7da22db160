"""Connecting the flows of a job: every pair once, proved by a nonce of this job."""

import contextlib
import socket
import struct
import time
from collections.abc import Iterable

from topo_ar.errors import ExecutionError
from topo_ar.execution.transports.tcp import Flow

NONCE_NBYTES = 16
_HELLO = struct.Struct(f"<{NONCE_NBYTES}sI")


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of `address`."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def connect(
    listener: socket.socket,
    rank: int,
    peers: Iterable[int],
    addresses: dict[int, tuple[str, int]],
    nonce: bytes,
    deadline_s: float,
) -> dict[int, Flow]:
    """Return one flow to every rank of `peers`; the lower rank of a pair calls the higher.

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
        for peer in sorted(peers):
            if peer < rank:
                waiting.add(peer)
                continue
            sock = _call(addresses[peer], peer, end)
            sock.sendall(_HELLO.pack(nonce, rank))
            flows[peer] = Flow(sock, peer)
        while waiting:
            peer, sock = _accept(listener, nonce, waiting, end)
            waiting.remove(peer)
            flows[peer] = Flow(sock, peer)
    except BaseException:
        for flow in flows.values():
            flow.close()
        raise
    return flows


def _call(address: tuple[str, int], peer: int, end: float) -> socket.socket:
    try:
        return socket.create_connection(address, timeout=max(0.1, end - time.monotonic()))
    except OSError as error:
        raise ExecutionError(
            f"rank {peer} at {address[0]}:{address[1]} cannot be reached: {error}; name the "
            "interface that joins the nodes in GLOO_SOCKET_IFNAME",
            ranks=(peer,),
        ) from None


def _accept(
    listener: socket.socket, nonce: bytes, waiting: set[int], end: float
) -> tuple[int, socket.socket]:
    while True:
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise ExecutionError(
                f"ranks {sorted(waiting)} did not connect to {listener.getsockname()[0]} in time",
                ranks=waiting,
            )
        listener.settimeout(remaining)
        with contextlib.suppress(TimeoutError):
            sock, _ = listener.accept()
            sock.settimeout(min(5.0, remaining))
            hello = b""
            with contextlib.suppress(OSError):
                hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                theirs, peer = _HELLO.unpack(hello)
                if theirs == nonce and peer in waiting:
                    return peer, sock
            sock.close()
