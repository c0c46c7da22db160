"""What the all-reduce of one bucket occupies, chunk by chunk, with or without a codec."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from topo_ar.planning.buckets import Bucket
from topo_ar.planning.candidates import Candidate, Setting, candidates, choose
from topo_ar.planning.codec_costs import CodecCosts
from topo_ar.planning.codecs import NONE, RUN, Codec
from topo_ar.planning.overlap import Chunk, Job
from topo_ar.planning.pipelines import Pipeline
from topo_ar.planning.plan import Family

# Families whose stages inside and between nodes are told apart, so that neighbours overlap.
STAGED = frozenset(
    {
        Family.HIERARCHICAL_SEQUENTIAL,
        Family.HIERARCHICAL_PIPELINED,
        Family.HIERARCHICAL_LEADER,
        Family.HIERARCHICAL_WEIGHTED,
        Family.HIERARCHICAL_THREE_LEVEL,
        Family.HIERARCHICAL_RING,
        Family.HIERARCHICAL_HALVING,
        Family.HIERARCHICAL_DOUBLING,
    }
)
# What `plan=` of a communicator may say: the planner's choice for each size, or insist.
MODES = ("auto", "hierarchical", "flat")


@dataclass(frozen=True, slots=True)
class Pricing:
    """Finds the candidate of a bucket and prices it; remembers sizes it has seen.

    Attributes
    ----------
    setting : Setting
        The cluster, its runtime and what can be run there.
    costs : CodecCosts
        What codecs cost there.
    """

    setting: Setting
    costs: CodecCosts
    _found: Callable[[int, str], Candidate] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_found", cache(self._find))

    @property
    def sharing(self) -> int:
        """The ranks of a node that share the work of a codec."""
        p = self.setting.parameters
        return p.ranks_per_node or min(len(node.ranks) for node in p.levels.nodes)

    @property
    def slopes(self) -> tuple[float, float]:
        """k1 and k2: seconds per byte of the stages inside and between nodes, nearly."""
        p = self.setting.parameters
        equal = Family.HIERARCHICAL_PIPELINED if p.ranks_per_node else Family.HIERARCHICAL_WEIGHTED
        pipeline = self.setting.pipeline(equal)
        inside = max((2 * each.slope + each.adding for each in pipeline.outer), default=0)
        return float(inside), float(pipeline.slope)

    def candidate(self, nbytes: int, mode: str) -> Candidate:
        """Return what a communicator in `mode` would run for `nbytes` bytes."""
        return self._found(nbytes, mode)

    def _find(self, nbytes: int, mode: str) -> Candidate:
        if nbytes == 0 or self.setting.parameters.world_size == 1:
            return Candidate(Family.FLAT_RING, (nbytes,) if nbytes else (), 0.0)
        found = candidates(self.setting, nbytes)
        if mode == "flat":
            return next(each for each in found if each.family == Family.FLAT_RING)
        chosen = choose(found)
        if mode == "hierarchical" and chosen.family not in STAGED:
            staged = [each for each in found if each.family in STAGED and not each.excluded]
            return min(staged, key=lambda each: each.seconds, default=chosen)
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
        takes what its candidate predicts; outer stages count as one. A codec needs the stages of a
        hierarchy and several nodes, else it is left out. Where the runtime does not overlap
        compressed buckets, each has all for itself, and is reduced inside the node as a whole.
        """
        candidate = self.candidate(bucket.nbytes, mode)
        if candidate.family not in STAGED:
            return Job(
                bucket.ready_seconds, (Chunk(0, 0, float(candidate.seconds), 0),), alone=True
            )
        pipeline = self.setting.pipeline(candidate.family)
        exact = _job(pipeline, candidate.chunk_nbytes)
        alone = exact.seconds_alone
        scale = float(candidate.seconds / alone) if alone else 1
        if codec == NONE or self.setting.parameters.num_nodes < 2:
            return exact.scaled(scale, bucket.ready_seconds)
        sizes = self.chunks(bucket, mode, codec)
        coded = _job(pipeline, sizes, *self.wire(bucket, codec))
        alone = not self.setting.runtime.overlaps_codecs
        if alone:
            (whole,) = _job(pipeline, (sum(sizes),)).chunks
            chunks = [chunk._replace(scatter=0, gather=0) for chunk in coded.chunks]
            chunks[0] = chunks[0]._replace(scatter=whole.scatter)
            chunks[-1] = chunks[-1]._replace(gather=whole.gather)
            coded = replace(coded, chunks=tuple(chunks))
        codec_seconds = [
            self.codec_seconds(codec, size, first=not number) for number, size in enumerate(sizes)
        ]
        found = coded.scaled(scale, bucket.ready_seconds, codec=codec_seconds)
        return replace(found, alone=alone)

    def chunks(self, bucket: Bucket, mode: str, codec: Codec) -> tuple[int, ...]:
        """Return the bytes of the chunks in which a bucket is encoded and reduced."""
        candidate = self.candidate(bucket.nbytes, mode)
        overlaps = self.setting.runtime.overlaps_codecs
        if codec == NONE or (overlaps and not codec.whole):
            return candidate.chunk_nbytes
        whole = sum(candidate.chunk_nbytes)
        if overlaps or not codec.by_runs:
            return (whole,)
        size = RUN * bucket.itemsize * self.sharing
        return tuple(min(size, whole - begin) for begin in range(0, whole, size))

    def codec_seconds(self, codec: Codec, nbytes: int, *, first: bool = True) -> float:
        """Return what a rank spends on its part of a chunk of `nbytes` bytes.

        Where a shard is encoded by runs, only the first pays what is paid once a bucket.
        """
        launch = self.costs.launch(codec) if first or not codec.by_runs else 0
        return self.costs.per_byte(codec) / self.sharing * nbytes + launch

    def wire(self, bucket: Bucket, codec: Codec) -> tuple[float, float]:
        """Return the bytes and the latencies of `codec` as parts of those of an exact sum."""
        n = self.setting.parameters.num_nodes
        hops = sum(m.hops(n) for m in codec.messages(bucket.shapes, n, bucket.itemsize))
        return self.ratio(bucket, codec), hops / (2 * (n - 1))


def _job(
    pipeline: Pipeline, chunk_nbytes: tuple[int, ...], ratio: float = 1, hops: float = 1
) -> Job:
    """Return a job that is ready at 0, after latencies that nothing waits for.

    As `Pipeline.seconds`, with bytes and latencies of the middle stage multiplied.
    """
    inwards = sum(each.slope + each.adding for each in pipeline.outer)
    outwards = sum(each.slope for each in pipeline.outer)
    outer_alpha = sum(each.alpha for each in pipeline.outer)
    alpha, once = pipeline.alpha * hops, pipeline.once
    if pipeline.chunk_seconds is not None:
        once += 2 * outer_alpha + alpha
        outer_alpha = pipeline.chunk_seconds * len(pipeline.outer)
        alpha = pipeline.chunk_seconds
    # Exact slopes are fractions, which would make a thousand chunks slow.
    inwards, outwards = float(inwards), float(outwards)
    middle, trailing = float(pipeline.slope) * ratio, float(pipeline.trailing) * ratio
    return Job(
        once,
        tuple(
            Chunk(
                outer_alpha + size * inwards,
                0,
                alpha + size * middle,
                outer_alpha + size * outwards,
                size * trailing,
            )
            for size in chunk_nbytes
        ),
    )
