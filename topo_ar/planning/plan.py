"""The plan: which algorithm, which chunks, what it should cost, what nothing can beat, and why."""

import hashlib
from enum import StrEnum

import msgspec

from topo_ar.errors import PlanError

SCHEMA_VERSION = 1


class Family(StrEnum):
    """The algorithms a plan can choose."""

    FLAT_RING = "flat_ring"
    HIERARCHICAL_SEQUENTIAL = "hierarchical_sequential"
    HIERARCHICAL_PIPELINED = "hierarchical_pipelined"
    HIERARCHICAL_LEADER = "hierarchical_leader"


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A family that was costed: its predicted seconds and the number of chunks it would use.

    `measured` says that the seconds come from a calibration, not from rates; `excluded` says why
    the family cannot be run or was not considered, and is empty for one that was.
    """

    family: Family
    seconds: float
    num_chunks: int
    measured: bool = False
    excluded: str = ""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one all-reduce of `nbytes` bytes is done by every rank of a job.

    `nodes` holds the global ranks of each node; `chunk_nbytes` tiles the buffer in order, and
    `local_weights` says which share of a chunk each local rank owns (equal nodes).
    `bound_seconds` is a proven lower bound on nominal rates, `wire_limit_seconds` the same on
    payload rates, `gap` is ``predicted_seconds / bound_seconds - 1``.
    """

    topology_hash: str
    world_size: int
    nbytes: int
    family: Family
    nodes: tuple[tuple[int, ...], ...]
    chunk_nbytes: tuple[int, ...]
    local_weights: tuple[int, ...]
    predicted_seconds: float
    bound_seconds: float
    wire_limit_seconds: float
    gap: float
    bottleneck: str
    alternatives: tuple[Alternative, ...]
    reason: str
    schema: int = SCHEMA_VERSION

    @property
    def runner_up(self) -> Alternative | None:
        """The best family that could run and was not chosen, or None when there was no other."""
        others = [a for a in self.alternatives if a.family != self.family and not a.excluded]
        return min(others, key=lambda a: a.seconds) if others else None

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
        try:
            plan = msgspec.json.decode(text, type=Plan)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"not a plan: {error}; write one with `topo-ar plan -o FILE`") from None
        if plan.schema != SCHEMA_VERSION:
            raise PlanError(f"plan schema {plan.schema} is not known; this version reads 1")
        return plan
