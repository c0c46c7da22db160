"""torch's gradient compression hooks on simulated ranks, which are threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

from experiments.simulated_ranks import RankGroup

_DEADLINE_S = 30


class _Ranks(threading.local):
    """What the thread of a rank knows: its position and where it meets the others."""

    index = 0
    meet: "Meeting"


_rank = _Ranks()


class Meeting:
    """A place where all ranks exchange tensors.

    Between meetings one rank runs at a time: the hooks seed torch's global random numbers.
    """

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def exchange(self, index: int, value: Any) -> list[Any]:
        """Give `value` and return what everyone gave, by position."""
        self._slots[index] = value
        self.turn.release()
        try:
            self._barrier.wait(_DEADLINE_S)
            found = list(self._slots)
            self._barrier.wait(_DEADLINE_S)
        finally:
            self.turn.acquire()
        return found

    def leave(self) -> None:
        """Let nobody wait any longer."""
        self._barrier.abort()


class Group(RankGroup):
    """A group of one rank per thread that keep their turns; without a meeting, a rank alone."""

    def __init__(self, index: int = 0, meeting: Meeting | None = None, size: int = 1) -> None:
        self.index, self.size, self._turns = index, size, meeting

    def _exchange(self, value: Any) -> list[Any]:
        return self._turns.exchange(self.index, value) if self._turns else [value]


def run_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """Run `work` on `size` ranks and return the results; torch's hooks work in it.

    Raises
    ------
    Exception
        The first that a rank raised, other than that another rank had left.
    """
    meeting = Meeting(size)

    def rank(index: int) -> Any:
        _rank.index, _rank.meet = index, meeting
        try:
            with meeting.turn:
                return work(Group(index, meeting, size))
        except BaseException:
            meeting.leave()
            raise

    before, hooks.dist = hooks.dist, _fake_dist(size)  # type: ignore[attr-defined]
    try:
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(rank, index) for index in range(size)]
            errors = [error for future in futures if (error := future.exception())]
    finally:
        hooks.dist = before  # type: ignore[attr-defined]
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    for error in real or errors:
        raise error
    return [future.result() for future in futures]


class Bucket:
    """What a hook asks of a `GradBucket`: a flat tensor and the shapes in it."""

    def __init__(
        self, buffer: torch.Tensor, shapes: Sequence[tuple[int, ...]], index: int, last: bool
    ) -> None:
        self._buffer, self._shapes, self._index, self._last = buffer, shapes, index, last

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return its parts in their shapes."""
        lengths = [torch.Size(shape).numel() for shape in self._shapes]
        parts = torch.split(self._buffer, lengths)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def index(self) -> int:
        """Return the bucket's number."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last of the step."""
        return self._last


def state(rank: int, size: int, **options: Any) -> Any:
    """Return torch's state as it is after the plain steps that come before compression."""
    group = SimpleNamespace(size=lambda: size)
    made = hooks.PowerSGDState(group, rank, start_powerSGD_iter=2, **options)
    made.iter = 2
    return made


def step(hook_state: Any, buckets: Sequence[Bucket], hook: Any = hooks.powerSGD_hook) -> None:
    """Run the hook on the buckets of a step; their buffers hold the means afterwards."""
    for bucket in buckets:
        hook(hook_state, bucket).wait()


def _fake_dist(size: int) -> ModuleType:
    def all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        del group, async_op
        tensor.copy_(Group(_rank.index, _rank.meet, size).all_reduce(tensor))
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)

    fake = ModuleType("fake_dist")
    fake.all_reduce = all_reduce  # type: ignore[attr-defined]
    return fake
