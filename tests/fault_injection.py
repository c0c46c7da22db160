"""Faults put into a running communicator of this process, by replacing what its pipeline calls."""

import ctypes
import os
import random
import socket
from collections.abc import Callable

from topo_ar.execution.communicator import Communicator
from topo_ar.execution.transports.tcp import Flow, Kind, frame_header

LANES = ("_copy_in", "_reduce", "_add", "_publish", "_copy_out")

Fault = Callable[[], None]


def before_chunk(made: Communicator, lane: str, chunk: int, fault: Fault) -> None:
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


def within_frame(made: Communicator, chunk: int, fault: Callable[[Flow], None]) -> None:
    """Call `fault` once, with a flow that has read a part of a frame of `chunk` or a later one."""
    armed = [True]
    for flow in made._job.flows.values():

        def reads(
            view: memoryview, flow: Flow = flow, read: Callable[..., int] = flow._read_into
        ) -> int:
            begun = flow._target is not None and flow._index >= chunk and view.nbytes > 1
            if not (armed[0] and begun):
                return read(view)
            count = read(view[: view.nbytes // 2])
            if count > 0:
                armed[0] = False
                fault(flow)
            return count

        flow._read_into = reads  # type: ignore[method-assign]


def fails(kind: type[Exception]) -> Fault:
    """Return a fault that raises `kind`."""

    def fault() -> None:
        raise kind("injected")

    return fault


def shut(flow: Flow) -> None:
    """End a connection in both directions, as a peer that goes would."""
    flow.sock.shutdown(socket.SHUT_RDWR)


def reset(flow: Flow) -> None:
    """Reset a connection, as a firewall does that forgot it: what is under way is lost."""
    unspecified = (ctypes.c_char * 16)()  # AF_UNSPEC is 0; Python's connect() does not know it
    if ctypes.CDLL(None, use_errno=True).connect(flow.fileno(), unspecified, 16):
        raise OSError(ctypes.get_errno(), "the connection could not be reset")


def _sends(flow: Flow, header: bytes) -> None:
    # Between two frames: what is put into one is only found out by a checksum.
    flow.queue(header, memoryview(bytes(8)), lambda: None)
    flow.flush()


def no_frame(flow: Flow) -> None:
    """Send what is no frame."""
    _sends(flow, os.urandom(32))


def frame_of_nobody(flow: Flow) -> None:
    """Send a frame of a chunk that nobody waits for."""
    _sends(flow, frame_header(Kind.RESULT, 0, 0, 0, 8))


def frame_of_unknown_kind(flow: Flow) -> None:
    """Send a frame of an unknown kind."""
    _sends(flow, frame_header(77, 0, 0, 0, 8))


BREAKS = (shut, reset, no_frame, frame_of_nobody, frame_of_unknown_kind)


def on_a_flow(made: Communicator, fault: Callable[[Flow], None], seed: int = 0) -> Fault:
    """Return a fault that does `fault` to one connection to another node, if there is one."""

    def done() -> None:
        flows = list(made._job.flows.values())
        if flows:
            fault(random.Random(seed).choice(flows))

    return done


STEPS_OF_A_LINE = ("_frees", "_brought", "_exchange", "_sleeps_until")


def on_the_line(made: Communicator, step: str, chunk: int, fault: Fault, *, after: bool) -> None:
    """Call `fault` once, before or after a step of `Straight` for `chunk` or a later one."""
    straight = made._loop._straight
    real = getattr(straight, step)

    def does(*arguments: object) -> object:
        if made._loop.pipeline.end < chunk:
            return real(*arguments)
        setattr(straight, step, real)
        if after:
            found = real(*arguments)
            fault()
            return found
        fault()
        return real(*arguments)

    if step == "_frees":
        straight._free = 0

        def frees(index: int) -> object:
            found = does(index)
            straight._free = 0
            return found

        straight._frees = frees  # type: ignore[method-assign]
    else:
        setattr(straight, step, does)
