"""Tasks that wait for each other and move bytes: when each begins and ends.

A task waits, is busy, moves its bytes, is busy again, and is then released: the next in its lanes
may begin. It is done a lag later: those that need its data may begin.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from topo_ar.errors import PlanError
from topo_ar.simulation.flows import Network, Uses


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes time.

    Attributes
    ----------
    flows : tuple of (float, Uses)
        Bytes and links of its flows, which begin together.
    after : tuple of int
        Tasks that must be done.
    behind : tuple of int
        Tasks that must have been released.
    earliest : float
        Seconds before which it does not begin.
    before, added, lag : float
        Seconds that it is busy before its first byte, and after its last one; and seconds that it
        is under way after that without keeping anything busy.
    """

    flows: tuple[tuple[float, Uses], ...] = ()
    after: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    earliest: float = 0
    before: float = 0
    added: float = 0
    lag: float = 0


@dataclass(frozen=True, slots=True)
class TaskTime:
    """When a task began, moved its last byte, was released and was done, in seconds."""

    start: float
    moved: float
    released: float
    done: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all tasks, in their order, and the bytes that every link carried."""

    tasks: tuple[TaskTime, ...]
    carried: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """When the last task is done."""
        return max((task.done for task in self.tasks), default=0)


class _Event(IntEnum):
    BEGIN = 0
    SEND = 1
    RELEASE = 2
    DONE = 3


def run(capacities: Sequence[float], tasks: Sequence[Task]) -> Timeline:
    """Return the times of `tasks` on links of these capacities in bytes/s.

    Raises
    ------
    PlanError
        If tasks wait for each other in a circle.
    """
    return _Run(capacities, tasks).run()


class _Run:
    def __init__(self, capacities: Sequence[float], tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.network = Network(capacities)
        self.waiting = [len(task.after) + len(task.behind) for task in tasks]
        self.unlocks: dict[_Event, list[list[int]]] = {
            _Event.DONE: [[] for _ in tasks],
            _Event.RELEASE: [[] for _ in tasks],
        }
        for index, task in enumerate(tasks):
            for other in task.after:
                self.unlocks[_Event.DONE][other].append(index)
            for other in task.behind:
                self.unlocks[_Event.RELEASE][other].append(index)
        self.moving = [0] * len(tasks)
        self.times: list[list[float]] = [[0] * 4 for _ in tasks]
        self.finished = 0
        self.events: list[tuple[float, _Event, int]] = []
        self.owner: list[int] = []

    def run(self) -> Timeline:
        for index, task in enumerate(self.tasks):
            if not self.waiting[index]:
                self._push(task.earliest, _Event.BEGIN, index)
        now: float = 0
        while True:
            due = [self.events[0][0]] if self.events else []
            ending = self.network.next_end()
            if ending is not None:
                due.append(ending)
            if not due:
                break
            now = max(now, min(due))
            # Floats that mean the same moment differ in their last bits.
            until = now * (1 + 1e-12) if isinstance(now, float) else now
            for flow in self.network.ended(until):
                index = self.owner[flow]
                self.moving[index] -= 1
                if not self.moving[index]:
                    self._moved(index, now)
            while self.events and self.events[0][0] <= until:
                _, event, index = heapq.heappop(self.events)
                self._happen(event, index, now)
            self.network.settle(now)
        if self.finished < len(self.tasks):
            stuck = next(i for i, waiting in enumerate(self.waiting) if waiting)
            raise PlanError(f"task {stuck} of the simulation waits for itself; verify the schedule")
        return Timeline(tuple(TaskTime(*each) for each in self.times), tuple(self.network.carried))

    def _push(self, at: float, event: _Event, index: int) -> None:
        heapq.heappush(self.events, (at, event, index))

    def _happen(self, event: _Event, index: int, now: float) -> None:
        task = self.tasks[index]
        if event is _Event.BEGIN:
            self.times[index][0] = now
            self._push(now + task.before, _Event.SEND, index)
        elif event is _Event.SEND:
            for nbytes, uses in task.flows:
                if nbytes and uses:
                    self.network.add(len(self.owner), uses, nbytes, now)
                    self.owner.append(index)
                    self.moving[index] += 1
            if not self.moving[index]:
                self._moved(index, now)
        else:
            self.times[index][int(event)] = now
            if event is _Event.RELEASE:
                self._push(now + task.lag, _Event.DONE, index)
            else:
                self.finished += 1
            for follower in self.unlocks[event][index]:
                self.waiting[follower] -= 1
                if not self.waiting[follower]:
                    self._push(max(now, self.tasks[follower].earliest), _Event.BEGIN, follower)

    def _moved(self, index: int, now: float) -> None:
        self.times[index][1] = now
        self._push(now + self.tasks[index].added, _Event.RELEASE, index)
