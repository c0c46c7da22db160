"""A weighted plan turned into one of equal shares: what weights are measured against."""

from collections.abc import Sequence

import msgspec

from topo_ar.planning.cost import CostParameters
from topo_ar.planning.cost_levels import weighted_stages
from topo_ar.planning.plan import Plan, Shards
from topo_ar.planning.runtime import Runtime
from topo_ar.topology.levels import Levels


def with_equal_shares(plan: Plan, levels: Levels, runtime: Runtime) -> Plan:
    """Return a ``hierarchical_weighted`` plan with equal shares of all nodes and ranks.

    The chunks stay. The prediction is that of the new shares; alternatives are left out.

    Parameters
    ----------
    plan : Plan
        Made for `levels`.
    levels : Levels
        The nodes with their ports.
    runtime : Runtime
        What will run the plan.
    """
    parameters = CostParameters.from_levels(levels, runtime=runtime)
    stages = weighted_stages(levels, parameters, _equal([node.ranks for node in levels.nodes]))
    seconds = float(stages.seconds(plan.chunk_nbytes))
    return msgspec.structs.replace(
        plan,
        shards=_equal(plan.nodes),
        predicted_seconds=seconds,
        gap=seconds / plan.bound_seconds - 1 if plan.bound_seconds else 0.0,
        alternatives=(),
        runner_up=None,
        reason="Equal shares of all nodes and ranks, as asked for, whatever their NICs carry.",
    )


def _equal(nodes: Sequence[tuple[int, ...]]) -> Shards:
    return Shards((1,) * len(nodes), tuple((1,) * len(node) for node in nodes))
