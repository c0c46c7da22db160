"""Schedules of a single chunk in which every shard is whole; scaled, they stand for every chunk.

Real chunks round their shards to whole elements, so that what is alike may differ by one element
here and there; scaled chunks do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Literal

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.schedule import Op, Schedule, Stage
from topo_ar.planning.step_list import StepList, cut

Pattern = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
PATTERNS: tuple[Pattern, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """What another dimension of a hybrid job sends in each step: it occupies links.

    Attributes
    ----------
    name : str
        The dimension, such as ``tensor``.
    groups : tuple of tuple of int
        The ranks of each of its groups.
    pattern : {"all_reduce", "all_gather", "reduce_scatter", "send"}
        What a group does; ``send`` goes from each rank to the next, as pipeline stages do.
    nbytes : int
        The buffer of one operation.
    count : int
        Operations in a step, evenly spread over forward and backward.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    pattern: Pattern
    nbytes: int
    count: int = 1


def one_chunk(plan: Plan, turn: int = 0) -> Schedule:
    """Return one chunk of a plan of this family and these shards, with elements of one byte.

    `turn` is the number of the chunk where they take turns, as trees do.
    """
    shares = [sum(plan.shards.nodes), *map(sum, plan.shards.ranks)]
    numel = 2 * plan.world_size * shares[0] * lcm(*shares)
    if plan.family in (Family.HALVING_DOUBLING, Family.HIERARCHICAL_HALVING):
        numel <<= plan.world_size.bit_length()
    sizes = (*(0,) * turn, numel)
    return lower(msgspec.structs.replace(plan, nbytes=numel, chunk_nbytes=sizes), numel, 1)


def on_groups(schedule: Schedule, groups: Sequence[Sequence[int]], world_size: int) -> Schedule:
    """Return `schedule` on several groups of ranks at once; its rank i is ``group[i]`` in each."""
    steps = StepList()
    for group in groups:
        first = len(steps.steps)
        for step in schedule.steps:
            ranks = tuple(group[rank] for rank in step.group)
            after = [first + other for other in step.after]
            steps.add(step.stage, step.op, ranks, step.shards, step.chunk, after)
    return Schedule(schedule.plan_hash, world_size, schedule.numel, 1, tuple(steps.steps))


def group_schedule(traffic: GroupTraffic, world_size: int) -> Schedule:
    """Return one operation of every group of `traffic`.

    Raises
    ------
    ConfigError
        If a group is too small or holds a rank twice or one that does not exist.
    """
    for group in traffic.groups:
        if len(group) < 2 or len({*group}) < len(group) or not {*group} <= {*range(world_size)}:
            raise ConfigError(
                f"group {list(group)[:16]} of {traffic.name!r} needs two or more different ranks "
                f"from 0 to {world_size - 1}"
            )
    numel = lcm(*map(len, traffic.groups))
    steps = StepList()
    for group in traffic.groups:
        shards = cut(0, numel, (1,) * len(group))
        after: tuple[int, ...] = ()
        if traffic.pattern in ("all_reduce", "reduce_scatter"):
            stage, op = Stage.INTRA_REDUCE_SCATTER, Op.REDUCE_SCATTER
            after = (steps.add(stage, op, group, shards, 0),)
        if traffic.pattern in ("all_reduce", "all_gather"):
            steps.add(Stage.INTRA_ALL_GATHER, Op.ALL_GATHER, group, shards, 0, after)
        if traffic.pattern == "send":
            for a, b in pairwise(group):
                steps.send(Stage.TREE_BROADCAST, Op.ALL_GATHER, a, b, (0, numel), 0, ())
    return Schedule("", world_size, numel, 1, tuple(steps.steps))
