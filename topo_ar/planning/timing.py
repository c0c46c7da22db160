"""When every step of a schedule begins and ends if nothing else is on the ports.

Each port serves one step at a time, for as long as the step's latency and the bytes it moves there
take. A step is ready when all that it waits for has ended, and ends when all its ports have served
it; ports need not serve it at the same moment, since what is sent is kept until it is received.
No port carries more than it can and nothing is received before it could be known, so no time is
below a bound on the same rates. Sums and products are those of the rates: fractions stay exact.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

from topo_ar.planning.level_bounds import RateKind
from topo_ar.planning.port_loads import Load, Port, PortLoads
from topo_ar.planning.schedule import Op, Schedule, Step
from topo_ar.topology.levels import Levels

First = Literal["reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """When a step is first served and when it has ended, in seconds; and by which ports.

    `last` is the port that served it last.
    """

    start: float
    end: float
    ports: tuple[Port, ...]
    last: Port


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a schedule.

    Attributes
    ----------
    seconds : float
        The end of the last step.
    steps : tuple of StepTime
        In the order of the schedule.
    critical : tuple of int
        The steps that the end hangs on, first to last: each waited for the one before it, or for
        a port that it held.
    bottleneck : str
        The hardware that is at work for most of these steps; empty without steps.
    """

    seconds: float
    steps: tuple[StepTime, ...]
    critical: tuple[int, ...]
    bottleneck: str


def time_schedule(
    schedule: Schedule,
    levels: Levels,
    *,
    first: First = "reduce_scatter",
    rate: RateKind = "payload",
) -> Timing:
    """Return the event times of `schedule` on `levels`.

    Parameters
    ----------
    schedule : Schedule
        Its ranks are those of `levels`.
    levels : Levels
        Ports with their rates and latencies.
    first : {"reduce_scatter", "all_gather"}
        What a port inside a node serves first when several steps are ready. Between nodes, and
        among equals, earlier chunks go first.
    rate : {"nominal", "payload"}
        Which rates count.

    Raises
    ------
    PlanError
        If the levels contradict themselves or hold another number of ranks, or a step moves
        nothing.
    """
    return _Events(schedule, PortLoads(schedule, levels, rate), first).run()


def bandwidth_limit(
    schedule: Schedule, levels: Levels, rate: RateKind = "payload"
) -> tuple[float, str]:
    """Return how long the busiest port is at work, latency left out, and the hardware's name.

    Many chunks come close to it.

    Raises
    ------
    PlanError
        If the levels contradict themselves or hold another number of ranks, or a step moves
        nothing.
    """
    loads = PortLoads(schedule, levels, rate)
    busiest = max(loads.totals, key=lambda port: (loads.seconds(port), -port.rank), default=None)
    return (loads.seconds(busiest), loads.name(busiest)) if busiest else (0, "")


_Key = tuple[int, int, int]
_Service = tuple[int, Port]


class _Events:
    """The ports at work.

    A service is one step at one port. Its cause is the service at whose end it began: of a step
    that was waited for, or of the step that held the port.
    """

    def __init__(self, schedule: Schedule, loads: PortLoads, first: First) -> None:
        self.loads = loads
        steps = schedule.steps
        self.keys = [_key(step, loads.loads[step.index], first) for step in steps]
        self.awaited = [len(step.after) for step in steps]
        self.followers: list[list[int]] = [[] for _ in steps]
        for step in steps:
            for earlier in step.after:
                self.followers[earlier].append(step.index)
        self.unserved = [len(load.ports) for load in loads.loads]
        self.starts: list[float | None] = [None] * len(steps)
        self.ends: list[float] = [0] * len(steps)
        self.last: dict[int, Port] = {}
        self.queues: dict[Port, list[tuple[_Key, int]]] = {}
        self.serving: list[tuple[float, int, Port]] = []
        self.holder: dict[Port, int] = {}
        self.made_ready: dict[int, _Service | None] = {}
        self.causes: dict[_Service, _Service | None] = {}

    def run(self) -> Timing:
        now: float = 0
        changed: set[Port] = set()
        for index, count in enumerate(self.awaited):
            if count == 0:
                self._ready(index, None, changed)
        self._serve(changed, now)
        while self.serving:
            now = self.serving[0][0]
            # Floats that mean the same moment differ in their last bits.
            until = now * (1 + 1e-12) if isinstance(now, float) else now
            changed = set()
            self.made_ready.clear()
            while self.serving and self.serving[0][0] <= until:
                now, index, port = heapq.heappop(self.serving)
                changed.add(port)
                self.unserved[index] -= 1
                if self.unserved[index] == 0:
                    self.ends[index], self.last[index] = now, port
                    for follower in self.followers[index]:
                        self.awaited[follower] -= 1
                        if self.awaited[follower] == 0:
                            self._ready(follower, (index, port), changed)
            self._serve(changed, now)
        return self._result()

    def _ready(self, index: int, cause: _Service | None, changed: set[Port]) -> None:
        self.made_ready[index] = cause
        for port in self.loads.loads[index].ports:
            heapq.heappush(self.queues.setdefault(port, []), (self.keys[index], index))
            if port not in self.holder:
                changed.add(port)

    def _serve(self, changed: set[Port], now: float) -> None:
        """Let all ports that are free, or have been freed, take the next step in their queues."""
        for port in changed:
            before = self.holder.pop(port, None)
            if not self.queues[port]:
                continue
            _, index = heapq.heappop(self.queues[port])
            self.holder[port] = index
            if index in self.made_ready:
                self.causes[index, port] = self.made_ready[index]
            else:
                self.causes[index, port] = None if before is None else (before, port)
            if self.starts[index] is None:
                self.starts[index] = now
            load = self.loads.loads[index]
            heapq.heappush(self.serving, (now + load.latency + load.ports[port], index, port))

    def _result(self) -> Timing:
        if not self.ends:
            return Timing(0, (), (), "")
        index = max(range(len(self.ends)), key=lambda i: (self.ends[i], -i))
        service: _Service | None = (index, self.last[index])
        path: list[_Service] = []
        while service is not None:
            path.append(service)
            service = self.causes[service]
        work: dict[str, float] = {}
        for step, port in reversed(path):
            name = self.loads.name(port)
            load = self.loads.loads[step]
            work[name] = work.get(name, 0) + load.latency + load.ports[port]
        return Timing(
            seconds=self.ends[index],
            steps=tuple(
                StepTime(start or 0, self.ends[i], tuple(self.loads.loads[i].ports), self.last[i])
                for i, start in enumerate(self.starts)
            ),
            critical=tuple(dict.fromkeys(step for step, _ in reversed(path))),
            bottleneck=max(work, key=lambda name: work[name]),
        )


def _key(step: Step, load: Load, first: First) -> _Key:
    """Return what ports sort steps by: inside a node the favoured operation, then by chunk."""
    inside = all(port.kind in ("node", "island") for port in load.ports)
    later = (step.op is Op.ALL_GATHER) == (first == "reduce_scatter")
    return (int(inside and later), step.chunk, step.index)
