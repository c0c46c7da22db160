"""The schedule a plan lowers to: the one list that is verified, timed and executed.

Every stage is one of three operations over a group of ranks. ``shards[i]`` is the element interval
of the flat buffer that ``group[i]`` owns:

* ``reduce_scatter``: each member ends with the group's sum of its own shard;
* ``all_gather``: each member's shard is copied to all;
* ``exchange``: all members hold the same single interval, send it to each other and add in group
  order, so that all get the same bits;
* ``all_reduce``: handed to torch.distributed as a whole.

A reduction to a leader is a reduce-scatter in which the leader owns everything.
"""

from enum import StrEnum

import msgspec


class Op(StrEnum):
    """What a step does."""

    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    EXCHANGE = "exchange"
    ALL_REDUCE = "all_reduce"


class Stage(StrEnum):
    """Where in the hierarchy a step stands; the names that errors and traces use."""

    FLAT = "flat_all_reduce"
    INTRA_REDUCE_SCATTER = "intra_reduce_scatter"
    INTER_EXCHANGE = "inter_exchange"
    INTER_REDUCE_SCATTER = "inter_reduce_scatter"
    INTER_ALL_GATHER = "inter_all_gather"
    INTRA_ALL_GATHER = "intra_all_gather"


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation of one group on one chunk; `after` lists the indices it must wait for.

    `group` holds global ranks. `shards` has one ``(begin, end)`` element interval per member; an
    ``exchange`` or ``all_reduce`` repeats the same interval.
    """

    index: int
    stage: Stage
    op: Op
    group: tuple[int, ...]
    shards: tuple[tuple[int, int], ...]
    chunk: int
    after: tuple[int, ...] = ()


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All steps of one all-reduce of `numel` elements, in an order every rank may follow."""

    plan_hash: str
    world_size: int
    numel: int
    itemsize: int
    steps: tuple[Step, ...]
