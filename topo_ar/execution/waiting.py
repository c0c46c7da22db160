"""Whom a rank waits for: what would wake it, whom to name when nothing comes, who may leave."""

from topo_ar.execution.errand import Wait
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.transports.segment import Counter
from topo_ar.planning.schedule import Stage

# How many rounds of a relay make a wait more indirect.
_FURTHEST = 3


def interest(pipeline: Pipeline) -> int:
    """Return which counters would let a lane go on by growing: a mask of ``1 << counter``."""
    if pipeline.errand is not None:
        return pipeline.errand.counters
    node, counters = pipeline.node, 0
    if pipeline.next_in < pipeline.end and not node.staging_free(pipeline.next_in):
        counters |= 1 << Counter.REDUCED
    if (
        pipeline.next_reduce < pipeline.end
        and node.least(Counter.COPIED_IN) <= pipeline.next_reduce
    ):
        counters |= 1 << Counter.COPIED_IN
    if pipeline.next_out < pipeline.next_publish:
        counters |= 1 << Counter.PUBLISHED
    if not node.result_free(max(pipeline.next_add, pipeline.next_publish)) or any(
        flow.gated for flow in pipeline.flows.values()
    ):
        counters |= 1 << Counter.COPIED_OUT
    return counters


def waits_for(pipeline: Pipeline) -> Wait:
    """Say for whom the oldest unfinished chunk waits, or the errand beside the chunks."""
    if pipeline.errand is not None:
        return pipeline.errand.wait()
    index = pipeline.next_out
    chunk = pipeline.chunks.get(index)
    if chunk is None:
        peers = tuple(flow.rank for flow in pipeline.flows.values() if flow.wants_out)
        return Wait(Stage.INTER_EXCHANGE, peers, "do not take the bytes sent to them", 1)
    for counter, text in (
        (Counter.COPIED_IN, "have not brought their input"),
        (Counter.REDUCED, "have not reduced their shard"),
    ):
        late = _late(pipeline, counter, index)
        if late:
            return Wait(Stage.INTRA_REDUCE_SCATTER, late, text, 0)
    relay = chunk.program.relay
    if chunk.awaited or chunk.gathering:
        stage, rounds = Stage.INTER_ALL_GATHER, 0
        if relay is not None:
            rounds = min(max(chunk.round, 0), len(relay.rounds) - 1)
            stage = relay.rounds[rounds].stage
        elif chunk.awaited:
            stage = chunk.program.segments[0].stage
        late = tuple(peer for peer, _ in chunk.program.expected if pipeline.flows[peer].outstanding)
        # A peer of a later round may itself wait for one of the round before.
        return Wait(stage, late, "have not sent their part", 1 + min(rounds, _FURTHEST))
    late = _late(pipeline, Counter.PUBLISHED, index)
    further = 0 if relay is None else min(len(relay.rounds), _FURTHEST)
    return Wait(Stage.INTRA_ALL_GATHER, late, "have not published their shard", 2 + further)


def needs(pipeline: Pipeline, rank: int) -> bool:
    """Tell whether an unfinished collective still depends on co-located `rank`."""
    if pipeline.errand is not None:
        return rank in pipeline.errand.wait().ranks
    node = pipeline.node
    return node.value(Counter.COPIED_OUT, node.ranks.index(rank)) < pipeline.end


def _late(pipeline: Pipeline, counter: int, index: int) -> tuple[int, ...]:
    node = pipeline.node
    return tuple(
        rank
        for local, rank in enumerate(node.ranks)
        if rank != pipeline.rank and node.value(counter, local) <= index
    )
