"""Buffers that co-located ranks read where they lie, so that nobody copies them in.

Torch moves the storage of a tensor into shared memory, and each rank of the node maps it through
``/proc/<pid>/fd``. Peers only read: a chunk of the buffer stays input until all owners have
published their part of its result, so each chunk is at any time either untouched or final.
"""

import logging
import mmap
import os
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from topo_ar.execution.gather import Channel
from topo_ar.execution.torch_private import share_memory
from topo_ar.execution.transports.shm import Node

logger = logging.getLogger("topo_ar")

STAGED = 0
_OFFSET_BITS = 40
_MOST_KEPT = 256
# What must stay free in /dev/shm: others use it too.
_SPARE_NBYTES = 64 << 20


class _Offer(msgspec.Struct, frozen=True):
    """What a rank tells those on its host; ``fd`` -1 where it keeps its buffer to itself."""

    pid: int
    fd: int
    nbytes: int


@dataclass(slots=True)
class _Shared:
    number: int
    storage: torch.UntypedStorage  # held: its address means this buffer as long as it is here


class SharedInputs:
    """The shared buffers of one rank, and its views of those of its co-located peers.

    Parameters
    ----------
    channel : Channel
        All ranks of the job.
    node : Node
        The co-located ones.
    """

    def __init__(self, channel: Channel, node: Node) -> None:
        self._channel = channel
        self._node = node
        self._mine: dict[int, _Shared] = {}
        self._views: list[list[NDArray[np.uint8] | None]] = []
        self._told = False

    def offer(self, tensor: torch.Tensor) -> int:
        """Move the storage of `tensor` into shared memory; return a descriptor for `register`.

        -1 where that is not possible here: the buffer is then copied in as others are.
        """
        storage = tensor.untyped_storage()
        if not self._node.peers or len(self._mine) >= _MOST_KEPT:
            return -1
        if not storage.is_shared():
            try:
                free = os.statvfs("/dev/shm")
            except OSError:
                return -1
            if storage.nbytes() + _SPARE_NBYTES > free.f_bavail * free.f_frsize:
                return self._not_shared(
                    f"/dev/shm is too small to share a buffer of {storage.nbytes()} bytes"
                )
        try:
            return share_memory(storage)
        except RuntimeError as error:
            return self._not_shared(str(error))

    def _not_shared(self, why: str) -> int:
        level = logging.INFO if self._told else logging.WARNING
        logger.log(level, "%s; what is not shared is copied in", why)
        self._told = True
        return -1

    def register(self, tensor: torch.Tensor, fd: int) -> None:
        """Map the buffers that all ranks offer. Collective, on the communication thread.

        Raises
        ------
        ExecutionError
            If a rank is gone.
        """
        storage = tensor.untyped_storage()
        offer = _Offer(os.getpid(), fd, storage.nbytes())
        said = self._channel.all_gather(msgspec.json.encode(offer))
        offers = [msgspec.json.decode(said[rank], type=_Offer) for rank in self._node.ranks]
        views = [
            None if rank == self._channel.rank else _mapped(offer)
            for rank, offer in zip(self._node.ranks, offers, strict=True)
        ]
        # A rank may use its buffer once all its peers can read it.
        read = [view is not None for view in views]
        answers = self._channel.all_gather(msgspec.json.encode(read))
        number = len(self._views)
        self._views.append(views)
        me = self._node.local_rank
        seen = [
            msgspec.json.decode(answers[rank], type=list[bool])[me]
            for rank in self._node.ranks
            if rank != self._channel.rank
        ]
        if fd >= 0 and all(seen):
            self._mine[storage.data_ptr()] = _Shared(number, storage)

    def source(self, tensor: torch.Tensor) -> int:
        """Return where peers find the input of `tensor`: a word for them, or `STAGED`."""
        base = tensor.untyped_storage().data_ptr()
        shared = self._mine.get(base)
        if shared is None:
            return STAGED
        return 1 + (shared.number << _OFFSET_BITS | tensor.data_ptr() - base)

    def view(self, local_rank: int, source: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the input of a co-located rank that announced `source`."""
        number, offset = source - 1 >> _OFFSET_BITS, source - 1 & (1 << _OFFSET_BITS) - 1
        view = self._views[number][local_rank]
        assert view is not None  # else its owner would not have announced it
        return view[offset : offset + nbytes]

    def close(self) -> None:
        """Give up all views and buffers."""
        self._mine.clear()
        self._views.clear()


def _mapped(offer: _Offer) -> NDArray[np.uint8] | None:
    if offer.fd < 0:
        return None
    try:
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size < offer.nbytes:
            return None
        memory = mmap.mmap(fd, offer.nbytes, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return np.frombuffer(memory, np.uint8)
