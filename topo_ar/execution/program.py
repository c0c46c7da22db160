"""What one rank does for each chunk of a schedule: the schedule read from its point of view."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from topo_ar.errors import PlanError
from topo_ar.planning.chunks import tapered_chunks
from topo_ar.planning.schedule import Op, Schedule, Stage, Step
from topo_ar.planning.step_list import Interval, cut

# Chunks inside one node: whole lines of the cache, whatever the number of ranks.
_NODE_ALIGN_NBYTES = 4096
BETWEEN = (Stage.INTER_EXCHANGE, Stage.INTER_REDUCE_SCATTER)
_RUNS = {
    *BETWEEN,
    Stage.INTRA_REDUCE_SCATTER,
    Stage.INTER_ALL_GATHER,
    Stage.INTRA_ALL_GATHER,
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a rank's shard that the same ranks own on all nodes; intervals are elements.

    Attributes
    ----------
    number : int
        Its place among the segments of the chunk over all ranks: its name on the wire.
    begin, end : int
        The interval.
    rail : tuple of int
        The ranks that own it, one per node, in the order in which they are added.
    parts : tuple of (int, int)
        The part of each rail member when the rail first reduce-scatters; empty for an exchange.
    part : (int, int)
        What this rank sums up: its own of `parts`, or all in an exchange. May be empty.
    outgoing : tuple of (int, int, int)
        Each peer that gets a piece of this rank's sum, with the interval.
    arrive_begin, arrive_end : int
        Where a peer's share of `part` goes among what arrives from it for the chunk.
    stage : Stage
        In which the rail adds.
    """

    number: int
    begin: int
    end: int
    rail: tuple[int, ...]
    parts: tuple[Interval, ...]
    part: Interval
    outgoing: tuple[tuple[int, int, int], ...]
    arrive_begin: int
    arrive_end: int
    stage: Stage


@dataclass(frozen=True, slots=True)
class ChunkProgram:
    """One chunk for one rank; intervals are elements of the flat buffer.

    Attributes
    ----------
    begin, end : int
        The chunk.
    shard_begin, shard_end : int
        The part that this rank owns within its node; may be empty.
    owners : tuple of int
        Local ranks of this node whose part is not empty.
    segments : tuple of Segment
        What tiles the shard, in order; one where all nodes have equal shards, none on one node or
        for an empty shard.
    expected : tuple of (int, int)
        Each rail peer with the number of frames that it sends.
    awaited, gathering : int
        Frames to be added, and frames of results.
    arriving_numel : int
        Elements that a peer sends at most to be added.
    """

    begin: int
    end: int
    shard_begin: int
    shard_end: int
    owners: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    expected: tuple[tuple[int, int], ...] = ()
    awaited: int = 0
    gathering: int = 0
    arriving_numel: int = 0

    def segment(self, number: int, peer: int) -> Segment | None:
        """Return the segment of that number if `peer` has a part in it, else None."""
        for segment in self.segments:
            if segment.number == number and peer in segment.rail:
                return segment
        return None


def compile_program(
    schedule: Schedule, rank: int, slot_nbytes: int
) -> tuple[ChunkProgram, ...] | None:
    """Return what `rank` does chunk by chunk, or None for a flat all-reduce.

    What cannot run is refused on every rank, also on those that have no part in it.

    Parameters
    ----------
    schedule : Schedule
        Lowered from a plan; the same on every rank.
    rank : int
        Rank in the schedule's numbering.
    slot_nbytes : int
        The largest chunk that the shared memory can hold.

    Raises
    ------
    PlanError
        If the schedule has a step this runtime cannot run or a chunk that does not fit.
    """
    steps = schedule.steps
    if any(step.op is Op.ALL_REDUCE for step in steps):
        if len(steps) != 1:
            raise PlanError("a flat all-reduce cannot be mixed with other steps")
        return None
    by_chunk: dict[int, list[Step]] = {}
    for step in steps:
        if step.stage not in _RUNS:
            raise PlanError(f"step {step.index} is {step.stage}, which this runtime cannot run")
        by_chunk.setdefault(step.chunk, []).append(step)
    programs = []
    for chunk in sorted(by_chunk):
        program = _compile_chunk(by_chunk[chunk], rank)
        nbytes = (program.end - program.begin) * schedule.itemsize
        if nbytes > slot_nbytes:
            raise PlanError(
                f"chunk {chunk} has {nbytes} bytes and a slot {slot_nbytes}; "
                "plan with a smaller largest chunk"
            )
        programs.append(program)
    return tuple(programs)


def _compile_chunk(steps: Sequence[Step], rank: int) -> ChunkProgram:
    node: tuple[int, ...] = (rank,)
    shards: Sequence[Interval] = ()
    rails = []
    for step in steps:
        if step.stage in BETWEEN:
            rails.append(step)
        elif step.stage is Stage.INTRA_REDUCE_SCATTER and rank in step.group:
            if shards:
                raise PlanError(
                    f"step {step.index} repeats stage {step.stage} of chunk {step.chunk}"
                )
            node, shards = step.group, step.shards
    own = [(number, step) for number, step in enumerate(rails) if rank in step.group]
    if not shards:
        if not own:
            raise PlanError(f"rank {rank} has a chunk without a reduction")
        shards = ((_hull(own[0][1])[0], _hull(own[-1][1])[1]),)
    # A plan may order the ranks of a node by their NICs; local ranks go by number.
    by_number = sorted(node)
    owners = tuple(
        sorted(
            by_number.index(owner)
            for owner, (begin, end) in zip(node, shards, strict=True)
            if end > begin
        )
    )
    segments = _segments(own, rank)
    frames = Counter[int]()
    awaited = gathering = 0
    for segment in segments:
        for at, peer in enumerate(segment.rail):
            if peer == rank:
                continue
            adds = segment.part[1] > segment.part[0]
            gets = bool(segment.parts) and segment.parts[at][1] > segment.parts[at][0]
            awaited += adds
            gathering += gets
            frames[peer] += adds + gets
    return ChunkProgram(
        min(begin for begin, _ in shards),
        max(end for _, end in shards),
        *shards[node.index(rank)],
        owners,
        segments,
        tuple(frames.items()),
        awaited,
        gathering,
        sum(segment.part[1] - segment.part[0] for segment in segments),
    )


def _segments(own: Sequence[tuple[int, Step]], rank: int) -> tuple[Segment, ...]:
    """Return the segments of a rank, given its steps between nodes and their places."""
    segments: list[Segment] = []
    arrived = 0
    for number, step in own:
        begin, end = _hull(step)
        parts = step.shards if step.op is Op.REDUCE_SCATTER else ()
        part = step.shards[step.group.index(rank)]
        if segments and segments[-1].end != begin:
            raise PlanError(f"step {step.index} leaves a gap between the segments of rank {rank}")
        outgoing = tuple(
            (peer, *piece)
            for peer, piece in zip(step.group, step.shards, strict=True)
            if peer != rank and piece[1] > piece[0]
        )
        arriving, arrived = arrived, arrived + part[1] - part[0]
        segments.append(
            Segment(
                number, begin, end, step.group, parts, part, outgoing, arriving, arrived, step.stage
            )
        )
    return tuple(segments)


def _hull(step: Step) -> Interval:
    return min(begin for begin, _ in step.shards), max(end for _, end in step.shards)


def node_program(
    numel: int, num_local: int, local_rank: int, itemsize: int, slot_nbytes: int
) -> tuple[ChunkProgram, ...]:
    """Return an all-reduce among the ranks of one node alone, whatever the job's other nodes do.

    It has as many chunks on every node, for the chunks of a job are counted in one sequence.
    """
    chunks = []
    begin = 0
    for nbytes in tapered_chunks(numel * itemsize, _NODE_ALIGN_NBYTES, slot_nbytes):
        end = begin + nbytes // itemsize
        shards = cut(begin, end, [1] * num_local)
        owners = tuple(i for i, (first, last) in enumerate(shards) if last > first)
        chunks.append(ChunkProgram(begin, end, *shards[local_rank], owners))
        begin = end
    return tuple(chunks)
