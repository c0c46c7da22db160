"""One thread per process set that does what all of its ranks have asked for, in one order."""

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from topo_ar.errors import ExecutionError
from topo_ar.integrations.horovod.negotiation import Due, Negotiation, Signature, batches
from topo_ar.integrations.horovod.requests import Handle, Request
from topo_ar.integrations.horovod.work import DTYPES, perform
from topo_ar.torch_backend import NAME

# The names and defaults of Horovod's own settings.
_THRESHOLD_ENV, _THRESHOLD_NBYTES = "HOROVOD_FUSION_THRESHOLD", 128 << 20
_CYCLE_ENV, _CYCLE_MS = "HOROVOD_CYCLE_TIME", 1.0
_ROW_NBYTES = 256
_LENGTH_NBYTES = 4
# Batches on their way; what becomes ready meanwhile gathers for the next.
_MAX_BATCHES = 2
_CLOSING_S = 1.0
_LONGEST_PAUSE_S = 0.1


class Engine:
    """Takes requests of this rank and does them when all ranks have made them.

    Making one is collective over all ranks of the job. All communication is done by its thread, in
    groups of its own, so that whatever the script does with torch.distributed has no part in it.

    Parameters
    ----------
    ranks : sequence of int
        The members, ascending.
    timeout : timedelta, optional
        How long ranks wait for each other before all of them fail.

    Attributes
    ----------
    group : ProcessGroup
        In which tensors travel.
    timeout_s : float
        The timeout in seconds.
    numbers : iterator of int
        Numbers the optimizers of the process set, alike on its ranks.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta | None = None) -> None:
        self.ranks = tuple(ranks)
        self.control = dist.new_group(list(ranks), timeout, backend=NAME)
        self.group = dist.new_group(list(ranks), timeout, backend=NAME)
        self._threshold = int(os.environ.get(_THRESHOLD_ENV, _THRESHOLD_NBYTES))
        self._cycle_s = float(os.environ.get(_CYCLE_ENV, _CYCLE_MS)) / 1000
        self.timeout_s = (timeout or default_pg_timeout).total_seconds()
        self.numbers = itertools.count()
        self._changed = threading.Condition()
        self._new: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._num_unnamed: Counter[str] = Counter()
        self._num_waiting = 0
        self._completed = 0
        self._heard_completed = 0
        self._join: Handle | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        # Of the thread alone.
        self._launched = 0
        self._due: list[Due] = []
        self._pause_s = self._cycle_s
        self._negotiation = Negotiation(len(self.ranks))
        self._index = self.ranks.index(dist.get_rank()) if dist.get_rank() in self.ranks else -1

    def name_for(self, kind: str, name: str | None) -> str:
        """Return what a request is called: by its own name, or by how many had none before."""
        if name is not None:
            return f"{kind}.{name}"
        with self._changed:
            self._num_unnamed[kind] += 1
            return f"{kind}.noname.{self._num_unnamed[kind]}"

    def submit(
        self,
        signature: Signature,
        tensors: list[torch.Tensor],
        result: Callable[[Any], Any] | None = None,
        work: Callable[[dist.ProcessGroup], "torch.futures.Future[torch.Tensor]"] | None = None,
    ) -> Handle:
        """Ask for something; see `Request`.

        Raises
        ------
        ValueError
            If what has the same name is not complete.
        ExecutionError
            If the engine has failed or is closed.
        """
        name = signature.name
        request = Request(signature, tensors, Handle(name, self), result, work)
        with self._changed:
            self._check()
            if name in self._requests:
                raise ValueError(
                    f"{name!r} has been asked for and is not complete; synchronize it first, or "
                    "give this one another name"
                )
            self._requests[name] = request
            self._new.append(request)
            self._start()
            self._changed.notify_all()
        return request.handle

    def count_waiting(self, change: int) -> None:
        """Know that somebody waits: the thread then does not wait for more to come."""
        with self._changed:
            self._num_waiting += change
            self._changed.notify_all()

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not asked for something yet, as far as is known."""
        return [self.ranks[index] for index in self._negotiation.missing(name)]

    def join(self) -> int:
        """Take part in what the others do until all ranks join; return the last one's index."""
        with self._changed:
            self._check()
            self._join = handle = Handle("join")
            self._start()
            self._changed.notify_all()
        return int(handle.wait())

    def close(self) -> None:
        """End the thread; what is not complete fails."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSING_S)
            if self._thread.is_alive():  # in a round that others have not come to
                self.control.abort()
        self._fail(ExecutionError("Horovod's operations have been shut down"))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="topo_ar horovod", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while (wanted := self._next()) is not None:
                self._round(*wanted)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            left = [request.handle for request in self._requests.values()]
            if self._join is not None:
                left.append(self._join)
            self._requests.clear()
            self._new.clear()
            self._join = None
        for handle in left:
            handle.fail(self._error)

    def _next(self) -> tuple[list[Request], int, bool] | None:
        """Return what to announce in the next round when it is time for one; None at the end."""
        with self._changed:
            while not self._closing:
                if self._new:
                    # Gradients come one after the other: those of a moment go together.
                    if not self._num_waiting and self._join is None:
                        self._changed.wait_for(
                            lambda: self._num_waiting or self._closing, self._cycle_s
                        )
                    self._pause_s = self._cycle_s
                    break
                if self._join is not None:
                    break
                if self._requests:
                    # Only others, or what is on its way, can make a difference.
                    self._changed.wait_for(self._has_news, self._pause_s)
                    self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                    if not self._new:
                        break
                else:
                    self._changed.wait()
            if self._closing:
                return None
            new, self._new = self._new, []
            self._heard_completed = self._completed
            return new, self._completed, self._join is not None

    def _has_news(self) -> bool:
        return bool(self._new) or self._closing or self._completed != self._heard_completed

    def _round(self, new: list[Request], completed: int, joined: bool) -> None:
        signatures = (request.signature for request in new)
        message = self._negotiation.announce(signatures, completed, joined)
        self._due += self._negotiation.hear(self._exchange(message))
        last = self._negotiation.last_joined
        if last is not None or self._launched - self._negotiation.completed < _MAX_BATCHES:
            taken, self._due = self._due, []
            for impossible in (each for each in taken if each.problem):
                request = self._take(impossible)
                if request is not None:
                    request.handle.fail(ValueError(impossible.problem))
            possible = (each for each in taken if not each.problem)
            for batch in batches(possible, self._threshold, DTYPES):
                self._launched += 1
                requests = [self._take(due) for due in batch]
                try:
                    perform(batch, requests, self.group, self._index, self._complete)
                except BaseException as error:
                    for each in filter(None, requests):
                        each.handle.fail(error)
                    raise
        if last is not None:
            with self._changed:
                handle, self._join = self._join, None
            if handle is not None:
                handle.launch(lambda: last, lambda: True)

    def _take(self, due: Due) -> Request | None:
        with self._changed:
            return self._requests.pop(due.name, None)

    def _complete(self) -> None:
        with self._changed:
            self._completed += 1
            self._changed.notify_all()

    def _exchange(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks.

        Each writes a row of a matrix that is zero elsewhere, and the sum has all rows: the
        planned all-reduce of a few KiB is faster than any gather.
        """
        if len(self.ranks) == 1:
            return [message]
        framed = len(message).to_bytes(_LENGTH_NBYTES, "little") + message
        rows = self._sum_rows(framed[:_ROW_NBYTES], _ROW_NBYTES)
        lengths = [int.from_bytes(row[:_LENGTH_NBYTES], "little") for row in rows]
        longest = max(lengths) + _LENGTH_NBYTES
        if longest > _ROW_NBYTES:
            rows = self._sum_rows(framed, 1 << (longest - 1).bit_length())
        return [
            row[_LENGTH_NBYTES : _LENGTH_NBYTES + length]
            for row, length in zip(rows, lengths, strict=True)
        ]

    def _sum_rows(self, row: bytes, width: int) -> list[bytes]:
        rows = torch.zeros(len(self.ranks), width, dtype=torch.uint8)
        rows[self._index, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        dist.all_reduce(rows, group=self.control)
        return [bytes(each) for each in rows.numpy()]
