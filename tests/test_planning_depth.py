"""The depth of plans beside that of published trees for the same topologies (all-gather half)."""

import pytest

from tests.planning_cases import cluster
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import GPU_RUNTIME
from topo_ar.planning.schedule import Op, Stage

# Heights of ForestColl's optimal trees.
HEIGHTS = {"2x4": 4, "4x4": 10, "2x8": 11, "4+2": 4}
SIZES = {"2x4": [4, 4], "4x4": [4] * 4, "2x8": [8, 8], "4+2": [4, 2]}


def gathering_depth(schedule):
    """The most messages in a row in all-gathers: round a ring in a node, direct between nodes."""
    depth = {}
    for step in schedule.steps:
        before = max((depth[earlier] for earlier in step.after), default=0)
        hops = 0
        if step.op is not Op.REDUCE_SCATTER:
            hops = len(step.group) - 1 if step.stage is Stage.INTRA_ALL_GATHER else 1
        depth[step.index] = before + hops
    return max(depth.values())


@pytest.mark.parametrize("name", HEIGHTS)
def test_no_plan_is_deeper_than_published_trees(name):
    levels = cluster(SIZES[name], 300e9, [[25e9] * size for size in SIZES[name]])
    family = Family.HIERARCHICAL_WEIGHTED if name == "4+2" else Family.HIERARCHICAL_PIPELINED
    made = plan(levels, 48 * 1024, family=family, runtime=GPU_RUNTIME)
    assert gathering_depth(lower(made, made.nbytes // 4, 4)) <= HEIGHTS[name]
