"""Families that do without a hierarchy: ring, recursive halving-doubling, direct.

They go through the ranks node by node in the plan's order, so that neighbours share a node.
"""

from topo_ar.planning.plan import Plan
from topo_ar.planning.recursion import Recursion, Stages
from topo_ar.planning.schedule import Op, Stage
from topo_ar.planning.step_list import Interval, StepList, cut


def all_reduce(steps: StepList, plan: Plan, chunk: int, interval: Interval) -> None:
    """Add the one step that torch.distributed runs as a whole, as a ring in rank order."""
    world = tuple(range(plan.world_size))
    steps.add(Stage.FLAT, Op.ALL_REDUCE, world, (interval,) * len(world), chunk)


def direct(steps: StepList, plan: Plan, chunk: int, interval: Interval) -> None:
    """Add a reduce-scatter and an all-gather in which every rank sends to every other."""
    world = _in_order(plan)
    shards = cut(*interval, (1,) * len(world))
    reduced = steps.add(Stage.DIRECT_REDUCE_SCATTER, Op.REDUCE_SCATTER, world, shards, chunk)
    steps.add(Stage.DIRECT_ALL_GATHER, Op.ALL_GATHER, world, shards, chunk, (reduced,))


def rings(steps: StepList, plan: Plan, interval: Interval, channels: int) -> None:
    """Add every message of `channels` rings, one after the other."""
    for channel, part in enumerate(cut(*interval, (1,) * channels)):
        ring = _in_order(plan, turned=channel)
        if len(ring) > 1:
            _ring(steps, ring, channel, part)


def _ring(steps: StepList, ring: tuple[int, ...], channel: int, interval: Interval) -> None:
    """Send block b round the ring, from its owner's successor back to the owner, then on."""
    size = len(ring)
    blocks = cut(*interval, (1,) * size)
    last: list[tuple[int, ...]] = [()] * size
    for op, stage in (
        (Op.REDUCE_SCATTER, Stage.RING_REDUCE_SCATTER),
        (Op.ALL_GATHER, Stage.RING_ALL_GATHER),
    ):
        begin = 1 if op is Op.REDUCE_SCATTER else 0
        for hop in range(size - 1):
            for owner, block in enumerate(blocks):
                if block[0] == block[1]:
                    continue
                source = ring[(owner + begin + hop) % size]
                target = ring[(owner + begin + hop + 1) % size]
                sent = steps.send(stage, op, source, target, block, channel, last[owner])
                last[owner] = (sent,)


def halving_doubling(steps: StepList, plan: Plan, chunk: int, interval: Interval) -> None:
    """Add Rabenseifner's all-reduce for any number of ranks: large parts stay inside the nodes."""
    stages = Stages(Stage.FOLD, Stage.HALVING, Stage.DOUBLING, Stage.UNFOLD)
    Recursion(steps, _in_order(plan), chunk, stages, {}).halve_and_double(interval)


def _in_order(plan: Plan, turned: int = 0) -> tuple[int, ...]:
    """Return all ranks node by node, those of each node turned by some places."""
    return tuple(
        node[(place + turned) % len(node)] for node in plan.nodes for place in range(len(node))
    )
