"""The plan of a training step's communication: its buckets, algorithms and codecs."""

import msgspec

from topo_ar.errors import PlanError
from topo_ar.planning.plan import Family
from topo_ar.versioned_json import decode

SCHEMA_VERSION = 1


class BucketPlan(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"family": "algorithm", "num_chunks": "chunks"},
):
    """How one bucket is reduced; in the order of the hook's calls.

    `ready_seconds` and `done_seconds` count from the begin of backward, `done_seconds` behind all
    buckets before it; `seconds` is what the bucket takes alone.
    """

    nbytes: int
    ready_seconds: float
    done_seconds: float
    seconds: float
    family: Family
    num_chunks: int
    codec: str


class CapChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an exact step exposes at best with a bucket cap; None is torch's default."""

    bucket_cap_mib: float | None
    num_buckets: int
    mode: str
    exposed_seconds: float


class CodecVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a codec would do for this job.

    Attributes
    ----------
    codec : str
        Name and argument.
    ratio : float
        rho: bytes between nodes over those of an exact all-reduce, for all gradients together.
    relative_error : float
        The proven limit of the error of one encoding.
    rounds : int
        Collectives between nodes that wait for each other.
    linear : bool
        Whether encoded gradients can be added.
    slope : float
        kappa: seconds per byte that one rank of a node spends; the ranks share a buffer.
    overlapped_break_even, sequential_break_even : float or None
        The rate of a node's NICs together in bytes/s below which it pays, with everything
        overlapped and one after the other; None where it never does.
    exposed_seconds : float or None
        What a step exposes with it at best; None where the policy left it out.
    excluded : str
        Why the policy left it out.
    """

    codec: str
    ratio: float
    relative_error: float
    rounds: int
    linear: bool
    slope: float
    overlapped_break_even: float | None
    sequential_break_even: float | None
    exposed_seconds: float | None = None
    excluded: str = ""


class TrainingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bucket cap, algorithm, chunks and codec of every bucket that expose least communication.

    Attributes
    ----------
    topology_hash, world_size, num_nodes
        The job.
    policy : str
        What was allowed: ``exact``, ``lossy:BOUND`` or names of codecs.
    num_parameters, gradient_nbytes : int
        The model.
    backward_seconds : float
        Length of backward.
    backward_source : str
        A sentence: where it comes from.
    bucket_cap_mib : float or None
        DDP's ``bucket_cap_mb``; None for torch's default.
    mode : str
        ``plan=`` of the communicator: ``auto``, ``hierarchical`` or ``flat``.
    buckets : tuple of BucketPlan
        In the order of the hook's calls.
    communication_seconds : float
        All buckets alone, one after the other.
    exposed_seconds : float
        What remains after backward.
    exact_exposed_seconds : float
        The same without codecs, at best.
    reference_cap_mib, reference_exposed_seconds
        The cap that the job has (None: torch's default) and what it exposes, exact.
    flat_exposed_seconds : float
        The same cap with the flat ring for every bucket.
    floor_ratio : float or None
        rho* = k1 / k2, under which a smaller ratio brings nothing; None on one node.
    caps, codecs, reason, notes
        What was compared, why the choice is what it is, and what was assumed.
    """

    topology_hash: str
    world_size: int
    num_nodes: int
    policy: str
    num_parameters: int
    gradient_nbytes: int
    backward_seconds: float
    backward_source: str
    bucket_cap_mib: float | None
    mode: str
    buckets: tuple[BucketPlan, ...]
    communication_seconds: float
    exposed_seconds: float
    exact_exposed_seconds: float
    reference_cap_mib: float | None
    reference_exposed_seconds: float
    flat_exposed_seconds: float
    floor_ratio: float | None
    caps: tuple[CapChoice, ...]
    codecs: tuple[CodecVerdict, ...]
    reason: str
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA_VERSION

    def to_json(self) -> bytes:
        """Return the plan as UTF-8 JSON in one stable order of keys."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(text: bytes | str) -> "TrainingPlan":
        """Read a plan.

        Raises
        ------
        PlanError
            If `text` is not a training plan of a known schema; the message names the field.
        """
        hint = "write one with `topo-ar plan --model ... --json`"
        return decode(text, TrainingPlan, SCHEMA_VERSION, "training plan", hint, PlanError)
