"""Faults put into a running communicator of this process, by replacing what its pipeline calls."""

import socket
from collections.abc import Callable

from topo_ar.execution.communicator import Communicator

LANES = ("_copy_in", "_reduce", "_add", "_publish", "_copy_out")


def before_chunk(made: Communicator, lane: str, chunk: int, fault: Callable[[], None]) -> None:
    """Call `fault` once, when `lane` is about to move chunk number `chunk` or a later one."""
    pipeline = made._loop.pipeline
    position = {
        "_copy_in": "next_in",
        "_reduce": "next_reduce",
        "_add": "next_add",
        "_publish": "next_publish",
        "_copy_out": "next_out",
    }[lane]
    move = getattr(pipeline, lane)

    def moves() -> bool:
        if getattr(pipeline, position) >= chunk:
            setattr(pipeline, lane, move)
            fault()
        return bool(move())

    setattr(pipeline, lane, moves)


def fails(kind: type[Exception]) -> Callable[[], None]:
    """Return a fault that raises `kind`."""

    def fault() -> None:
        raise kind("injected")

    return fault


def breaks_flow(made: Communicator) -> Callable[[], None]:
    """Return a fault that breaks the first connection to another node, if there is one."""

    def fault() -> None:
        for flow in made._job.flows.values():
            flow.sock.shutdown(socket.SHUT_RDWR)
            return

    return fault
