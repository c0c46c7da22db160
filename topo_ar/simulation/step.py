"""A training step: buckets become ready in backward, are reduced, and what sticks out is exposed.

Every rank runs forward and backward. A bucket is reduced when all ranks of a step of its schedule
have it; its chunks follow those of the buckets before in the lanes of each stage, so that the
stages inside a node, the codec and the wire work on different chunks at once. What is not staged
shares nothing with its neighbours. The optimizer waits for backward and all buckets. Other
dimensions of a hybrid job send over the same links; that their ranks compute longer when they
wait is left out.
"""

from collections.abc import Iterator, Sequence

from topo_ar.errors import ConfigError
from topo_ar.planning.buckets import Bucket
from topo_ar.planning.codec_costs import CodecCosts
from topo_ar.planning.codecs import NONE, Codec
from topo_ar.planning.runtime import Runtime, runtime_of
from topo_ar.simulation.compute import Compute, slowest_of_each
from topo_ar.simulation.engine import Task, Timeline, run
from topo_ar.simulation.reduction import Reduction
from topo_ar.simulation.routes import Routes
from topo_ar.simulation.step_result import SimulatedBucket, SimulatedStep
from topo_ar.simulation.task_list import NO_BUCKET, OTHER_TRAFFIC, TaskList
from topo_ar.simulation.templates import Lanes, Templates
from topo_ar.simulation.units import GroupTraffic, group_schedule
from topo_ar.telemetry.metrics import exposed_seconds, overlap_efficiency
from topo_ar.telemetry.trace import Span
from topo_ar.topology.model import Topology


class StepSimulator:
    """Simulates steps of one job; what does not change from step to step is prepared once.

    Parameters
    ----------
    topology : Topology
        Links and ranks.
    buckets : sequence of Bucket
        In the order of the hook's calls; ready times count from the begin of backward.
    compute : Compute
        What the ranks compute.
    mode : str
        ``auto``, ``hierarchical`` or ``flat``: which plan each bucket gets.
    codecs : sequence of Codec or Codec
        For each bucket, or for all; used where the plan has a stage between nodes.
    groups : sequence of sequence of int, optional
        The data-parallel groups, all ranks of which hold the same parameters; one of all ranks.
    traffic : sequence of GroupTraffic
        What the other dimensions of the job send.
    runtime, costs : optional
        By default what serves the topology, and the starting values for that.
    fold : bool
        As for `simulation.collective.simulate`.

    Raises
    ------
    ConfigError
        If the compute times or groups make no sense.
    PlanError, TopologyError
        As `planning.planner.plan` and `simulation.collective.simulate`.
    """

    def __init__(
        self,
        topology: Topology,
        buckets: Sequence[Bucket],
        compute: Compute,
        *,
        mode: str = "auto",
        codecs: Sequence[Codec] | Codec = NONE,
        groups: Sequence[Sequence[int]] | None = None,
        traffic: Sequence[GroupTraffic] = (),
        runtime: Runtime | None = None,
        costs: CodecCosts | None = None,
        fold: bool = True,
    ) -> None:
        self._world = len(topology.ranks)
        compute.check(self._world)
        self._compute = compute
        runtime = runtime or runtime_of(topology)
        self._templates = Templates(
            Routes(topology), runtime, fold=fold, rank_labels=compute.labels(self._world)
        )
        self._reduction = Reduction(
            topology,
            buckets,
            mode=mode,
            codecs=codecs,
            groups=_checked(groups, self._world),
            runtime=runtime,
            costs=costs,
            templates=self._templates,
        )
        self._traffic = []
        for each in traffic:
            schedule = group_schedule(each, self._world)
            number = self._templates.add(schedule)
            self._traffic.append((each, number, each.nbytes / schedule.numel))
        self._templates.fold()
        self._classes = self._templates.rank_class
        self._num_classes = max(self._classes) + 1
        self._alone: dict[tuple[int, Codec], float] = {}

    def run(self, step: int = 0, compute: Compute | None = None) -> SimulatedStep:
        """Return the step of this number; without jitter all are the same.

        Parameters
        ----------
        step : int
            Which draw of the jitter.
        compute : Compute, optional
            From now on in place of the one before; with the same slowdowns.

        Raises
        ------
        ConfigError
            If its slowdowns are others.
        """
        if compute is not None:
            compute.check(self._world)
            if compute.slowdowns != self._compute.slowdowns:
                raise ConfigError("other stragglers need another simulator")
            if compute.copy_seconds_per_byte != self._compute.copy_seconds_per_byte:
                self._alone.clear()
            self._compute = compute
        c = self._compute
        slow = slowest_of_each(c.factors(self._world, step), self._classes).tolist()
        tasks = TaskList()
        outs = self._add_buckets(tasks, slow)
        for rank, factor in enumerate(slow):
            waits = tuple(out[rank] for out in outs)
            begin = (c.forward + c.backward) * factor
            optimizer = Task(after=waits, earliest=begin, before=c.optimizer * factor)
            tasks.add(optimizer, "optimizer", "compute", (rank,), NO_BUCKET)
        self._add_traffic(tasks, (c.forward + c.backward) * max(slow))
        timeline = run(self._reduction.capacities, tasks.tasks)
        return self._result(tasks, timeline, slow, outs)

    def _add_buckets(self, tasks: TaskList, slow: Sequence[float]) -> list[list[int]]:
        """Add all buckets; return the last task of each at every class of ranks."""
        lanes = Lanes()
        outs: list[list[int]] = []
        # What ran with nothing beside it, and what came since.
        alone: list[int] = []
        since: list[int] = []
        for number, bucket in enumerate(self._reduction.buckets):
            ready = [(self._compute.forward + bucket.ready_seconds) * factor for factor in slow]
            staged = self._reduction.staged(number)
            before = tuple(alone if staged else [*alone, *since])
            outs.append(self._add_bucket(tasks, lanes, number, ready, before))
            if staged:
                since += outs[-1]
            else:
                alone, since = outs[-1], []
        return outs

    def _add_bucket(
        self,
        tasks: TaskList,
        lanes: Lanes,
        number: int,
        ready: Sequence[float],
        before: tuple[int, ...],
    ) -> list[int]:
        """Add copies and chunks of a bucket; return the last task at every class of ranks."""
        copying = self._compute.copy_seconds_per_byte * self._reduction.buckets[number].nbytes / 2
        copied = []
        for rank, begin in enumerate(ready):
            behind = lanes.enter([(rank, "copy in")], number, len(tasks))
            task = Task(behind=behind, earliest=begin, before=copying)
            copied.append(tasks.add(task, f"copy in {number}", "copy", (rank,), number))
        waits = [{task} for task in copied]
        for chunk in range(len(self._reduction.chunks(number))):
            added = self._reduction.add_chunk(tasks, lanes, (number, chunk), copied, before)
            for index, folded in added:
                for rank in folded.ranks:
                    waits[rank].add(index)
        outs = []
        for rank, own in enumerate(waits):
            behind = lanes.enter([(rank, "copy out")], number, len(tasks))
            task = Task(after=tuple(sorted(own)), behind=behind, before=copying)
            outs.append(tasks.add(task, f"copy out {number}", "copy", (rank,), number))
        return outs

    def _add_traffic(self, tasks: TaskList, seconds: float) -> None:
        for traffic, number, scale in self._traffic:
            before: tuple[int, ...] = ()
            for turn in range(traffic.count):
                first = len(tasks)
                for folded in self._templates.folded[number]:
                    task = Task(
                        tuple((each * scale, uses) for each, uses in folded.flows),
                        tuple(first + other for other in folded.after),
                        before,
                        seconds * turn / traffic.count,
                        *self._templates.busy(folded, scale),
                    )
                    name = f"{traffic.name} {turn}"
                    tasks.add(task, name, traffic.name, folded.ranks, OTHER_TRAFFIC)
                before = tuple(range(first, len(tasks)))

    def _result(
        self,
        tasks: TaskList,
        timeline: Timeline,
        slow: Sequence[float],
        outs: Sequence[Sequence[int]],
    ) -> SimulatedStep:
        c, reduction = self._compute, self._reduction
        own = [
            time.done
            for time, name in zip(timeline.tasks, tasks.names, strict=True)
            if name.bucket != OTHER_TRAFFIC
        ]
        compute = max(slow) * (c.forward + c.backward + c.optimizer)
        buckets = tuple(
            SimulatedBucket(
                bucket.nbytes,
                max(slow) * (c.forward + bucket.ready_seconds),
                max(timeline.tasks[task].done for task in outs[number]),
                self._seconds_alone(number),
                reduction.candidate(number).family,
                len(reduction.chunks(number)),
                str(reduction.codecs[number]),
            )
            for number, bucket in enumerate(reduction.buckets)
        )
        communication = sum(bucket.seconds_alone for bucket in buckets)
        exposed = exposed_seconds(max(own), compute, 0, 0)
        inside, between = self._sent()
        return SimulatedStep(
            max(own),
            compute,
            communication,
            exposed,
            overlap_efficiency(exposed, communication),
            buckets,
            self._templates.link_uses(timeline.carried, timeline.seconds),
            inside,
            between,
            tuple(self._spans(tasks, timeline, slow)),
            self._num_classes,
            not c.jitter or self._num_classes == self._world,
        )

    def _seconds_alone(self, number: int) -> float:
        """Return what the all-reduce of a bucket takes with nothing else."""
        key = (self._reduction.buckets[number].nbytes, self._reduction.codecs[number])
        if key not in self._alone:
            tasks = TaskList()
            self._add_bucket(tasks, Lanes(), number, [0.0] * self._num_classes, ())
            self._alone[key] = run(self._reduction.capacities, tasks.tasks).seconds
        return self._alone[key]

    def _sent(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        import numpy as np

        sent = np.zeros((2, self._world))
        for number in range(len(self._reduction.buckets)):
            sent += self._reduction.nbytes_sent(number)
        for traffic, number, scale in self._traffic:
            sent += traffic.count * scale * self._templates.elements_sent(number)
        return tuple(sent[0].tolist()), tuple(sent[1].tolist())

    def _spans(self, tasks: TaskList, timeline: Timeline, slow: Sequence[float]) -> Iterator[Span]:
        first: dict[int, int] = {}
        for rank, kind in enumerate(self._classes):
            first.setdefault(kind, rank)
        c = self._compute
        for kind, rank in first.items():
            middle, end = c.forward * slow[kind], (c.forward + c.backward) * slow[kind]
            yield Span("forward", rank, "compute", 0.0, middle)
            yield Span("backward", rank, "compute", middle, end)
        for name, time in zip(tasks.names, timeline.tasks, strict=True):
            if time.done > time.start:
                for kind in name.ranks:
                    yield Span(name.text, first[kind], name.lane, time.start, time.done)


def _checked(
    groups: Sequence[Sequence[int]] | None, world_size: int
) -> tuple[tuple[int, ...], ...]:
    if groups is None:
        return (tuple(range(world_size)),)
    found = tuple(tuple(group) for group in groups)
    ranks = [rank for group in found for rank in group]
    if len({len(group) for group in found}) != 1 or len({*ranks}) < len(ranks):
        raise ConfigError(
            "data-parallel groups must be of equal size and hold no rank twice; "
            f"they have {[len(group) for group in found][:16]} ranks"
        )
    if not {*ranks} <= {*range(world_size)}:
        raise ConfigError(f"a data-parallel group holds a rank beyond 0 to {world_size - 1}")
    return found
