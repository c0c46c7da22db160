"""One all-reduce on a topology with contention: times of its steps, bytes of its links."""

from dataclasses import dataclass

from topo_ar.errors import PlanError
from topo_ar.planning.runtime import Runtime, runtime_of
from topo_ar.planning.schedule import Schedule
from topo_ar.simulation.engine import TaskTime, run
from topo_ar.simulation.routes import Routes
from topo_ar.simulation.templates import FoldedStep, LinkUse, Templates, schedule_tasks
from topo_ar.topology.graph import RateKind
from topo_ar.topology.model import Topology


@dataclass(frozen=True, slots=True)
class Simulated:
    """An all-reduce that was simulated.

    Attributes
    ----------
    seconds : float
        When its last step is done.
    steps : tuple of (FoldedStep, TaskTime)
        Its steps, of which each stands for all that are alike, and their times.
    links : tuple of LinkUse
        What the links carried, the busiest first.
    sent_inside, sent_between : tuple of float
        Bytes that each rank sent to ranks of its node and of others.
    """

    seconds: float
    steps: tuple[tuple[FoldedStep, TaskTime], ...]
    links: tuple[LinkUse, ...]
    sent_inside: tuple[float, ...]
    sent_between: tuple[float, ...]


def simulate(
    schedule: Schedule,
    topology: Topology,
    *,
    runtime: Runtime | None = None,
    rate: RateKind = "effective",
    fold: bool = True,
) -> Simulated:
    """Return what happens when `schedule` runs alone on `topology`.

    Steps of one chunk wait as `after` says; at a rank the chunks of one stage follow each other,
    and different stages share the links fairly.

    Parameters
    ----------
    schedule : Schedule
        Its ranks are those of the topology.
    topology : Topology
        Links with their rates, ranks.
    runtime : Runtime, optional
        What runs it and what that costs; by default what serves the topology.
    rate : {"effective", "nominal"}
        Which rates count.
    fold : bool
        Let one step stand for all that are alike, which is exact; False looks at every one.

    Raises
    ------
    PlanError
        If the schedule is for another number of ranks, moves nothing somewhere, or cannot end.
    TopologyError
        If ranks cannot reach each other or a rate is missing.
    """
    if schedule.world_size != len(topology.ranks):
        raise PlanError(
            f"the schedule is for {schedule.world_size} ranks, the topology has "
            f"{len(topology.ranks)}; lower a plan for this topology"
        )
    routes = Routes(topology, rate)
    templates = Templates(routes, runtime or runtime_of(topology), fold=fold)
    number = templates.add(schedule)
    templates.fold()
    timeline = run(templates.capacities, schedule_tasks(templates, number))
    inside, between = templates.elements_sent(number) * schedule.itemsize
    return Simulated(
        timeline.seconds,
        tuple(zip(templates.folded[number], timeline.tasks, strict=True)),
        templates.link_uses(timeline.carried, timeline.seconds),
        tuple(inside.tolist()),
        tuple(between.tolist()),
    )
