"""Strangers that call while a job is being set up: they neither get in nor hold it up."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.jobs import blocks, communicator
from topo_ar.errors import ExecutionError
from topo_ar.execution import job
from topo_ar.execution.network import Nic
from topo_ar.execution.transports import segment
from topo_ar.execution.transports.rendezvous import Way, connect, listen
from topo_ar.execution.transports.segment import Owned, open_peer

NONCE = bytes(range(16))
RESET = struct.pack("ii", 1, 0)
LOOPBACK = Nic("lo", "127.0.0.1")
Address = tuple[str, int]


def _call(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=5.0)


def _silent(address: Address) -> list[socket.socket]:
    """Slow loris: connections that say nothing, or not enough."""
    socks = [_call(address) for _ in range(40)]
    for sock in socks[::2]:
        sock.sendall(NONCE)
    return socks


def _scan(address: Address) -> list[socket.socket]:
    """A port scan: connections that go at once, half of them by a reset."""
    for turn in range(40):
        sock = _call(address)
        if turn % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        sock.close()
    return []


def _wrong_nonce(address: Address) -> list[socket.socket]:
    socks = [_call(address) for _ in range(10)]
    for sock in socks:
        sock.sendall(os.urandom(16) + (0).to_bytes(4, "little"))
    return socks


def _not_awaited(address: Address) -> list[socket.socket]:
    """The right nonce with a rank that nobody waits for, as of a former run's other group."""
    socks = [_call(address) for _ in range(10)]
    for rank, sock in enumerate(socks, start=7):
        sock.sendall(NONCE + rank.to_bytes(4, "little"))
    return socks


def _chatter(address: Address) -> list[socket.socket]:
    """Another protocol, a lot of it."""
    socks = [_call(address) for _ in range(3)]
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET / HTTP/1.1\r\n" * 5000)
    return socks


STRANGERS = [_silent, _scan, _wrong_nonce, _not_awaited, _chatter]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__)
def test_strangers_do_not_get_in(stranger: Callable[[Address], list[socket.socket]]) -> None:
    with listen(LOOPBACK) as listener:
        address = listener.getsockname()
        there = stranger(address)
        found: dict[int, object] = {}

        def lower() -> None:
            found.update(connect([], 0, {1: Way(*address)}, NONCE, 10.0))

        caller = threading.Thread(target=lower)
        caller.start()
        begin = time.monotonic()
        flows = connect([listener], 1, {0: Way(*address)}, NONCE, 10.0)
        seconds = time.monotonic() - begin
        caller.join()
        assert set(flows) == {0}
        assert flows[0].sock.getpeername() == found[1].sock.getsockname()
        assert seconds < 9.0  # at the deadline it would have failed
        for end in (*flows.values(), *found.values(), *there):
            end.close()


def test_more_silent_strangers_than_are_kept_do_not_lock_out_the_peer() -> None:
    with listen(LOOPBACK) as listener:
        address = listener.getsockname()
        there = [_call(address) for _ in range(400)]
        caller = threading.Timer(0.2, lambda: there.append(_call(address)))
        caller.start()
        peer = threading.Timer(
            0.4, lambda: found.update(connect([], 0, {1: Way(*address)}, NONCE, 10.0))
        )
        found: dict[int, object] = {}
        peer.start()
        flows = connect([listener], 1, {0: Way(*address)}, NONCE, 10.0)
        peer.join()
        caller.join()
        for end in (*flows.values(), *found.values(), *there):
            end.close()


def test_strangers_alone_do_not_keep_a_rank_beyond_its_deadline() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with listen(LOOPBACK) as listener:
        address = listener.getsockname()
        there = [sock for stranger in STRANGERS for sock in stranger(address)]
        begin = time.monotonic()
        with pytest.raises(ExecutionError, match=r"ranks \[0\] did not connect to 127.0.0.1"):
            connect([listener], 1, {0: Way(*address)}, NONCE, 0.5)
        assert time.monotonic() - begin < 4.0
        for sock in there:
            sock.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_another_user_is_not_taken_for_a_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = Owned(4096)
    monkeypatch.setattr(segment.os, "geteuid", lambda: os.getuid() + 1)
    assert open_peer(1, owned.card, 4096) is None
    monkeypatch.undo()
    peer = open_peer(1, owned.card, 4096)
    assert peer is not None
    peer.close()
    owned.close()


def _harassed(rank: int, world_size: int, hosts: list[int]) -> tuple[float, int]:
    there: list[socket.socket] = []

    def harassed_listen(nic: Nic) -> socket.socket:
        listener = listen(nic)
        for stranger in STRANGERS:
            there.extend(stranger(listener.getsockname()))
        return listener

    job.listen = harassed_listen
    try:
        with communicator(rank, hosts, plan="hierarchical") as made:
            total = float(made.all_reduce(torch.ones(100_000)).wait()[-1])
            flows = len(made._job.flows)
    finally:
        job.listen = listen
        for sock in there:
            sock.close()
    return total, flows


def test_a_job_is_set_up_among_strangers(ranks) -> None:
    found = ranks.run(_harassed, 4, blocks(2, 2))
    assert [total for total, _ in found] == [4.0] * 4
    assert all(flows in (1, 2) for _, flows in found)
