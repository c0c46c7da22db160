"""One all-reduce on a topology with contention: times of its steps, bytes of its links."""

from dataclasses import dataclass

from topo_ar.errors import PlanError
from topo_ar.planning.plan import Plan
from topo_ar.planning.runtime import Runtime, runtime_of
from topo_ar.planning.schedule import Schedule
from topo_ar.simulation.engine import TaskTime, run
from topo_ar.simulation.routes import Routes
from topo_ar.simulation.templates import FoldedStep, LinkUse, Templates, link_rows, schedule_tasks
from topo_ar.telemetry.metrics import algbw, busbw, slow_link_busbw
from topo_ar.telemetry.records import Record
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


def collective_record(found: Simulated, plan: Plan, hosts: int) -> Record:
    """Return a record with the keys of a row of ``topo-ar bench``, for figures and comparisons."""
    nbytes, seconds = plan.nbytes, found.seconds
    return {
        "collective": "all_reduce",
        "simulated": True,
        "candidate": "simulated",
        "family": plan.family,
        "dtype": "float32",
        "redop": "sum",
        "nbytes": nbytes,
        "world_size": plan.world_size,
        "hosts": hosts,
        "seconds": [seconds],
        "median_seconds": seconds,
        "algbw": algbw(nbytes, seconds),
        "busbw": busbw(nbytes, seconds, plan.world_size),
        "slow_link_busbw": slow_link_busbw(nbytes, seconds, hosts),
        "bound_seconds": plan.bound_seconds,
        "bottleneck": plan.bottleneck,
        "wire_limit_seconds": plan.wire_limit_seconds,
        "model_seconds": plan.predicted_seconds,
        "plan_hash": plan.hash,
        "nbytes_inside": sum(found.sent_inside),
        "nbytes_between": sum(found.sent_between),
        "links": link_rows(found.links),
    }
