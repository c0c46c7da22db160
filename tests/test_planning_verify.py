"""The symbolic check against an interpreter with numbers, and against spoiled schedules."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule_cases import (
    ANY_NODES,
    TWO_LEVEL,
    any_plan,
    in_order,
    interpret,
    make,
    make_ring,
)
from topo_ar.errors import PlanError
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family
from topo_ar.planning.schedule import Op, Schedule, Stage, Step
from topo_ar.planning.verify import verify

SIX = in_order([2] * 3)
# One small schedule of each family that has steps to spoil, and rings of messages.
SMALL = {
    **{family: make(family, SIX, 36, 2) for family in (*ANY_NODES, *TWO_LEVEL)},
    Family.HIERARCHICAL_WEIGHTED: make(Family.HIERARCHICAL_WEIGHTED, in_order([3, 1, 2]), 36, 2),
    Family.HIERARCHICAL_THREE_LEVEL: make(
        Family.HIERARCHICAL_THREE_LEVEL, in_order([2] * 4), 40, 2, racks=((0, 1), (2, 3))
    ),
    "ring": make_ring(SIX, 36, 2),
}


@st.composite
def any_schedule(draw, max_world=16):
    return lower(*draw(any_plan(max_world)))


def run_in_any_order(schedule, seed):
    """Return whether one order that the dependencies allow gives every rank the sum."""
    data = np.random.default_rng(seed).integers(-99, 99, (schedule.world_size, schedule.numel))
    expected = data.sum(axis=0)
    chooser = random.Random(seed)
    followers = {step.index: [] for step in schedule.steps}
    waiting = {step.index: len(step.after) for step in schedule.steps}
    for step in schedule.steps:
        for earlier in step.after:
            followers[earlier].append(step.index)
    ready = [index for index, count in waiting.items() if count == 0]
    while ready:
        index = ready.pop(chooser.randrange(len(ready)))
        interpret(schedule.steps[index], data)
        for follower in followers[index]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    return (data == expected).all()


@given(any_schedule())
def test_every_family_is_a_correct_all_reduce(schedule):
    verify(schedule)


@given(any_schedule(), st.integers(0, 2**32))
def test_any_order_that_the_dependencies_allow_gives_the_sum(schedule, seed):
    assert run_in_any_order(schedule, seed)


@given(st.permutations(range(7)), st.integers(0, 40), st.integers(1, 4), st.integers(0, 2**32))
def test_rings_of_messages_give_the_sum(order, numel, channels, seed):
    schedule = make_ring((tuple(order[:4]), tuple(order[4:])), numel, channels)
    verify(schedule)
    assert run_in_any_order(schedule, seed)


@given(any_schedule())
def test_ranks_that_keep_the_order_of_the_list_never_wait_for_each_other(schedule):
    todo = {rank: [] for rank in range(schedule.world_size)}
    for step in schedule.steps:
        for rank in step.group:
            todo[rank].append(step)
    done = set()
    heads = {rank: iter(steps) for rank, steps in todo.items()}
    at = {rank: next(steps, None) for rank, steps in heads.items()}
    while any(at.values()):
        runnable = {
            step.index: step
            for step in at.values()
            if step and done.issuperset(step.after) and all(at[rank] is step for rank in step.group)
        }
        assert runnable, "deadlock"
        for index, step in runnable.items():
            done.add(index)
            at.update((rank, next(heads[rank], None)) for rank in step.group)
    assert len(done) == len(schedule.steps)


# --- spoiled schedules ---


def changed(schedule, position, **fields):
    steps = list(schedule.steps)
    steps[position] = msgspec.structs.replace(steps[position], **fields)
    return msgspec.structs.replace(schedule, steps=tuple(steps))


def renumbered(schedule, steps):
    """Steps in a new order, `after` of the old numbers led to the new ones."""
    number = {step.index: position for position, step in enumerate(steps)}
    return msgspec.structs.replace(
        schedule,
        steps=tuple(
            msgspec.structs.replace(
                step, index=position, after=tuple(sorted(number[i] for i in step.after))
            )
            for position, step in enumerate(steps)
        ),
    )


def without(schedule, index):
    """Drop a step; whoever waited for it then waits for what it waited for, where they meet."""
    gone = schedule.steps[index]
    steps = []
    for step in schedule.steps:
        waits = set(step.after)
        if index in waits:
            waits = waits - {index} | {
                i for i in gone.after if set(schedule.steps[i].group) & set(step.group)
            }
        if step is not gone:
            steps.append(msgspec.structs.replace(step, after=tuple(waits)))
    return renumbered(schedule, steps)


def repeated(schedule, index):
    """Run a step twice in a row; whoever waited for it waits for the second time."""
    first = schedule.steps[index]
    again = msgspec.structs.replace(first, index=-1, after=(index,))
    steps = []
    for step in schedule.steps:
        after = tuple(-1 if i == index else i for i in step.after)
        steps.append(msgspec.structs.replace(step, after=after))
        if step is first:
            steps.append(again)
    return renumbered(schedule, steps)


@pytest.mark.parametrize("name", SMALL)
def test_a_missing_step_is_found(name):
    for index in range(len(SMALL[name].steps)):
        with pytest.raises(PlanError, match="without the contribution|does not wait|adds elements"):
            verify(without(SMALL[name], index))


@pytest.mark.parametrize("name", SMALL)
def test_a_step_that_adds_twice_is_found(name):
    for step in SMALL[name].steps:
        if step.op is Op.ALL_GATHER:
            verify(repeated(SMALL[name], step.index))  # a second copy is the same copy
        else:
            with pytest.raises(PlanError, match=r"twice|by now"):
                verify(repeated(SMALL[name], step.index))


@pytest.mark.parametrize("name", SMALL)
def test_a_missing_dependency_is_found(name):
    schedule = SMALL[name]
    for step in schedule.steps:
        for dropped in step.after:
            kept = tuple(i for i in step.after if i != dropped)
            with pytest.raises(PlanError, match=rf"step {step.index} .* does not wait"):
                verify(changed(schedule, step.index, after=kept))


@pytest.mark.parametrize("name", SMALL)
def test_a_step_before_what_it_waits_for_is_found(name):
    schedule = SMALL[name]
    for step in schedule.steps:
        for earlier in step.after:
            steps = list(schedule.steps)
            steps[earlier], steps[step.index] = steps[step.index], steps[earlier]
            with pytest.raises(PlanError, match="earlier steps only"):
                verify(renumbered(schedule, steps))
            # Without waiting for it either, the result is wrong whatever the order.
            blind = [msgspec.structs.replace(s, after=()) for s in steps]
            with pytest.raises(PlanError, match=r"does not wait|by now|without the contribution"):
                verify(renumbered(schedule, blind))


@settings(max_examples=150)
@given(st.data())
def test_what_the_check_accepts_the_interpreter_computes(data):
    schedule = data.draw(st.sampled_from(list(SMALL.values())))
    position = data.draw(st.integers(0, len(schedule.steps) - 1))
    step = schedule.steps[position]
    shards, group, after = list(step.shards), list(step.group), list(step.after)
    what = data.draw(st.sampled_from(["shards", "group", "op", "after"]))
    if what == "shards":
        shards = data.draw(st.permutations(shards))
    elif what == "group":
        i = data.draw(st.integers(0, len(group) - 1))
        group[i] = data.draw(st.integers(0, schedule.world_size - 1))
    elif what == "after":
        after = data.draw(st.lists(st.integers(0, max(position - 1, 0)), unique=True))
    op = data.draw(st.sampled_from(list(Op))) if what == "op" else step.op
    spoiled = changed(
        schedule, position, op=op, group=tuple(group), shards=tuple(shards), after=tuple(after)
    )
    try:
        verify(spoiled)
    except PlanError:
        return
    assert all(run_in_any_order(spoiled, seed) for seed in range(5))


def test_messages_name_step_and_rank():
    schedule = make(Family.HIERARCHICAL_PIPELINED, SIX, 60)
    last = schedule.steps[-1]
    mine = tuple(step.index for step in schedule.steps if {0, 2} & set(step.group))
    twice = Step(last.index + 1, Stage.INTER_EXCHANGE, Op.EXCHANGE, (0, 2), ((0, 5),) * 2, 0, mine)
    spoiled = msgspec.structs.replace(schedule, steps=(*schedule.steps, twice))
    with pytest.raises(PlanError, match=r"step \d+ \(inter_exchange.*rank 0 twice.*0\.\.5"):
        verify(spoiled)
    with pytest.raises(PlanError, match=r"rank 0 ends without.*rank 1 to elements 0\.\.60"):
        verify(msgspec.structs.replace(schedule, steps=()))


def test_a_stretch_that_no_chunk_touches_is_found():
    schedule = make(Family.DIRECT, SIX, 60, 3)
    for chunk, interval in enumerate((r"0\.\.20", r"20\.\.40", r"40\.\.60")):
        steps = [step for step in schedule.steps if step.chunk != chunk]
        with pytest.raises(PlanError, match=f"rank 0 ends without.* elements {interval}"):
            verify(renumbered(schedule, steps))


def test_chunks_that_are_alike_do_not_hide_one_that_is_not():
    schedule = make(Family.HIERARCHICAL_PIPELINED, SIX, 96, 4)
    last = [step for step in schedule.steps if step.chunk == 3]
    wrong = changed(schedule, last[0].index, group=last[0].group[::-1])
    with pytest.raises(PlanError, match="chunk 3"):
        verify(wrong)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"index": 7}, "stands at position 3"),
        ({"after": (3,)}, "earlier steps only"),
        ({"after": (-1,)}, "earlier steps only"),
        ({"after": (1,), "group": (0, 4)}, "none knows when it ends"),
        ({"group": (2, 2)}, "two different ranks"),
        ({"group": (2, 9)}, "two different ranks"),
        ({"group": (2,)}, "two different ranks"),
        ({"shards": ((0, 60),)}, "1 shards for 3 ranks"),
        ({"shards": ((0, 10), (10, 20), (20, 61))}, "outside of the 60"),
        ({"shards": ((0, 11), (10, 20), (20, 30))}, "overlap"),
        ({"shards": ((5, 5),) * 3}, "moves nothing"),
        ({"op": Op.EXCHANGE}, "same interval"),
    ],
)
def test_malformed_steps_are_named(fields, complaint):
    schedule = make(Family.HIERARCHICAL_PIPELINED, SIX, 60)
    with pytest.raises(PlanError, match=complaint):
        verify(changed(schedule, 3, **fields))


@pytest.mark.parametrize("fields", [{"world_size": 0}, {"numel": -1}, {"itemsize": 0}])
def test_sizes_that_make_no_sense_are_refused(fields):
    with pytest.raises(PlanError, match="at least one rank and one byte"):
        verify(msgspec.structs.replace(make(Family.DIRECT, SIX, 60), **fields))


@pytest.mark.parametrize("family", [Family.DOUBLE_BINARY_TREE, Family.HIERARCHICAL_PIPELINED])
def test_sixty_four_ranks_and_sixteen_chunks(family):
    schedule = make(family, in_order([8] * 8), 1 << 20, 16)
    assert len(schedule.steps) == (4032 if family is Family.DOUBLE_BINARY_TREE else 512)
    verify(schedule)


def test_two_thousand_ranks():
    verify(make(Family.HIERARCHICAL_PIPELINED, in_order([8] * 256), 1 << 22, 16))
    verify(make(Family.DIRECT, in_order([8] * 256), 1 << 22, 16))


# --- JSON ---


@given(any_schedule())
def test_json_round_trip(schedule):
    text = schedule.to_json()
    again = Schedule.from_json(text)
    assert again == schedule
    assert again.to_json() == text
    assert again.hash == schedule.hash


def test_equal_schedules_have_equal_hashes():
    one, two = (make(Family.DIRECT, SIX, 60, 3) for _ in range(2))
    assert one.hash == two.hash
    assert len(one.hash) == 16
    assert one.hash != make(Family.DIRECT, SIX, 60, 2).hash
    assert msgspec.json.decode(one.to_json())["schema"] == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a schedule"),
        (b"\xff", "not a schedule"),
        ('{"plan_hash": "a"}', "world_size"),
        ('{"plan_hash":"","world_size":1,"numel":0,"itemsize":4,"steps":[],"more":1}', "more"),
        ('{"plan_hash":"","world_size":1,"numel":0,"itemsize":4,"steps":[{"op":"x"}]}', "op"),
        (
            '{"plan_hash":"","world_size":1,"numel":0,"itemsize":4,"steps":[],"schema":9}',
            "schema 9 is not known; this version reads 1",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(text, complaint):
    with pytest.raises(PlanError, match=complaint):
        Schedule.from_json(text)
