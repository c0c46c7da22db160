"""One non-blocking TCP flow between two ranks, framed, with a peer's death seen at once.

A frame is a 32-byte header (kind, chunk number and segment of it, fingerprint of the collective,
payload size) and a payload that is read straight into its destination. An ``ABORT`` frame carries
the text of the failure that ends the job, so that every rank can name the culprit.
"""

import contextlib
import errno
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Final, Protocol

from topo_ar.errors import ExecutionError

_HEADER: Final = struct.Struct("<IHHqqQ")
_MAGIC: Final = 0x544F504F
_BUFFER_NBYTES: Final = 4 << 20
_TEXT_LIMIT_NBYTES: Final = 4096
_WAKE_NBYTES: Final = 128 << 10


def frame_header(kind: int, segment: int, index: int, fingerprint: int, nbytes: int) -> bytes:
    """Return the header of a frame whose payload has `nbytes` bytes."""
    return _HEADER.pack(_MAGIC, kind, segment, index, fingerprint, nbytes)


class Kind(IntEnum):
    """What a frame carries."""

    EXCHANGE = 1
    CONTRIBUTION = 2
    RESULT = 3
    ABORT = 4
    GROUP = 5


_DATA: Final = (Kind.EXCHANGE, Kind.CONTRIBUTION, Kind.RESULT, Kind.GROUP)


class Receiver(Protocol):
    """Where arriving frames go."""

    def destination(
        self, flow: "Flow", kind: int, index: int, fingerprint: int, segment: int
    ) -> memoryview | None:
        """Return the memory for a frame, or None while its place is not free yet."""

    def arrived(self, flow: "Flow", kind: int, index: int) -> None:
        """Take note that a frame is complete."""


class Discard:
    """A receiver that is interested in reports only."""

    def destination(
        self, flow: "Flow", kind: int, index: int, fingerprint: int, segment: int
    ) -> memoryview | None:
        """Return memory that nobody reads."""
        return memoryview(bytearray(flow.size))

    def arrived(self, flow: "Flow", kind: int, index: int) -> None:
        """Take no note."""


class PeerGone(ExecutionError):  # noqa: N818 - an event that the loop turns into a message
    """A flow ended: the peer died or left, or only the connection broke."""


class BadFrame(ExecutionError):  # noqa: N818 - an event that the loop turns into a message
    """What came from a peer cannot be what it sent."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} sent a frame {what}", ranks=(rank,))


class Flow:
    """A connected socket to `rank`, with its outgoing queue and the frame it is receiving.

    Attributes
    ----------
    outstanding : int
        Frames that the schedule still expects from the peer.
    gated : bool
        A frame is waiting in the socket for its destination to become free.
    unexpected : bool
        `receive_known` met another frame than the one that it was to read.
    ended : bool
        The peer has said its last words, or the connection is gone.
    """

    def __init__(self, sock: socket.socket, rank: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_NBYTES)
        self.congestion_control = _prefer_cubic(sock)
        self.sock = sock
        self.rank = rank
        self.outstanding = 0
        self.gated = False
        self.ended = False
        self._queue: deque[tuple[memoryview, memoryview, Callable[[], None]]] = deque()
        self._sent_of_head = 0
        # Without headers, so that it can be compared with a plan to the byte.
        self.payload_nbytes_sent = 0
        self._low_water = 1
        self._header = bytearray(_HEADER.size)
        self._header_view = memoryview(self._header)
        self._header_fill = 0
        self._kind = 0
        self._segment = 0
        self._index = 0
        self._fingerprint = 0
        self._size = 0
        self._target: memoryview | None = None
        self._target_fill = 0
        self.unexpected = False
        self._put_back = b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for poll."""
        return self.sock.fileno()

    @property
    def size(self) -> int:
        """The bytes of the payload of the frame that is being received."""
        return self._size

    @property
    def segment(self) -> int:
        """The segment of the frame that is being received, or was received last."""
        return self._segment

    @property
    def wants_out(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._queue)

    def send(
        self,
        kind: Kind,
        index: int,
        fingerprint: int,
        payload: memoryview,
        done: Callable[[], None],
        segment: int = 0,
    ) -> None:
        """Queue a frame; `done` is called when its last byte has left `payload`."""
        self.queue(frame_header(kind, segment, index, fingerprint, payload.nbytes), payload, done)

    def queue(self, header: bytes, payload: memoryview, done: Callable[[], None]) -> None:
        """Queue a frame whose header is made."""
        self._queue.append((memoryview(header), payload, done))

    def flush(self) -> bool:
        """Send what the socket takes; return whether any byte moved."""
        moved = False
        while self._queue:
            header, payload, done = self._queue[0]
            sent = self._sent_of_head
            if sent < len(header):
                parts = [header[sent:], payload]
            else:
                parts = [payload[sent - len(header) :]]
            try:
                count = self.sock.sendmsg(parts)
            except BlockingIOError:
                return moved
            except OSError as error:
                raise self._last_words() or self._gone(error) from None
            moved = True
            self._sent_of_head = sent + count
            if self._sent_of_head == len(header) + payload.nbytes:
                self._sent_of_head = 0
                self.payload_nbytes_sent += payload.nbytes
                self._queue.popleft()
                done()
        return moved

    def receive(self, receiver: Receiver) -> bool:
        """Read at most one frame's worth of what has arrived; return whether any byte moved."""
        moved = False
        while self._header_fill < _HEADER.size:
            count = self._read_into(self._header_view[self._header_fill :])
            if count <= 0:
                return moved
            self._header_fill += count
            moved = True
            if self._header_fill == _HEADER.size:
                self._parse_header()
        if self._target is None:
            self._target = self._find_target(receiver)
            self.gated = self._target is None
            if self._target is None:
                return moved
        while self._target_fill < self._size:
            count = self._read_into(self._target[self._target_fill :])
            if count <= 0:
                self._wake_at(self._size - self._target_fill)
                return moved
            self._target_fill += count
            moved = True
        self._finish_frame(receiver)
        return True

    def receive_known(self, header: bytes, target: memoryview) -> bool:
        """Read on in the one frame that can come next; return whether it is whole.

        What has come of it, and any other frame, is left to `receive`.
        """
        while True:
            fill = self._header_fill
            try:
                if fill < _HEADER.size:
                    count = self.sock.recvmsg_into((self._header_view[fill:], target))[0]
                else:
                    count = self.sock.recv_into(target[self._target_fill :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._gone(error) from None
            if count == 0:
                raise self._gone(None)
            if fill < _HEADER.size:
                self._header_fill = min(_HEADER.size, fill + count)
                count -= self._header_fill - fill
                if self._header_fill < _HEADER.size:
                    continue
                self._parse_header()
                if self._header != header:
                    self._put_back, self.unexpected = bytes(target[:count]), True
                    return False
                self._target = target
            self._target_fill += count
            if self._target_fill == self._size:
                self._header_fill = self._target_fill = 0
                self._target = None
                return True

    def _wake_at(self, nbytes: int) -> None:
        # One wake-up for many segments instead of one for each.
        wanted = min(nbytes, _WAKE_NBYTES)
        if wanted != self._low_water:
            self._low_water = wanted
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _parse_header(self) -> None:
        magic, self._kind, self._segment, self._index, self._fingerprint, self._size = (
            _HEADER.unpack(self._header)
        )
        if magic != _MAGIC:
            raise BadFrame(
                self.rank,
                f"that is not ours (magic {magic:#x}); are all ranks on the same version of "
                "topo_ar?",
            )

    def _find_target(self, receiver: Receiver) -> memoryview | None:
        if self._kind == Kind.ABORT:
            return memoryview(bytearray(min(self._size, _TEXT_LIMIT_NBYTES)))
        if self._kind not in _DATA:
            raise BadFrame(self.rank, f"of the unknown kind {self._kind}")
        target = receiver.destination(
            self, self._kind, self._index, self._fingerprint, self._segment
        )
        if target is not None and target.nbytes != self._size:
            raise BadFrame(
                self.rank,
                f"of {self._size} bytes for chunk {self._index}, not of {target.nbytes}",
            )
        return target

    def _finish_frame(self, receiver: Receiver) -> None:
        self._wake_at(1)
        kind, index, target = self._kind, self._index, self._target
        self._header_fill = self._target_fill = 0
        self._target = None
        if kind == Kind.ABORT:
            assert target is not None
            raise self._aborted(target)
        self.outstanding -= 1
        receiver.arrived(self, kind, index)

    def _read_into(self, view: memoryview) -> int:
        if self._put_back:
            count = min(view.nbytes, len(self._put_back))
            view[:count] = self._put_back[:count]
            self._put_back = self._put_back[count:]
            return count
        try:
            count = self.sock.recv_into(view)
        except BlockingIOError:
            return -1
        except OSError as error:
            raise self._gone(error) from None
        if count == 0:
            raise self._gone(None)
        return count

    def _gone(self, error: OSError | None) -> PeerGone:
        self.ended = True
        cause = f" ({errno.errorcode.get(error.errno or 0, error)})" if error else ""
        return PeerGone(
            f"the connection to rank {self.rank} ended{cause}: it died, left or lost the network",
            ranks=(self.rank,),
        )

    def _aborted(self, text: bytes | bytearray | memoryview) -> "Aborted":
        self.ended = True
        return Aborted(bytes(text).decode(errors="replace"), ranks=(self.rank,))

    def _last_words(self) -> "Aborted | None":
        """Return the report that the peer sent before it left, if that lies unread."""
        unread = bytearray()
        with contextlib.suppress(OSError):
            while piece := self.sock.recv(_BUFFER_NBYTES):
                unread += piece
        at = 0
        if self._header_fill < _HEADER.size:
            unread = self._header[: self._header_fill] + unread
        else:
            at = self._size - self._target_fill
            if self._kind == Kind.ABORT and self._target is not None:
                said = bytes(self._target[: self._target_fill]) + unread[:at]
                return self._aborted(said)
        while at + _HEADER.size <= len(unread):
            _, kind, _, _, _, size = _HEADER.unpack_from(unread, at)
            at += _HEADER.size
            if kind == Kind.ABORT:
                return self._aborted(unread[at : at + size])
            at += size
        return None

    def queue_abort(self, text: str) -> None:
        """Drop what has not been begun and queue the reason why the job fails.

        A frame that is half sent is completed first, for the stream to stay readable.
        """
        if self._sent_of_head == 0:
            self._queue.clear()
        while len(self._queue) > 1:
            self._queue.pop()
        payload = memoryview(text.encode()[:_TEXT_LIMIT_NBYTES])
        self.send(Kind.ABORT, 0, 0, payload, lambda: None)

    def close(self) -> None:
        """Close the socket; what the kernel has taken is still delivered."""
        self.sock.close()


class Aborted(ExecutionError):  # noqa: N818 - an event, not an error of this rank
    """A peer, the one in `ranks`, reported the failure that ends the job; the text is its own."""


def abort_all(flows: Iterable[Flow], text: str, deadline_s: float = 1.0) -> None:
    """Tell the peers why the job fails, as far as `deadline_s` allows, and send no more.

    The sockets stay open: closing one with unread bytes would reset it and lose the text.
    """
    end = time.monotonic() + deadline_s
    flows = list(flows)
    for flow in flows:
        flow.queue_abort(text)
    stuck = [flow for flow in flows if not _flushed(flow)]
    while stuck and time.monotonic() < end:
        time.sleep(0.001)
        stuck = [flow for flow in stuck if not _flushed(flow)]
    for flow in flows:
        with contextlib.suppress(OSError):  # the peer was faster
            flow.sock.shutdown(socket.SHUT_WR)


def _flushed(flow: Flow) -> bool:
    with contextlib.suppress(PeerGone, Aborted):
        flow.flush()
        return not flow.wants_out
    return True


def _prefer_cubic(sock: socket.socket) -> str:
    # bbr shares one NIC unequally between parallel flows, and the slowest shard sets the time.
    with contextlib.suppress(OSError):  # refused: what the machine has is reported instead
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
