"""What one rank does for a chunk between nodes where one sum leads to the next.

In a rack, round a ring or in recursive halving, what a rank adds up goes on to others that add to
it, and results are passed on as well. The schedule's steps between nodes then fall into rounds: all
that stand equally deep in its dependencies. A rank sends what it has for a round, waits for what
comes in it, adds, and goes on to the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from topo_ar.errors import PlanError
from topo_ar.planning.schedule import Op, Stage, Step
from topo_ar.planning.step_list import RINGS, ring_messages

_MOST_STEPS = 1 << 16


@dataclass(frozen=True, slots=True)
class Sending:
    """Elements `begin` to `end` go to `peer` under the `number` of their step in the chunk.

    `held` is for them what it is for a `Sum`.
    """

    peer: int
    begin: int
    end: int
    number: int
    held: "Held | None" = None


@dataclass(frozen=True, slots=True)
class Held:
    """Where an earlier exchange left its sum: at `begin` elements of what `peer` sent."""

    peer: int
    begin: int


@dataclass(frozen=True, slots=True)
class Sum:
    """Elements `begin` to `end` are added up from those of all `members`, in their order.

    What others send of them lies at `arrive_begin` elements of what they send for the chunk. This
    rank's own lie in its partial, or where they are `held`; so do sums that go on, but those of an
    `exchange` take the place of what arrived, for its own may still be on its way out.
    """

    begin: int
    end: int
    members: tuple[int, ...]
    arrive_begin: int
    stage: Stage
    held: Held | None = None
    exchange: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What a rank waits for, adds and sends next.

    Attributes
    ----------
    frames : int
        That arrive in it.
    sums : tuple of Sum
        Made when they are there; none in a round of results.
    sends : tuple of Sending
        Sent after that.
    final : bool
        Its sums are results.
    stage : Stage
        In which it waits.
    """

    frames: int
    sums: tuple[Sum, ...]
    sends: tuple[Sending, ...]
    final: bool
    stage: Stage


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame belongs: the elements of a result, or of what arrives to be added."""

    round: int
    begin: int
    end: int
    result: bool


@dataclass(frozen=True, slots=True)
class Relay:
    """The rounds of one chunk for one rank.

    Attributes
    ----------
    first : tuple of Sending
        Sent of the sum of the rank's own node.
    rounds : tuple of Round
        Those that add to what is sent on, one that makes the result (unless another rank owns all
        of it), those of results.
    adding : int
        How many of them add.
    places : mapping
        Of every frame, by its sender and the number of its step.
    expected : tuple of (int, int)
        Every peer, with the number of frames that it sends.
    awaited, gathering : int
        What has to happen until all is added, frames of the final round and the rounds before it,
        and then until all results are there: the rounds after it.
    arriving_numel : int
        Elements that a peer sends at most to be added.
    """

    first: tuple[Sending, ...]
    rounds: tuple[Round, ...]
    adding: int
    places: Mapping[tuple[int, int], Place]
    expected: tuple[tuple[int, int], ...]
    awaited: int
    gathering: int
    arriving_numel: int


@dataclass(slots=True)
class _Draft:
    depth: int
    stage: Stage
    adds: bool
    frames: int = 0
    sums: list[Sum] = field(default_factory=list)
    sends: list[Sending] = field(default_factory=list)


def depths(steps: Sequence[Step]) -> dict[int, int]:
    """Return by its index for how many of `steps`, one after the other, each has to wait."""
    found: dict[int, int] = {}
    for step in steps:
        found[step.index] = 1 + max((found.get(i, -1) for i in step.after), default=-1)
    return found


def unrolled(steps: Sequence[tuple[int, int, Step]], rank: int) -> list[tuple[int, int, Step]]:
    """Return the steps of a rank for `compile_relay`, rings as its messages, each deeper by one."""
    found = []
    for depth, number, step in steps:
        if step.stage not in RINGS:
            found.append((depth, number, step))
            continue
        place, size = step.group.index(rank), len(step.group)
        for at in (place, (place + 1) % size):
            for hop, message in ring_messages(step, at):
                found.append((depth * size + hop, depth * size + hop, message))
    return found


def compile_relay(steps: Sequence[tuple[int, int, Step]], rank: int) -> Relay:
    """Return the rounds of a rank.

    Parameters
    ----------
    steps : sequence of (int, int, Step)
        The depth of each step between nodes of the chunk that `rank` is in, its number among all of
        the chunk's, and the step.
    rank : int
        The rank.

    Raises
    ------
    PlanError
        If there are too many steps to be told apart in a frame.
    """
    first: list[Sending] = []
    rounds: list[_Draft] = []
    places: dict[tuple[int, int], Place] = {}
    frames: dict[int, int] = {}
    arriving = 0
    held: Held | None = None
    for depth in sorted({depth for depth, _, _ in steps}):
        level = [(number, step) for at, number, step in steps if at == depth]
        draft = _Draft(depth, level[0][1].stage, level[0][1].op is not Op.ALL_GATHER)
        sends = rounds[-1].sends if rounds else first
        for number, step in level:
            _check(step, number, draft)
            own = step.shards[step.group.index(rank)]
            for peer, shard in zip(step.group, step.shards, strict=True):
                if peer == rank:
                    continue
                sent, come = (shard, own) if draft.adds else (own, shard)
                if sent[0] < sent[1]:
                    sends.append(Sending(peer, *sent, number, held if draft.adds else None))
                frames.setdefault(peer, 0)
                if come[0] < come[1]:
                    draft.frames += 1
                    frames[peer] += 1
                    at = (arriving, arriving + come[1] - come[0]) if draft.adds else come
                    places[peer, number] = Place(len(rounds), *at, result=not draft.adds)
            if draft.adds and own[0] < own[1]:
                exchange = step.op is Op.EXCHANGE
                draft.sums.append(
                    Sum(*own, step.group, arriving, step.stage, held, exchange=exchange)
                )
                if exchange:
                    held = Held(next(peer for peer in step.group if peer != rank), arriving)
                arriving += own[1] - own[0]
        if draft.frames:
            rounds.append(draft)
    last = max(depth for depth, _, step in steps if step.op is not Op.ALL_GATHER)
    final = [draft.adds and draft.depth == last for draft in rounds]
    adding = [draft.frames if end else 1 for draft, end in zip(rounds, final, strict=True)]
    count = sum(draft.adds for draft in rounds)
    return Relay(
        first=tuple(first),
        rounds=tuple(
            Round(draft.frames, tuple(draft.sums), tuple(draft.sends), end, draft.stage)
            for draft, end in zip(rounds, final, strict=True)
        ),
        adding=count,
        places=places,
        expected=tuple(frames.items()),
        awaited=sum(adding[:count]),
        gathering=len(rounds) - count,
        arriving_numel=arriving,
    )


def _check(step: Step, number: int, draft: _Draft) -> None:
    if number >= _MOST_STEPS:
        raise PlanError(f"chunk {step.chunk} has more than {_MOST_STEPS} steps between nodes")
    if (step.op is not Op.ALL_GATHER) is not draft.adds:
        raise PlanError(
            f"step {step.index} of chunk {step.chunk} gathers while others of its round add"
        )
