"""Anonymous shared memory of one rank, and the proof that another rank is on the same host.

Each rank owns one memfd. A peer opens it through ``/proc/<pid>/fd/<fd>`` and reads back the random
token that its owner announced: only a process with the same kernel, pid namespace and user can, so
neither host names nor LOCAL_WORLD_SIZE are trusted. A memfd has no name and cannot leak.

Layout: one page of token and failure text, one page of counters (one cache line each), then
`STAGING_SLOTS` slots of input and `RESULT_SLOTS` slots of results.
"""

import mmap
import os
import secrets
import stat
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

FAILURE_NBYTES = 2048
STAGING_SLOTS = 3
# How many results of a node may be there before all its ranks have copied them out.
RESULT_WINDOW = 4
# A rank contributes to a chunk only when its node has copied out the one this many before it: a
# result that any rank of the job lacks is still whole on every node that has had it.
RESULT_SLOTS = 2 * RESULT_WINDOW
FINGERPRINT_SLOTS = 8

_PAGE = 4096
_TOKEN_NBYTES = 32
_TEXT_AT = 64
_WORDS_PER_LINE = 8


class Counter:
    """Indices of int64 words in the counter page; each has a cache line of its own.

    The first four only ever grow: the number of chunks that this rank has copied in, reduced (its
    shard), published (its shard of the result) and copied out, with its part of the result sent to
    the other nodes where they need it. Plain integers, because an enum's look-up would show in the
    event loop.
    """

    COPIED_IN: Final = 0 * _WORDS_PER_LINE
    REDUCED: Final = 1 * _WORDS_PER_LINE
    PUBLISHED: Final = 2 * _WORDS_PER_LINE
    COPIED_OUT: Final = 3 * _WORDS_PER_LINE
    ASLEEP: Final = 4 * _WORDS_PER_LINE
    FAILED: Final = 5 * _WORDS_PER_LINE
    REPORTS: Final = FAILED + 1
    FINGERPRINTS: Final = 6 * _WORDS_PER_LINE
    # Of the operations of groups: rounds that this rank has posted and read, both only growing, and
    # whether it waits for other nodes. One line: nobody else writes them.
    POSTED: Final = 7 * _WORDS_PER_LINE
    READ: Final = POSTED + 1
    ON_WIRE: Final = POSTED + 2
    SOURCES: Final = 8 * _WORDS_PER_LINE


# In the word ASLEEP beside the mask of counters: the rank sleeps on the word, not on its pipe.
FUTEX: Final = 1 << 1

HOST_ID_ENV = "TOPO_AR_HOSTID"


class Card(msgspec.Struct, frozen=True):
    """What a rank tells all others so that those on its host find its memory and wake it.

    `host_id` is the value of ``TOPO_AR_HOSTID``: ranks with different values count as being on
    different hosts even where they could share memory.
    """

    host_id: str
    pid: int
    memory_fd: int
    wake_fd: int
    token: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A mapped segment, one's own or a peer's."""

    memory: mmap.mmap
    words: "memoryview[int]"
    slots: list[NDArray[np.uint8]]

    def staging(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes of the input slot that chunk number `index` uses."""
        return self.slots[index % STAGING_SLOTS]

    def result(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes of the result slot that chunk number `index` uses."""
        return self.slots[STAGING_SLOTS + index % RESULT_SLOTS]

    def message(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes for the message of round `index` of a group: half the input slots.

        They are the pipeline's while it has chunks.
        """
        nbytes = STAGING_SLOTS * self.slots[0].nbytes // 2
        return np.frombuffer(self.memory, np.uint8, nbytes, 2 * _PAGE + index % 2 * nbytes)

    def write_failure(self, data: bytes) -> None:
        """Leave at most `FAILURE_NBYTES` bytes for the peers and raise the FAILED flag."""
        count = self.words[Counter.REPORTS] + 1
        self.words[Counter.FAILED] = 0
        self.memory[_TEXT_AT : _TEXT_AT + 2] = len(data).to_bytes(2, "little")
        self.memory[_TEXT_AT + 2 : _TEXT_AT + 2 + len(data)] = data
        self.words[Counter.REPORTS] = self.words[Counter.FAILED] = count

    def read_failure(self) -> bytes | None:
        """Return what the segment's owner left while its FAILED flag is up, else None."""
        count = self.words[Counter.FAILED]
        if not count:
            return None
        length = int.from_bytes(self.memory[_TEXT_AT : _TEXT_AT + 2], "little")
        data = self.memory[_TEXT_AT + 2 : _TEXT_AT + 2 + length]
        # A second report may have been written meanwhile.
        return data if self.words[Counter.FAILED] == count else None

    def clear_failure(self) -> None:
        """Lower the FAILED flag: the job goes on without what failed."""
        self.words[Counter.FAILED] = 0

    @property
    def asleep_at(self) -> int:
        """The address of the word ASLEEP in this process."""
        words: int = np.frombuffer(self.words, np.int64).ctypes.data
        return words + 8 * Counter.ASLEEP

    def close(self) -> None:
        """Unmap; views that are still held keep the mapping until they go."""
        self.words.release()
        self.slots.clear()
        try:
            self.memory.close()
        except BufferError:  # a numpy view outlives us; the mapping goes with it
            return


def segment_nbytes(slot_nbytes: int) -> int:
    """Return the size of a segment; pages are only taken from memory when first touched."""
    return 2 * _PAGE + (STAGING_SLOTS + RESULT_SLOTS) * slot_nbytes


def _mapped(fd: int, slot_nbytes: int) -> Segment:
    memory = mmap.mmap(fd, segment_nbytes(slot_nbytes))
    words = memoryview(memory)[_PAGE : 2 * _PAGE].cast("q")
    slots = [
        np.frombuffer(memory, np.uint8, slot_nbytes, 2 * _PAGE + slot * slot_nbytes)
        for slot in range(STAGING_SLOTS + RESULT_SLOTS)
    ]
    return Segment(memory, words, slots)


class Owned:
    """One's own segment and wake pipe, with the card that announces them.

    Parameters
    ----------
    slot_nbytes : int
        Capacity of a slot in bytes: no chunk may be larger.
    """

    def __init__(self, slot_nbytes: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.memory_fd = os.memfd_create("topo_ar", os.MFD_CLOEXEC)
        os.ftruncate(self.memory_fd, segment_nbytes(slot_nbytes))
        token = secrets.token_bytes(_TOKEN_NBYTES)
        os.pwrite(self.memory_fd, token, 0)
        self.segment = _mapped(self.memory_fd, slot_nbytes)
        self.wake_read_fd, self.wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        host_id = os.environ.get(HOST_ID_ENV, "")
        self.card = Card(host_id, os.getpid(), self.memory_fd, self.wake_write_fd, token.hex())

    def close(self) -> None:
        """Release the memory and the pipe."""
        self.segment.close()
        for fd in (self.memory_fd, self.wake_read_fd, self.wake_write_fd):
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Peer:
    """A co-located rank: its segment, the pipe that wakes it, and a descriptor of its process."""

    rank: int
    segment: Segment
    wake_fd: int
    pid_fd: int

    def close(self) -> None:
        """Release what was opened."""
        self.segment.close()
        os.close(self.wake_fd)
        os.close(self.pid_fd)


def open_peer(rank: int, card: Card, slot_nbytes: int) -> Peer | None:
    """Map the segment that `card` announces, or return None when it is not on this host.

    A pid may name another process here, so the descriptor is only trusted once it is a regular
    file of the right size that holds the token.
    """
    if card.host_id != os.environ.get(HOST_ID_ENV, ""):
        return None
    path = f"/proc/{card.pid}/fd/{card.memory_fd}"
    fd = wake_fd = pid_fd = -1
    try:
        pid_fd = os.pidfd_open(card.pid)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != segment_nbytes(slot_nbytes):
            raise OSError
        if status.st_uid != os.geteuid():  # who may open it all the same is privileged
            raise OSError
        if os.pread(fd, _TOKEN_NBYTES, 0).hex() != card.token:
            raise OSError
        wake_fd = os.open(
            f"/proc/{card.pid}/fd/{card.wake_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )
        segment = _mapped(fd, slot_nbytes)
    except OSError:
        for opened in (wake_fd, pid_fd):
            if opened >= 0:
                os.close(opened)
        return None
    finally:
        if fd >= 0:
            os.close(fd)
    return Peer(rank, segment, wake_fd, pid_fd)
