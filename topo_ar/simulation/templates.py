"""Schedules as tasks: what every step moves over which links, one step standing for its like.

All schedules of a simulation are added first, for one run of each; then they are folded together,
and runs of them, at any size and time, become tasks of the engine.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from topo_ar.errors import PlanError
from topo_ar.planning.port_loads import PortLoads
from topo_ar.planning.runtime import Runtime
from topo_ar.planning.schedule import Op, Schedule, Stage, Step
from topo_ar.planning.step_list import RINGS
from topo_ar.simulation.engine import Task
from topo_ar.simulation.flows import Uses
from topo_ar.simulation.folding import Edges, colours
from topo_ar.simulation.messages import call_seconds, elements_added, messages, rings
from topo_ar.simulation.routes import Routes
from topo_ar.telemetry.records import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A lane takes one chunk after the other: the steps of one stage at a rank.
Lane = tuple[int, object]
_MOST_MESSAGES = 5_000_000
# Several steps of a chunk follow each other here, so that chunks go on side by side.
_SIDE_BY_SIDE = (
    Stage.RING_REDUCE_SCATTER,
    Stage.RING_ALL_GATHER,
    Stage.TREE_REDUCE,
    Stage.TREE_BROADCAST,
    Stage.INTER_HALVING,
    Stage.INTER_DOUBLING,
)
_ONE_CALL = (Stage.INTER_REDUCE_SCATTER, Stage.INTER_ALL_GATHER)


@dataclass(frozen=True, slots=True)
class FoldedStep:
    """A step that stands for `count` like it.

    Attributes
    ----------
    step : Step
        The first of them.
    count : int
        How many there are.
    flows : tuple of (float, Uses)
        Elements and links of its flows.
    after : tuple of int
        Positions of what it waits for among the folded steps.
    ranks : tuple of int
        The classes of its ranks.
    latency : float
        Seconds of all messages that it waits for.
    between_nodes : bool
        Whether its group has ranks of several nodes.
    """

    step: Step
    count: int
    flows: tuple[tuple[float, Uses], ...]
    after: tuple[int, ...]
    ranks: tuple[int, ...]
    latency: float
    between_nodes: bool


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What links that are alike carried.

    Attributes
    ----------
    name, kind : str
        The first of them, and what it is.
    count : int
        How many they are.
    between_nodes : bool
        Whether they are a part of the network.
    nbytes : float
        Bytes that went through each.
    busy : float
        The share of the time for which each was as full as it can be, on average.
    """

    name: str
    kind: str
    count: int
    between_nodes: bool
    nbytes: float
    busy: float


@dataclass(slots=True)
class _Raw:
    """A schedule before folding; arrays are parallel, vertices count within the schedule."""

    schedule: Schedule
    latency: list[float]
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    elements: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    flow_of: list[int] = field(default_factory=list)
    link_of: list[int] = field(default_factory=list)


class Templates:
    """Schedules on the links of a topology.

    Parameters
    ----------
    routes : Routes
        The ways between the ranks.
    runtime : Runtime
        What runs the schedules.
    fold : bool
        Let one step stand for all that are alike; False is for tests and for looking at each.
    rank_labels : sequence of hashable, optional
        Ranks with different labels are not alike, such as stragglers.

    Attributes
    ----------
    capacities : list of float
        Bytes/s of the links that stand for all; known after `fold`.
    members : list of int
        How many links each stands for.
    rank_class : sequence of int
        The class of every rank.
    """

    def __init__(
        self,
        routes: Routes,
        runtime: Runtime,
        *,
        fold: bool = True,
        rank_labels: Sequence[Hashable] | None = None,
    ) -> None:
        self._routes = routes
        self._runtime = runtime
        self._fold = fold
        world = routes.levels.world_size
        self._labels = list(rank_labels) if rank_labels is not None else [None] * world
        self._raw: list[_Raw] = []
        self._place = [0] * world
        for number, node in enumerate(routes.levels.nodes):
            for rank in node.ranks:
                self._place[rank] = number
        self.folded: list[list[FoldedStep]] = []
        self.capacities: list[float] = []
        self.members: list[int] = []
        self.kinds: list[tuple[str, str, bool]] = []
        self.rank_class: Sequence[int] = ()

    def add(self, schedule: Schedule) -> int:
        """Take a schedule in and return its number.

        Raises
        ------
        PlanError
            If it is for another number of ranks, a step moves nothing, or there are more messages
            than can be followed.
        TopologyError
            If there is no way between two of its ranks.
        """
        rings = self._runtime.ring_rails
        loads = PortLoads(schedule, self._routes.levels, "payload", ring_rails=rings)
        raw = _Raw(schedule, [load.latency for load in loads.loads])
        flat = self._runtime.flat_bytes_per_s
        for number, step in enumerate(schedule.steps):
            for source, target, elements in self._messages(step):
                for share, links in self._routes.between(source, target):
                    if flat < float("inf") and step.op is Op.ALL_REDUCE:
                        links = (*links, self._routes.process(source, flat))
                    flow = len(raw.elements)
                    raw.sources.append(source)
                    raw.targets.append(target)
                    raw.elements.append(elements * share)
                    raw.steps.append(number)
                    raw.flow_of += [flow] * len(links)
                    raw.link_of += links
            if len(raw.elements) > _MOST_MESSAGES:
                raise PlanError(
                    f"the schedule has more than {_MOST_MESSAGES} messages; simulate an algorithm "
                    "in which not every rank sends to every other"
                )
        self._raw.append(raw)
        return len(self._raw) - 1

    def _messages(self, step: Step) -> Iterable[tuple[int, int, float]]:
        if step.op is Op.ALL_REDUCE and self._runtime.ring_rails:
            nodes: dict[int, list[int]] = {}
            for rank in step.group:
                nodes.setdefault(self._place[rank], []).append(rank)
            return rings(list(nodes.values()), step)
        return messages(step, self._place, self._runtime.ring_rails)

    def fold(self) -> None:
        """Find what is alike in all schedules together; nothing can be added after this."""
        import numpy as np

        num_links, num_ranks = len(self._routes.links), len(self._place)
        labels: list[Hashable] = [("link", link.bandwidth) for link in self._routes.links]
        labels += [("rank", label) for label in self._labels]
        kinds: dict[str, list[NDArray[np.int64]]] = {}
        offsets = []

        def join(
            kind: str, sources: Iterable[int], targets: Iterable[int], at: int, to: int
        ) -> None:
            pair = (np.array(sources, dtype=np.int64) + at, np.array(targets, dtype=np.int64) + to)
            kinds.setdefault(kind, []).append(np.stack(pair))

        for number, raw in enumerate(self._raw):
            steps = len(labels)
            labels += [
                ("step", number, step.stage, step.op, step.chunk, latency, _sizes(step))
                for step, latency in zip(raw.schedule.steps, raw.latency, strict=True)
            ]
            flows = len(labels)
            labels += [("flow", number, elements) for elements in raw.elements]
            offsets.append((steps, flows))
            members = [
                (i, rank) for i, step in enumerate(raw.schedule.steps) for rank in step.group
            ]
            waits = [
                (i, other) for i, step in enumerate(raw.schedule.steps) for other in step.after
            ]
            every = range(len(raw.elements))
            join("over", raw.flow_of, raw.link_of, flows, 0)
            join("of step", every, raw.steps, flows, steps)
            join("from rank", every, raw.sources, flows, num_links)
            join("to rank", every, raw.targets, flows, num_links)
            join("member", [i for i, _ in members], [r for _, r in members], steps, num_links)
            join("after", [i for i, _ in waits], [o for _, o in waits], steps, steps)
        if not self._fold:
            labels = list(enumerate(labels))
        edges = [Edges(*np.concatenate(parts, axis=1)) for parts in kinds.values()]
        colour = colours(labels, edges)
        self._links(colour[:num_links])
        _, ranks = np.unique(colour[num_links : num_links + num_ranks], return_inverse=True)
        self.rank_class = ranks.tolist()
        for raw, (steps, flows) in zip(self._raw, offsets, strict=True):
            self.folded.append(self._folded(raw, colour, steps, flows))

    def _links(self, colour: "NDArray[np.int64]") -> None:
        import numpy as np

        _, first, inverse, counts = np.unique(
            colour, return_index=True, return_inverse=True, return_counts=True
        )
        links = [self._routes.links[i] for i in first]
        self.capacities = [link.bandwidth for link in links]
        self.kinds = [(link.name, link.kind, link.between_nodes) for link in links]
        self.members = counts.tolist()
        self._link_class = inverse.reshape(-1)
        self._standing = np.zeros(len(colour), dtype=bool)
        self._standing[first] = True

    def _folded(
        self, raw: _Raw, colour: "NDArray[np.int64]", steps: int, flows: int
    ) -> list[FoldedStep]:
        import numpy as np

        own = colour[steps : steps + len(raw.latency)]
        _, first, position, counts = np.unique(
            own, return_index=True, return_inverse=True, return_counts=True
        )
        # Colours are numbered by their first vertex, so that positions are in schedule order.
        position = position.reshape(-1)
        flow_colour = colour[flows : flows + len(raw.elements)]
        edge_link = np.array(raw.link_of, dtype=np.int64)
        edge_flow = np.array(raw.flow_of, dtype=np.int64)
        at = self._standing[edge_link] if len(edge_link) else np.zeros(0, dtype=bool)
        uses: dict[int, dict[int, int]] = {}
        for flow_kind, link in zip(
            flow_colour[edge_flow[at]].tolist(),
            self._link_class[edge_link[at]].tolist(),
            strict=True,
        ):
            counted = uses.setdefault(flow_kind, {})
            counted[link] = counted.get(link, 0) + 1
        flows_of: dict[int, dict[int, float]] = {}
        standing = set(first.tolist())
        for flow, step in enumerate(raw.steps):
            if step in standing:
                flows_of.setdefault(step, {})[int(flow_colour[flow])] = raw.elements[flow]
        folded = []
        for index, count in zip(first.tolist(), counts.tolist(), strict=True):
            step = raw.schedule.steps[index]
            folded.append(
                FoldedStep(
                    step,
                    count,
                    tuple(
                        (elements, tuple(sorted(uses.get(kind, {}).items())))
                        for kind, elements in flows_of.get(index, {}).items()
                    ),
                    tuple(sorted({int(position[other]) for other in step.after})),
                    tuple(sorted({self.rank_class[rank] for rank in step.group})),
                    raw.latency[index],
                    len({self._place[rank] for rank in step.group}) > 1,
                )
            )
        return folded

    def itemsize(self, number: int) -> int:
        """Return the bytes of an element of a schedule."""
        return self._raw[number].schedule.itemsize

    def elements_sent(self, number: int) -> "NDArray[np.float64]":
        """Return for each rank the elements that it sends inside and between nodes, as two rows."""
        import numpy as np

        raw, world = self._raw[number], len(self._place)
        place = np.array(self._place)
        sources, targets = np.array(raw.sources, int), np.array(raw.targets, int)
        elements = np.array(raw.elements)
        crossing = place[sources] != place[targets]
        return np.stack(
            [np.bincount(sources[m], elements[m], world) for m in (~crossing, crossing)]
        )

    def link_uses(self, carried: Sequence[float], seconds: float) -> tuple[LinkUse, ...]:
        """Return what links carried in `seconds`, the busiest first; idle ones are left out."""
        found = [
            LinkUse(name, kind, count, far, nbytes, nbytes / bandwidth / seconds if seconds else 0)
            for (name, kind, far), count, bandwidth, nbytes in zip(
                self.kinds, self.members, self.capacities, carried, strict=False
            )
            if nbytes
        ]
        return tuple(sorted(found, key=lambda use: -use.busy))

    def lanes(self, folded: FoldedStep) -> list[Lane]:
        """Return the lanes of a step, one for each class of its ranks.

        Where nothing streams, both halves of an all-reduce between nodes are one call.
        """
        step = folded.step
        stage: object = (step.stage, step.chunk) if step.stage in _SIDE_BY_SIDE else step.stage
        if self._runtime.chunk_seconds is None and step.stage in _ONE_CALL:
            stage = "rail"
        return [(rank, stage) for rank in folded.ranks]

    def busy(
        self, folded: FoldedStep, nbytes_per_element: float, hops: float = 1
    ) -> tuple[float, float, float]:
        """Return the seconds a step is busy before and after its bytes, and its lag.

        Its latency is taken `hops` times.
        """
        runtime = self._runtime
        before = call_seconds(folded.step, runtime)
        added = elements_added(folded.step) * nbytes_per_element
        added *= runtime.reduce_seconds_per_byte or 0
        if runtime.chunk_seconds is None or folded.step.op is Op.ALL_REDUCE:
            return before + folded.latency * hops, added, 0
        latency = folded.latency
        if folded.between_nodes:
            at_once = 0 if folded.step.stage in RINGS else len(folded.step.group) - 2
            further = at_once * runtime.further_message_seconds(latency)
            latency = runtime.latency_share * latency + further
        return before, added, latency * hops


class Lanes:
    """Who comes next: in a lane a step waits until those of the chunk before have been released."""

    def __init__(self) -> None:
        self._now: dict[Lane, tuple[object, list[int]]] = {}
        self._before: dict[Lane, list[int]] = {}

    def enter(self, lanes: Iterable[Lane], chunk: object, task: int) -> tuple[int, ...]:
        """Put `task` into lanes as a part of `chunk`; return the tasks that it must come behind."""
        behind: set[int] = set()
        for lane in lanes:
            current, tasks = self._now.get(lane, (None, []))
            if current != chunk:
                self._before[lane] = tasks
                tasks = []
                self._now[lane] = (chunk, tasks)
            tasks.append(task)
            behind.update(self._before[lane])
        return tuple(sorted(behind))


def link_rows(links: Sequence[LinkUse]) -> list[Record]:
    """Return what links carried as rows of a record."""
    return [
        {
            "name": use.name,
            "kind": use.kind,
            "count": use.count,
            "between_nodes": use.between_nodes,
            "nbytes": use.nbytes,
            "busy": use.busy,
        }
        for use in links
    ]


def schedule_tasks(templates: Templates, number: int) -> list[Task]:
    """Return the tasks of one run of a schedule, as it is."""
    tasks: list[Task] = []
    lanes = Lanes()
    itemsize = templates.itemsize(number)
    for folded in templates.folded[number]:
        before, added, lag = templates.busy(folded, itemsize)
        behind = lanes.enter(templates.lanes(folded), folded.step.chunk, len(tasks))
        tasks.append(
            Task(
                tuple((elements * itemsize, uses) for elements, uses in folded.flows),
                after=folded.after,
                behind=behind,
                before=before,
                added=added,
                lag=lag,
            )
        )
    return tasks


def _sizes(step: Step) -> Hashable:
    """Return how much the members own, whoever they are."""
    return tuple(sorted({end - begin for begin, end in step.shards}))
