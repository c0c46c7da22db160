"""The schedule a plan lowers to: the one list that is verified, timed and executed.

Every stage is one of three operations over a group of ranks. ``shards[i]`` is the element interval
of the flat buffer that ``group[i]`` owns:

* ``reduce_scatter``: each member ends with the group's sum of its own shard;
* ``all_gather``: each member's shard is copied to all;
* ``exchange``: all members hold the same single interval, send it to each other and add in group
  order, so that all get the same bits;
* ``all_reduce``: handed to torch.distributed as a whole.

A reduction to a leader or a parent is a reduce-scatter in which that rank owns everything, a
broadcast an all-gather from it; between two ranks they are a message.
"""

import hashlib
from enum import StrEnum

import msgspec

from topo_ar.errors import PlanError
from topo_ar.versioned_json import decode

SCHEDULE_SCHEMA_VERSION = 1


class Op(StrEnum):
    """What a step does."""

    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    EXCHANGE = "exchange"
    ALL_REDUCE = "all_reduce"


class Stage(StrEnum):
    """Where in the algorithm a step stands; the names that errors and traces use.

    ``island`` steps stay in a part of a node, ``intra`` steps in a node (across its islands, where
    it has any), ``rack`` steps in a rack, ``inter`` steps lead between nodes, or between racks
    where there are any. There each member sends to all others at once, except round an
    ``inter_ring``, where it sends to the next one only, as often as there are others. The other
    stages have no place in a hierarchy.
    """

    FLAT = "flat_all_reduce"
    RING_REDUCE_SCATTER = "ring_reduce_scatter"
    RING_ALL_GATHER = "ring_all_gather"
    TREE_REDUCE = "tree_reduce"
    TREE_BROADCAST = "tree_broadcast"
    FOLD = "fold_surplus_ranks"
    HALVING = "recursive_halving"
    DOUBLING = "recursive_doubling"
    UNFOLD = "unfold_surplus_ranks"
    DIRECT_REDUCE_SCATTER = "direct_reduce_scatter"
    DIRECT_ALL_GATHER = "direct_all_gather"
    ISLAND_REDUCE_SCATTER = "island_reduce_scatter"
    ISLAND_ALL_GATHER = "island_all_gather"
    RACK_REDUCE_SCATTER = "rack_reduce_scatter"
    RACK_ALL_GATHER = "rack_all_gather"
    INTRA_REDUCE_SCATTER = "intra_reduce_scatter"
    INTER_EXCHANGE = "inter_exchange"
    INTER_REDUCE_SCATTER = "inter_reduce_scatter"
    INTER_ALL_GATHER = "inter_all_gather"
    INTER_RING_REDUCE_SCATTER = "inter_ring_reduce_scatter"
    INTER_RING_ALL_GATHER = "inter_ring_all_gather"
    INTER_FOLD = "inter_fold_surplus_nodes"
    INTER_HALVING = "inter_recursive_halving"
    INTER_DOUBLING = "inter_recursive_doubling"
    INTER_UNFOLD = "inter_unfold_surplus_nodes"
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
    schema: int = SCHEDULE_SCHEMA_VERSION

    @property
    def hash(self) -> str:
        """The first 16 hex digits of the SHA-256 of the JSON: equal schedules, equal hash."""
        return hashlib.sha256(self.to_json()).hexdigest()[:16]

    def to_json(self) -> bytes:
        """Return the schedule as UTF-8 JSON in one stable order of keys."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(text: bytes | str) -> "Schedule":
        """Read a schedule; `verify.verify` says whether it is a correct all-reduce.

        Raises
        ------
        PlanError
            If `text` is not a schedule of a known schema; the message names the field.
        """
        hint = "lower a plan to make one"
        return decode(text, Schedule, SCHEDULE_SCHEMA_VERSION, "schedule", hint, PlanError)
