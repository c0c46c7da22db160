"""Symbolic check of a schedule: who holds whose contribution to which element.

Every rank starts with its own contribution to every element and must end with everybody's, each
exactly once. Contributions are bit masks over the ranks; elements are followed in intervals between
all the shard edges of the schedule.
"""

from bisect import bisect_left
from itertools import pairwise

from topo_ar.errors import PlanError
from topo_ar.planning.schedule import Op, Schedule, Step


def verify(schedule: Schedule) -> None:
    """Return when `schedule` is a correct all-reduce in every order that its `after` allows.

    Raises
    ------
    PlanError
        Naming the first step that is malformed, adds a contribution twice, gathers or overwrites
        what it need not find there, or does not wait for a step it depends on; or the first rank
        and interval that end without every contribution.
    """
    replay = _Replay(schedule)
    for position, step in enumerate(schedule.steps):
        _check_form(schedule, position, step)
        replay.run(step)
    replay.check_end()


def _describe(step: Step) -> str:
    return f"step {step.index} ({step.stage}, chunk {step.chunk}, ranks {list(step.group)[:8]})"


def _check_form(schedule: Schedule, position: int, step: Step) -> None:
    name = _describe(step)
    if step.index != position:
        raise PlanError(f"{name} stands at position {position}; a step's index is its position")
    if any(not 0 <= earlier < position for earlier in step.after):
        raise PlanError(f"{name} waits for {list(step.after)}; it may wait for earlier steps only")
    known = all(0 <= rank < schedule.world_size for rank in step.group)
    if len(set(step.group)) != len(step.group) or len(step.group) < 2 or not known:
        raise PlanError(
            f"{name} needs at least two different ranks below {schedule.world_size} in its group"
        )
    if len(step.shards) != len(step.group):
        raise PlanError(f"{name} has {len(step.shards)} shards for {len(step.group)} ranks")
    if any(not 0 <= begin <= end <= schedule.numel for begin, end in step.shards):
        raise PlanError(f"{name} has a shard outside of the {schedule.numel} elements")
    if step.op in (Op.EXCHANGE, Op.ALL_REDUCE):
        if len(set(step.shards)) != 1:
            raise PlanError(f"{name} must give all ranks the same interval")
        return
    filled = sorted(shard for shard in step.shards if shard[0] < shard[1])
    if any(left[1] > right[0] for left, right in pairwise(filled)):
        raise PlanError(f"{name} has shards that overlap")


class _Replay:
    """The state of every rank while the steps run in order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        edges = {0, schedule.numel}
        edges.update(edge for step in schedule.steps for shard in step.shards for edge in shard)
        self.edges = sorted(edges)
        self.everybody = (1 << schedule.world_size) - 1
        count = len(self.edges) - 1
        self.held = [[1 << rank] * count for rank in range(schedule.world_size)]
        self.touched: list[list[int]] = [[-1] * count for _ in range(schedule.world_size)]
        self.ancestors: list[int] = []

    def run(self, step: Step) -> None:
        before = 0
        for earlier in step.after:
            before |= self.ancestors[earlier] | 1 << earlier
        self.ancestors.append(before)
        shards = step.shards if step.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER) else step.shards[:1]
        for position, (begin, end) in enumerate(shards):
            for part in range(bisect_left(self.edges, begin), bisect_left(self.edges, end)):
                self._require_order(step, part, before)
                if step.op == Op.ALL_GATHER:
                    self._copy(step, part, step.group[position])
                else:
                    self._add(step, part, position)

    def _require_order(self, step: Step, part: int, before: int) -> None:
        for rank in step.group:
            last = self.touched[rank][part]
            if last >= 0 and not before >> last & 1:
                raise PlanError(
                    f"{_describe(step)} does not wait for {_describe(self.schedule.steps[last])}, "
                    f"which touches the same elements on rank {rank}"
                )
            self.touched[rank][part] = step.index

    def _copy(self, step: Step, part: int, owner: int) -> None:
        for rank in step.group:
            self.held[rank][part] = self.held[owner][part]

    def _add(self, step: Step, part: int, owner: int) -> None:
        total = 0
        for rank in step.group:
            contributions = self.held[rank][part]
            twice = total & contributions
            if twice:
                raise PlanError(
                    f"{_describe(step)} adds the contribution of rank "
                    f"{(twice & -twice).bit_length() - 1} twice to elements "
                    f"{self.edges[part]}..{self.edges[part + 1]}"
                )
            total |= contributions
        for position, rank in enumerate(step.group):
            # What a reduce-scatter leaves outside of a rank's own shard is used up: a later step
            # that counts on it must fail.
            keeps = step.op != Op.REDUCE_SCATTER or position == owner
            self.held[rank][part] = total if keeps else 0

    def check_end(self) -> None:
        for rank, held in enumerate(self.held):
            for part, contributions in enumerate(held):
                missing = self.everybody & ~contributions
                if missing:
                    raise PlanError(
                        f"rank {rank} ends without the contribution of rank "
                        f"{(missing & -missing).bit_length() - 1} to elements "
                        f"{self.edges[part]}..{self.edges[part + 1]}"
                    )
