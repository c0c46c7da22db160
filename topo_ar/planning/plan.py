"""The plan: which algorithm, which chunks, what it should cost, what nothing can beat, and why."""

import hashlib
from enum import StrEnum

import msgspec

from topo_ar.errors import PlanError
from topo_ar.versioned_json import decode

SCHEMA_VERSION = 2


class Family(StrEnum):
    """The algorithms a plan can choose.

    ``hierarchical_weighted`` is the pipelined one with shards in proportion to what each node and
    NIC can carry; it alone suits nodes of unequal numbers of ranks. ``hierarchical_three_level``
    has islands of ranks inside the nodes, or racks of nodes around them.

    These exchange directly between nodes: each rank sends to all others of its rail at once. Three
    others send to few: ``hierarchical_ring`` passes the parts of a shard round a ring of the nodes,
    ``hierarchical_halving`` halves and doubles them recursively, and in ``hierarchical_doubling``
    one leader of each node doubles whole buffers.
    """

    FLAT_RING = "flat_ring"
    DOUBLE_BINARY_TREE = "double_binary_tree"
    HALVING_DOUBLING = "halving_doubling"
    DIRECT = "direct"
    HIERARCHICAL_SEQUENTIAL = "hierarchical_sequential"
    HIERARCHICAL_PIPELINED = "hierarchical_pipelined"
    HIERARCHICAL_LEADER = "hierarchical_leader"
    HIERARCHICAL_WEIGHTED = "hierarchical_weighted"
    HIERARCHICAL_THREE_LEVEL = "hierarchical_three_level"
    HIERARCHICAL_RING = "hierarchical_ring"
    HIERARCHICAL_HALVING = "hierarchical_halving"
    HIERARCHICAL_DOUBLING = "hierarchical_doubling"


class Shards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Integer weights of who owns which part of a chunk.

    ``ranks[i][k]`` is the weight of local rank k of node i within its node: the part of the chunk
    that it holds after the reduce-scatter inside the node. ``nodes[i]`` is the weight of node i in
    the stage between nodes: the part of each interval that it sums for all. Only proportions
    count; a weight may be zero. An exchange between nodes has no roots and ignores `nodes`.
    """

    nodes: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


class Alternative(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"family": "algorithm"}
):
    """A family that was costed: its predicted seconds and the number of chunks it would use.

    `measured` says that the seconds come from a calibration, not from rates; `excluded` says why
    the family cannot be run or was not considered, and is empty for one that was.
    """

    family: Family
    seconds: float
    num_chunks: int
    measured: bool = False
    excluded: str = ""


class Plan(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"family": "algorithm", "chunk_nbytes": "chunks"},
):
    """How one all-reduce of `nbytes` bytes is done by every rank of a job.

    In JSON `family` is called ``algorithm`` and `chunk_nbytes` ``chunks``. `nodes` holds the
    global ranks of each node, nodes and ranks in the order in which rings and shards go through
    them; `islands` are groups of ranks inside nodes, `racks` groups of positions in `nodes`: the
    third level of ``hierarchical_three_level``, of which a plan has at most one. `chunk_nbytes`
    tiles the buffer in order. `codec` compresses the stage between nodes.
    `bound_seconds` is a proven lower bound on nominal rates, `wire_limit_seconds` the same on
    payload rates, `gap` is ``predicted_seconds / bound_seconds - 1``. `runner_up` is the best
    alternative that could run and was not chosen.
    """

    topology_hash: str
    world_size: int
    nbytes: int
    family: Family
    nodes: tuple[tuple[int, ...], ...]
    chunk_nbytes: tuple[int, ...]
    shards: Shards
    predicted_seconds: float
    bound_seconds: float
    wire_limit_seconds: float
    gap: float
    bottleneck: str
    alternatives: tuple[Alternative, ...]
    reason: str
    runner_up: Alternative | None = None
    codec: str = "none"
    islands: tuple[tuple[int, ...], ...] = ()
    racks: tuple[tuple[int, ...], ...] = ()
    schema: int = SCHEMA_VERSION

    @property
    def hash(self) -> str:
        """The first 16 hex digits of the SHA-256 of the plan's JSON: equal plans, equal hash."""
        return hashlib.sha256(self.to_json()).hexdigest()[:16]

    def to_json(self) -> bytes:
        """Return the plan as UTF-8 JSON in one stable order of keys."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(text: bytes | str) -> "Plan":
        """Read a plan.

        Raises
        ------
        PlanError
            If `text` is not a plan of a known schema; the message names the field.
        """
        hint = "write one with `topo-ar plan -o FILE`"
        return decode(text, Plan, SCHEMA_VERSION, "plan", hint, PlanError)
