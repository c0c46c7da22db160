"""What the all-reduce of one bucket occupies, chunk by chunk, with or without a codec."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from topo_ar.planning.buckets import Bucket
from topo_ar.planning.candidates import Candidate, Setting, candidates, choose
from topo_ar.planning.codec_costs import CodecCosts
from topo_ar.planning.codecs import NONE, Codec
from topo_ar.planning.cost import CostParameters, pipeline_seconds
from topo_ar.planning.overlap import Chunk, Job
from topo_ar.planning.plan import Family

# Families whose stages inside and between nodes are told apart, so that neighbours overlap.
STAGED = frozenset({Family.HIERARCHICAL_SEQUENTIAL, Family.HIERARCHICAL_PIPELINED})
# What `plan=` of a communicator may say: the planner's choice for each size, or insist.
MODES = ("auto", "hierarchical", "flat")


@dataclass(frozen=True, slots=True)
class Pricing:
    """Finds the candidate of a bucket and prices it; remembers sizes it has seen.

    Attributes
    ----------
    setting : Setting
        The cluster and its runtime.
    costs : CodecCosts
        What codecs cost there.
    families : frozenset of Family or None
        What can be run; None for everything that the planner costs.
    """

    setting: Setting
    costs: CodecCosts
    families: frozenset[Family] | None = None
    _found: Callable[[int, str], Candidate] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_found", cache(self._find))

    def candidate(self, nbytes: int, mode: str) -> Candidate:
        """Return what a communicator in `mode` would run for `nbytes` bytes."""
        return self._found(nbytes, mode)

    def _find(self, nbytes: int, mode: str) -> Candidate:
        p = self.setting.parameters
        if nbytes == 0 or p.world_size == 1:
            return Candidate(Family.FLAT_RING, (nbytes,) if nbytes else (), 0.0)
        found = candidates(self.setting, nbytes)
        if mode == "flat":
            return next(c for c in found if c.family == Family.FLAT_RING)
        able = [c for c in found if self.families is None or c.family in self.families]
        chosen = choose(able)
        if mode == "hierarchical" and chosen.family not in STAGED:
            staged = [c for c in able if c.family in STAGED and _fits(c, self.setting)]
            return min(staged, key=lambda c: c.seconds, default=chosen)
        return chosen

    def ratio(self, bucket: Bucket, codec: Codec) -> float:
        """Return rho of `codec` on `bucket`."""
        return codec.ratio(bucket.shapes, self.setting.parameters.num_nodes, bucket.itemsize)

    def suits(self, bucket: Bucket, mode: str, codec: Codec) -> bool:
        """Tell whether `codec` makes the bucket smaller and has stages to work between."""
        staged = self.candidate(bucket.nbytes, mode).family in STAGED
        return staged and self.setting.parameters.num_nodes > 1 and self.ratio(bucket, codec) < 1

    def job(self, bucket: Bucket, mode: str, codec: Codec = NONE) -> Job:
        """Return what the bucket's all-reduce occupies.

        The seconds are the cost model's of every stage, scaled so that the bucket alone and exact
        takes what its candidate predicts. A codec needs the stages of a hierarchy and is left out
        elsewhere. PowerSGD takes a bucket in one chunk.
        """
        p = self.setting.parameters
        codec = codec if p.num_nodes > 1 else NONE
        candidate = self.candidate(bucket.nbytes, mode)
        if candidate.family not in STAGED or not p.ranks_per_node:
            alone = Chunk(0, 0, candidate.seconds, 0)
            return Job(bucket.ready_seconds, (alone,), alone=True)
        once, intra, inter = _stages(p, candidate.chunk_nbytes)
        alone_seconds = once + pipeline_seconds(intra, inter)
        scale = candidate.seconds / alone_seconds if alone_seconds else 1
        chunk_nbytes = candidate.chunk_nbytes
        if codec.whole:
            chunk_nbytes = (bucket.nbytes,)
        once, intra, inter = _stages(p, chunk_nbytes, self._wire(bucket, codec))
        kappa = self.costs.per_byte(codec) / p.ranks_per_node
        launch = self.costs.launch(codec)
        return Job(
            bucket.ready_seconds + once * scale,
            tuple(
                Chunk(local * scale, kappa * size + launch, remote * scale, local * scale)
                for size, local, remote in zip(chunk_nbytes, intra, inter, strict=True)
            ),
        )

    def _wire(self, bucket: Bucket, codec: Codec) -> tuple[float, float]:
        """Return the bytes and the latencies of `codec` as parts of those of an exact sum."""
        n = self.setting.parameters.num_nodes
        if codec == NONE:
            return 1, 1
        hops = sum(m.hops(n) for m in codec.messages(bucket.shapes, n, bucket.itemsize))
        return self.ratio(bucket, codec), hops / (2 * (n - 1))


def _stages(
    p: CostParameters, chunk_nbytes: tuple[int, ...], wire: tuple[float, float] = (1, 1)
) -> tuple[float, list[float], list[float]]:
    """Return latencies waited for once, and seconds inside and between nodes of each chunk.

    As `cost.hierarchical`, with bytes and latencies between nodes multiplied by `wire`.
    """
    ratio, hops = wire
    intra_alpha = (p.ranks_per_node - 1) * p.intra_alpha
    inter_alpha = 2 * (p.num_nodes - 1) * p.inter_alpha * hops
    once: float = 0
    if p.chunk_seconds is not None:
        once = 2 * intra_alpha + inter_alpha
        intra_alpha = inter_alpha = p.chunk_seconds
    return (
        once,
        [intra_alpha + size * p.intra_slope / 2 for size in chunk_nbytes],
        [inter_alpha + size * p.inter_slope * ratio for size in chunk_nbytes],
    )


def _fits(candidate: Candidate, setting: Setting) -> bool:
    return max(candidate.chunk_nbytes, default=0) <= setting.runtime.max_chunk_nbytes
