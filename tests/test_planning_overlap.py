"""When buckets are done, and what stays exposed."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_ar.planning.overlap import Chunk, Job, exposed_seconds, finish, one_queue
from topo_ar.planning.pipelines import end_of_chunks

READY = [10, 20, 30, 40]


# --- the oracle: 4 buckets of 25 MB ready at 10, 20, 30, 40 ms, 2 nodes, 1.25 GB/s ---


def test_one_queue_exact():
    assert one_queue(READY, [20] * 4) == [30, 50, 70, 90]


def test_one_queue_with_a_codec_of_a_quarter_and_2_ms():
    seconds = Fraction(1, 4) * 20 + 2
    ends = one_queue(READY, [seconds] * 4)
    assert ends[-1] == 47
    assert ends[-1] - 40 == 7


def test_two_queues():
    jobs = [Job(ready, (Chunk(4, 0, 12, 4),)) for ready in READY]
    # The second all-gather, from 38 on, lets the last reduce-scatter through at 40.
    assert finish(jobs) == [30, 46, 54, 66]
    assert exposed_seconds(jobs, 40) == 26


def test_the_stages_of_each_bucket_alone():
    jobs = [Job(ready, (Chunk(4, 0, 12, 4),), alone=True) for ready in READY]
    assert finish(jobs) == [30, 50, 70, 90]
    assert exposed_seconds(jobs, 40) == 50


# --- details ---


def test_a_codec_is_a_queue_of_its_own():
    jobs = [Job(0, (Chunk(4, 6, 5, 4),) * 2)]
    # Scatters 0-4, 4-8; codec 4-10, 10-16; wire 10-15, 16-21; gathers 15-19, 21-25.
    assert finish(jobs) == [25]


def test_reduce_scatters_hold_an_all_gather_in_service():
    jobs = [Job(0, (Chunk(2, 0, 2, 4),)), Job(5, (Chunk(2, 0, 2, 4),))]
    # Gather 4-5 and 7-10 around the scatter 5-7; the second arrives at 9.
    assert finish(jobs) == [10, 14]


def test_a_plain_all_reduce_waits_for_all_and_holds_all():
    staged = (Chunk(1, 0, 4, 1),)
    jobs = [Job(0, staged), Job(1, (Chunk(0, 0, 10, 0),), alone=True), Job(2, staged)]
    assert finish(jobs) == [6, 16, 22]


def test_what_is_hidden_is_not_negative():
    assert exposed_seconds([Job(1, (Chunk(1, 0, 1, 1),))], 100) == 0
    assert exposed_seconds([], 3) == 0
    assert finish([Job(3, ())]) == [3]


# --- laws ---

_NUMBER = st.integers(0, 12).map(Fraction)
_FEW = st.integers(0, 3).map(Fraction)
_CHUNK = st.builds(Chunk, _NUMBER, _FEW, _NUMBER, _NUMBER, _FEW)
_JOBS = st.lists(
    st.builds(
        Job, st.integers(0, 60), st.lists(_CHUNK, min_size=1, max_size=4).map(tuple), st.booleans()
    ),
    min_size=1,
    max_size=6,
).map(lambda jobs: sorted(jobs, key=lambda job: job.ready))


@given(st.lists(st.tuples(_NUMBER, _NUMBER, _NUMBER, _FEW), min_size=1, max_size=8))
@settings(max_examples=60)
def test_one_buffer_is_the_cost_models_pipeline(stages):
    inward, middle, outward, trailing = zip(*stages, strict=True)
    job = Job(0, tuple(Chunk(a, 0, t, b, late) for a, t, b, late in stages))
    assert finish([job]) == [end_of_chunks([inward], middle, [outward], trailing)]


@given(_JOBS)
@settings(max_examples=30)
def test_scaling_scales(jobs):
    for job in jobs:
        assert job.scaled(3, 0).seconds_alone == 3 * job.seconds_alone
        assert job.scaled(1, 5).ready == job.ready + 5


@given(_JOBS)
@settings(max_examples=80)
def test_ends_are_in_order_and_above_every_single_limit(jobs):
    ends = finish(jobs)
    assert ends == sorted(ends)
    for position, job in enumerate(jobs):
        assert ends[position] >= job.ready + max(sum(chunk) for chunk in job.chunks)
        later = jobs[position:]
        for resource in ("wire", "codec"):
            busy = sum(getattr(c, resource) for j in later for c in j.chunks)
            assert ends[-1] >= job.ready + busy
        assert ends[-1] >= job.ready + sum(c.scatter + c.gather for j in later for c in j.chunks)


@given(_JOBS, st.integers(0, 60))
@settings(max_examples=60)
def test_a_faster_wire_never_exposes_more(jobs, backward):
    faster = [
        Job(j.ready, tuple(c._replace(wire=c.wire / 2) for c in j.chunks), j.alone) for j in jobs
    ]
    assert 0 <= exposed_seconds(faster, backward) <= exposed_seconds(jobs, backward)


@given(_JOBS, st.data())
@settings(max_examples=80)
def test_the_end_never_grows_when_anything_gets_shorter(jobs, data):
    which = data.draw(st.integers(0, len(jobs) - 1))
    job = jobs[which]
    field = data.draw(st.sampled_from(Chunk._fields))
    chunks = (job.chunks[0]._replace(**{field: getattr(job.chunks[0], field) / 2}), *job.chunks[1:])
    shorter = [*jobs[:which], Job(job.ready, chunks, job.alone), *jobs[which + 1 :]]
    assert finish(shorter)[-1] <= finish(jobs)[-1]


@given(_JOBS)
@settings(max_examples=60)
def test_sharing_is_never_slower_than_taking_turns(jobs):
    alone = [Job(job.ready, job.chunks, alone=True) for job in jobs]
    assert finish(jobs)[-1] <= finish(alone)[-1]


@pytest.mark.parametrize("num_chunks", [1, 4, 32])
def test_below_the_floor_a_ratio_brings_no_more_than_one_chunk(num_chunks):
    """The floor is k1 / k2, here 1/3: with half of it at most one chunk's wire time is saved."""
    local, remote = Fraction(1, num_chunks), Fraction(6, num_chunks)
    floor = 2 * local / remote

    def end(ratio):
        return finish([Job(0, (Chunk(local, 0, ratio * remote, local),) * num_chunks)])[-1]

    assert end(floor) - end(floor / 2) <= floor * remote
    assert end(floor / 2) >= 2
    assert end(1) >= 6
