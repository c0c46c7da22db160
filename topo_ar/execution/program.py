"""What one rank does for each chunk of a schedule: the schedule read from its point of view."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topo_ar.errors import PlanError
from topo_ar.execution.relay_program import Relay, compile_relay, depths, unrolled
from topo_ar.planning.chunks import tapered_chunks
from topo_ar.planning.schedule import Op, Schedule, Stage, Step
from topo_ar.planning.step_list import RINGS, Interval, cut

# Chunks inside one node: whole lines of the cache, whatever the number of ranks.
_NODE_ALIGN_NBYTES = 4096
_ADD = (
    Stage.INTER_EXCHANGE,
    Stage.INTER_REDUCE_SCATTER,
    Stage.RACK_REDUCE_SCATTER,
    Stage.INTER_RING_REDUCE_SCATTER,
    Stage.INTER_FOLD,
    Stage.INTER_HALVING,
)
BETWEEN = (
    *_ADD,
    Stage.INTER_ALL_GATHER,
    Stage.RACK_ALL_GATHER,
    Stage.INTER_RING_ALL_GATHER,
    Stage.INTER_DOUBLING,
    Stage.INTER_UNFOLD,
)
# Inside a node all memory is equally near: islands reduce with the whole node.
_INSIDE = (Stage.ISLAND_REDUCE_SCATTER, Stage.INTRA_REDUCE_SCATTER)
_RUNS = {*BETWEEN, *_INSIDE, Stage.ISLAND_ALL_GATHER, Stage.INTRA_ALL_GATHER}


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
    relay : Relay or None
        In place of segments where sums are passed on.
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
    relay: Relay | None = None

    @property
    def is_inside(self) -> bool:
        """Whether the sum of the node is the result."""
        return not self.segments and self.relay is None

    @property
    def shares_results(self) -> bool:
        """Whether this rank sends a part of the result to other nodes."""
        return self.relay is not None or (bool(self.segments) and bool(self.segments[0].parts))

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
    node, shards = _in_node(steps, rank)
    between = [step for step in steps if step.stage in BETWEEN]
    adding = [step for step in between if step.stage in _ADD]
    own = [step for step in adding if rank in step.group]
    if not shards:
        if not own:
            raise PlanError(f"rank {rank} has a chunk without a reduction")
        hulls = [_hull(step) for step in own]
        shards = ((min(begin for begin, _ in hulls), max(end for _, end in hulls)),)
    chunk = ChunkProgram(
        min(begin for begin, _ in shards),
        max(end for _, end in shards),
        *shards[node.index(rank)],
        tuple(i for i, (begin, end) in enumerate(shards) if end > begin),
    )
    depth = depths(steps)
    if len({depth[step.index] for step in adding}) > 1 or (adding and adding[0].stage in RINGS):
        return _with_relay(chunk, between, depth, rank)
    numbered = [(number, step) for number, step in enumerate(adding) if rank in step.group]
    segments = _segments(numbered, rank)
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
    return replace(
        chunk,
        segments=segments,
        expected=tuple(frames.items()),
        awaited=awaited,
        gathering=gathering,
        arriving_numel=sum(segment.part[1] - segment.part[0] for segment in segments),
    )


def _with_relay(
    chunk: ChunkProgram, between: Sequence[Step], depth: Mapping[int, int], rank: int
) -> ChunkProgram:
    own = [(depth[s.index], number, s) for number, s in enumerate(between) if rank in s.group]
    if not own:
        return chunk
    relay = compile_relay(unrolled(own, rank), rank)
    return replace(
        chunk,
        expected=relay.expected,
        awaited=relay.awaited,
        gathering=relay.gathering,
        arriving_numel=relay.arriving_numel,
        relay=relay,
    )


def _in_node(steps: Sequence[Step], rank: int) -> tuple[tuple[int, ...], tuple[Interval, ...]]:
    """Return the ranks of a rank's node by number, and their shards; none if it is alone.

    Where a node reduces in several steps, one inside the other, the last shard counts.
    """
    inside = [step for step in steps if step.stage in _INSIDE]
    node, found = {rank}, 0
    while len(node) > found:
        found = len(node)
        node.update(*(step.group for step in inside if not node.isdisjoint(step.group)))
    stages = [step.stage for step in inside if rank in step.group]
    if len(stages) > len(set(stages)):
        raise PlanError(f"rank {rank} repeats a stage in its node in chunk {steps[0].chunk}")
    shard: dict[int, Interval] = {}
    for step in inside:
        if step.group[0] in node:
            shard.update(zip(step.group, step.shards, strict=True))
    by_number = tuple(sorted(node))
    return by_number, tuple(shard[each] for each in by_number) if shard else ()


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
