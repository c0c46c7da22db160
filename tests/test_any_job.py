"""Random jobs: right on every rank, and the same bits, whatever is reduced where and how late."""

import os
import sys
import time

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.any_jobs import NUM_RANKS, Job, jobs, run_waves

JOBS_AT_ONCE = 3
JOBS_A_RUN = 6


def _waves(most: int):
    wave = st.lists(jobs(), min_size=1, max_size=JOBS_AT_ONCE)
    return st.lists(wave, min_size=1, max_size=most)


def _check(ranks, waves: list[list[Job]]) -> None:
    seen = ranks.run(run_waves, NUM_RANKS, waves, deadline_s=120.0)
    for at, job in enumerate(job for wave in waves for job in wave):
        results = [seen[rank][at] for rank in job.members]
        assert not [text for text in results[0] if text.startswith("wrong")], job
        assert all(result == results[0] for result in results), job


@settings(
    max_examples=12,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # to shrink takes longer than a test may
    report_multiple_bugs=False,
)
@given(_waves(2))
def test_a_few_random_jobs(ranks, waves) -> None:
    _check(ranks, waves)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_random_jobs(ranks, capsys) -> None:
    """``TOPO_AR_SEED=N`` repeats the run of seed N; ``TOPO_AR_JOBS=M`` ends it after M jobs.

    The runs of several seeds add up: each prints how many jobs it was.
    """
    drawn = int(os.environ.get("TOPO_AR_SEED", time.time_ns() % 2**32))
    wanted = int(os.environ.get("TOPO_AR_JOBS", "2000"))
    done = [0, 0]

    @seed(drawn)
    @settings(
        max_examples=10_000,
        derandomize=False,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=True,
    )
    @given(_waves(JOBS_A_RUN))
    def run(waves: list[list[Job]]) -> None:
        if done[0] < wanted:
            _check(ranks, waves)
            done[0] += sum(map(len, waves))
            done[1] += sum(len(job.calls) for wave in waves for job in wave)

    begin = time.monotonic()
    try:
        run()
    finally:
        with capsys.disabled():
            seconds = time.monotonic() - begin
            sys.stdout.write(
                f"\nseed {drawn}: {done[0]} jobs, {done[1]} all-reduces in {seconds:.0f} s\n"
            )
