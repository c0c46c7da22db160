"""Symbolic check of a schedule: who holds whose contribution to which element.

Every rank starts with its own contribution to every element and must end with everybody's, each
exactly once. Contributions are bit masks over the ranks; each rank's buffer is followed as runs of
elements with one history, so that cost grows with the shard edges, not with the elements.

Chunks that touch separate stretches of the buffer are checked one by one. Of chunks that are the
same but for where their edges lie, the first stands for all: the check only ever compares edges.

A schedule that passes cannot deadlock when each rank runs the steps it takes part in in the order
of the list. Steps wait for earlier ones only, so that of all unfinished steps the first waits for
none; all its ranks have finished what they have to do before it; hence it can run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from topo_ar.errors import PlanError
from topo_ar.planning.runs import History, Run, Runs
from topo_ar.planning.schedule import Op, Schedule, Step
from topo_ar.planning.step_list import Interval


def verify(schedule: Schedule) -> None:
    """Return when `schedule` is a correct all-reduce in every order that its `after` allows.

    Every rank sees the operations of a group in the same order, that of the list. Time grows with
    the steps' group sizes and the shard edges of one chunk: 4,096 steps over 64 ranks take a
    fraction of a second.

    Raises
    ------
    PlanError
        If the sizes make no sense; else naming the first step that is malformed, adds a
        contribution twice or one that was given away, or does not wait for a step it depends on,
        or the first rank and interval that end without every contribution.
    """
    if schedule.world_size < 1 or schedule.numel < 0 or schedule.itemsize < 1:
        raise PlanError(
            f"the schedule is for {schedule.world_size} ranks and {schedule.numel} elements of "
            f"{schedule.itemsize} bytes; it needs at least one rank and one byte"
        )
    for position, step in enumerate(schedule.steps):
        _check_form(schedule, position, step)
    known: set[object] = set()
    end_of_last = 0
    for piece in _pieces(schedule):
        if piece.begin > end_of_last:
            _Replay(schedule, end_of_last, piece.begin).check_end()
        end_of_last = max(end_of_last, piece.end)
        form = _form(piece)
        if form not in known:
            replay = _Replay(schedule, piece.begin, piece.end)
            for step in piece.steps:
                replay.run(step)
            replay.check_end()
            known.add(form)
    if end_of_last < schedule.numel:
        _Replay(schedule, end_of_last, schedule.numel).check_end()


def _describe(step: Step) -> str:
    return f"step {step.index} ({step.stage}, chunk {step.chunk}, ranks {list(step.group)[:8]})"


def _check_form(schedule: Schedule, position: int, step: Step) -> None:
    if step.index != position:
        raise PlanError(
            f"{_describe(step)} stands at position {position}; a step's index is its position"
        )
    if any(not 0 <= earlier < position for earlier in step.after):
        raise PlanError(
            f"{_describe(step)} waits for {list(step.after)}; it may wait for earlier steps only"
        )
    group = set(step.group)
    known = all(0 <= rank < schedule.world_size for rank in group)
    if len(group) != len(step.group) or len(group) < 2 or not known:
        raise PlanError(
            f"{_describe(step)} needs at least two different ranks below {schedule.world_size} "
            "in its group"
        )
    for earlier in step.after:
        if group.isdisjoint(schedule.steps[earlier].group):
            raise PlanError(
                f"{_describe(step)} waits for {_describe(schedule.steps[earlier])}, in which none "
                "of its ranks takes part, so that none knows when it ends"
            )
    if len(step.shards) != len(step.group):
        raise PlanError(
            f"{_describe(step)} has {len(step.shards)} shards for {len(step.group)} ranks"
        )
    if all(begin == end for begin, end in step.shards):
        raise PlanError(f"{_describe(step)} moves nothing; leave it out")
    if any(not 0 <= begin <= end <= schedule.numel for begin, end in step.shards):
        raise PlanError(f"{_describe(step)} has a shard outside of the {schedule.numel} elements")
    if step.op in (Op.EXCHANGE, Op.ALL_REDUCE):
        if len(set(step.shards)) != 1:
            raise PlanError(f"{_describe(step)} must give all ranks the same interval")
        return
    filled = sorted(shard for shard in step.shards if shard[0] < shard[1])
    if any(left[1] > right[0] for left, right in pairwise(filled)):
        raise PlanError(f"{_describe(step)} has shards that overlap")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Steps that touch the elements begin..end, which no other step touches."""

    begin: int
    end: int
    steps: list[Step]


def _pieces(schedule: Schedule) -> list[_Piece]:
    """Return the chunks in the order of the buffer, or one piece if they are not separate."""
    by_chunk: dict[int, list[Step]] = {}
    for step in schedule.steps:
        by_chunk.setdefault(step.chunk, []).append(step)
    pieces = []
    for steps in by_chunk.values():
        begin = min(begin for step in steps for begin, _ in step.shards)
        end = max(end for step in steps for _, end in step.shards)
        pieces.append(_Piece(begin, end, steps))
    pieces.sort(key=lambda piece: (piece.begin, piece.end))
    apart = all(left.end <= right.begin for left, right in pairwise(pieces))
    chunk_of = [step.chunk for step in schedule.steps]
    if apart and all(chunk_of[i] == step.chunk for step in schedule.steps for i in step.after):
        return pieces
    return [_Piece(0, schedule.numel, list(schedule.steps))]


def _form(piece: _Piece) -> object:
    """Return what the check of a piece depends on: its steps, with the edges only numbered."""
    edges = sorted({edge for step in piece.steps for shard in step.shards for edge in shard})
    number = {edge: i for i, edge in enumerate(edges)}
    place = {step.index: i for i, step in enumerate(piece.steps)}
    return tuple(
        (
            step.op,
            step.group,
            tuple((number[begin], number[end]) for begin, end in step.shards),
            tuple(place[i] for i in step.after),
        )
        for step in piece.steps
    )


class _Replay:
    """The state of every rank's elements begin..end while steps run in order."""

    def __init__(self, schedule: Schedule, begin: int, end: int) -> None:
        self.steps = schedule.steps
        self.everybody = (1 << schedule.world_size) - 1
        self.begin, self.end = begin, end
        self.ranks = [Runs(begin, end, 1 << rank) for rank in range(schedule.world_size)]

    def run(self, step: Step) -> None:
        filled = [shard for shard in step.shards if shard[0] < shard[1]]
        for begin, end in _stretches(filled):
            if step.op is Op.ALL_GATHER:
                self._gather(step, begin, end)
            else:
                self._add(step, begin, end)

    def _gather(self, step: Step, begin: int, end: int) -> None:
        needed: dict[int, int] = {}
        read: list[tuple[Runs, list[Run]]] = []
        for rank, (first, last) in zip(step.group, step.shards, strict=True):
            if not begin <= first < last <= end:  # nothing of this rank's is in the stretch
                first = last = begin
            runs = self.ranks[rank]
            own = runs.between(first, last)
            read.append((runs, own))
            needed.update((old.writer, rank) for _, _, old in own)
            for _, _, old in runs.between(begin, first) + runs.between(last, end):
                needed.update((i, rank) for i in (old.writer, *old.readers))
        self._require_order(step, needed)
        parts = sorted(run for _, own in read for run in own)
        copies = Runs.of([(a, b, History(old.held, step.index)) for a, b, old in parts])
        for runs, own in read:
            runs.replace(begin, end, copies.between(begin, end))
            if own:
                kept = [(a, b, old.read_by(step.index)) for a, b, old in own]
                runs.replace(own[0][0], own[-1][1], kept)

    def _add(self, step: Step, begin: int, end: int) -> None:
        before = [self.ranks[rank].between(begin, end) for rank in step.group]
        needed = {
            i: rank
            for rank, runs in zip(step.group, before, strict=True)
            for _, _, old in runs
            for i in (old.writer, *old.readers)
        }
        self._require_order(step, needed)
        sums = [
            (a, b, History(self._sum(step, a, b, parts), step.index))
            for a, b, parts in _side_by_side(begin, end, before)
        ]
        # What a reduce-scatter leaves outside of a rank's own shard is used up: a later step that
        # counts on it must fail.
        result = [(begin, end, History(0, step.index))] if step.op is Op.REDUCE_SCATTER else sums
        for rank in step.group:
            self.ranks[rank].replace(begin, end, result)
        if step.op is Op.REDUCE_SCATTER:
            whole = Runs.of(sums)
            for rank, (first, last) in zip(step.group, step.shards, strict=True):
                if begin <= first < last <= end:
                    self.ranks[rank].replace(first, last, whole.between(first, last))

    def _sum(self, step: Step, begin: int, end: int, parts: Iterable[int]) -> int:
        total = 0
        for rank, held in zip(step.group, parts, strict=True):
            if not held:
                raise PlanError(
                    f"{_describe(step)} adds elements {begin}..{end} of rank {rank}, whose sum "
                    "another rank holds by now"
                )
            twice = total & held
            if twice:
                raise PlanError(
                    f"{_describe(step)} adds the contribution of rank {_lowest(twice)} twice to "
                    f"elements {begin}..{end}"
                )
            total |= held
        return total

    def _require_order(self, step: Step, needed: dict[int, int]) -> None:
        """Refuse a step that does not wait for all of `needed`, steps with a rank they share."""
        missing = set(needed) - {-1} - set(step.after)
        lowest = min(missing, default=0)
        pending, seen = list(step.after), set(step.after)
        while missing and pending:
            after = self.steps[pending.pop()].after
            missing.difference_update(after)
            if missing:
                further = [i for i in after if i > lowest and i not in seen]
                seen.update(further)
                pending += further
        if missing:
            earlier = max(missing)
            raise PlanError(
                f"{_describe(step)} does not wait for {_describe(self.steps[earlier])}, "
                f"which touches the same elements on rank {needed[earlier]}"
            )

    def check_end(self) -> None:
        for rank, runs in enumerate(self.ranks):
            for begin, end, history in runs.between(self.begin, self.end):
                missing = self.everybody & ~history.held
                if missing:
                    raise PlanError(
                        f"rank {rank} ends without the contribution of rank {_lowest(missing)} "
                        f"to elements {begin}..{end}"
                    )


def _lowest(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1


def _stretches(shards: Iterable[Interval]) -> list[Interval]:
    """Join intervals that follow each other."""
    joined: list[Interval] = []
    for begin, end in sorted(set(shards)):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _side_by_side(
    begin: int, end: int, rows: Sequence[list[Run]]
) -> Iterator[tuple[int, int, list[int]]]:
    """Cut all rows at the edges of each; yield the interval and what every row holds there."""
    edges = sorted({begin, end, *(run[0] for row in rows for run in row)})
    at = [0] * len(rows)
    for first, last in pairwise(edges):
        held = []
        for i, row in enumerate(rows):
            while row[at[i]][1] <= first:
                at[i] += 1
            held.append(row[at[i]][2].held)
        yield first, last, held
