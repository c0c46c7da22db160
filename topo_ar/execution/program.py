"""What one rank does for each chunk of a schedule: the schedule read from its point of view."""

from dataclasses import dataclass

from topo_ar.errors import PlanError
from topo_ar.planning.chunks import tapered_chunks
from topo_ar.planning.schedule import Op, Schedule, Stage, Step
from topo_ar.planning.step_list import cut


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
        Local ranks whose part is not empty.
    rail : tuple of int
        The ranks that hold the same part, one per node, this rank among them; empty on one node
        or for an empty part.
    parts : tuple of (int, int)
        The part of each rail member when the rail first reduce-scatters; empty for an exchange.
    """

    begin: int
    end: int
    shard_begin: int
    shard_end: int
    owners: tuple[int, ...]
    rail: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


def compile_program(
    schedule: Schedule, rank: int, slot_nbytes: int
) -> tuple[ChunkProgram, ...] | None:
    """Return what `rank` does chunk by chunk, or None for a flat all-reduce.

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
    mine = [step for step in schedule.steps if rank in step.group]
    if any(step.op is Op.ALL_REDUCE for step in mine):
        if len(mine) != 1:
            raise PlanError("a flat all-reduce cannot be mixed with other steps")
        return None
    by_chunk: dict[int, dict[Stage, Step]] = {}
    for step in mine:
        stages = by_chunk.setdefault(step.chunk, {})
        if step.stage in stages:
            raise PlanError(f"step {step.index} repeats stage {step.stage} of chunk {step.chunk}")
        stages[step.stage] = step
    chunks = tuple(_compile_chunk(by_chunk[key], rank) for key in sorted(by_chunk))
    for number, chunk in enumerate(chunks):
        nbytes = (chunk.end - chunk.begin) * schedule.itemsize
        if nbytes > slot_nbytes:
            raise PlanError(
                f"chunk {number} has {nbytes} bytes and a slot {slot_nbytes}; "
                "plan with a smaller largest chunk"
            )
    return chunks


def _compile_chunk(stages: dict[Stage, Step], rank: int) -> ChunkProgram:
    scatter = stages.get(Stage.INTRA_REDUCE_SCATTER)
    exchange = stages.get(Stage.INTER_EXCHANGE)
    inter = stages.get(Stage.INTER_REDUCE_SCATTER)
    rail = exchange or inter
    if scatter is not None:
        shards = scatter.shards
        shard = shards[scatter.group.index(rank)]
        # A plan may order the ranks of a node by their NICs; local ranks go by number.
        by_number = sorted(scatter.group)
        owners = tuple(
            sorted(
                by_number.index(owner)
                for owner, (begin, end) in zip(scatter.group, shards, strict=True)
                if end > begin
            )
        )
    elif rail is not None:
        shards = rail.shards
        shard = (min(s[0] for s in shards), max(s[1] for s in shards))
        owners = (0,)
    else:
        raise PlanError(f"rank {rank} has a chunk without a reduction")
    return ChunkProgram(
        begin=min(s[0] for s in shards),
        end=max(s[1] for s in shards),
        shard_begin=shard[0],
        shard_end=shard[1],
        owners=owners,
        rail=rail.group if rail is not None else (),
        parts=inter.shards if inter is not None else (),
    )


def node_program(
    numel: int, num_local: int, local_rank: int, itemsize: int, slot_nbytes: int
) -> tuple[ChunkProgram, ...]:
    """Return an all-reduce among the ranks of one node alone, whatever the job's other nodes do."""
    chunks = []
    begin = 0
    align = 16 * num_local * itemsize
    for nbytes in tapered_chunks(numel * itemsize, align, slot_nbytes):
        end = begin + nbytes // itemsize
        shards = cut(begin, end, [1] * num_local)
        owners = tuple(i for i, (first, last) in enumerate(shards) if last > first)
        chunks.append(ChunkProgram(begin, end, *shards[local_rank], owners, (), ()))
        begin = end
    return tuple(chunks)
