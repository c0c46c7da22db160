"""What turns say of planned and plain steps: the pure part of `auto`."""

import random
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.integrations.path_trial import LOOKS, ORDER, TURN_STEPS, Path, Verdict, judge
from topo_ar.integrations.turns import Turns


def test_both_paths_have_equally_many_turns_at_every_look() -> None:
    assert LOOKS[-1] == len(ORDER)
    for look in LOOKS:
        assert ORDER[:look].count(Path.PLANNED) == ORDER[:look].count(Path.PLAIN)
        # The i-th step of both is in the same pair of turns.
        assert all({ORDER[i], ORDER[i + 1]} == set(Path) for i in range(0, look, 2))


def test_a_steady_drift_of_the_machine_favours_neither() -> None:
    """A B B A: the mean place of both is the same after each whole pattern."""
    places: dict[Path, list[int]] = {path: [] for path in Path}
    for turn, path in enumerate(ORDER[:8]):
        places[path] += [turn * TURN_STEPS + step for step in range(1, TURN_STEPS)]
    assert fmean(places[Path.PLANNED]) == fmean(places[Path.PLAIN])


def test_turns_count_all_steps_but_the_first_of_each() -> None:
    turns, now, said = Turns((0, 1, 1, 0), 4), 0.0, []
    for step in range(17):
        said.append(turns.next(now))
        assert turns.turn_begins == (step % 4 == 0)
        assert turns.num_turns == step // 4
        now += 100.0 if step % 4 == 0 else 1.0 + step
    assert said == [0] * 4 + [1] * 8 + [0] * 4 + [None]
    assert turns.seconds == [
        [2.0, 3.0, 4.0, 14.0, 15.0, 16.0],
        [6.0, 7.0, 8.0, 10.0, 11.0, 12.0],
    ]


SECONDS = st.floats(1e-4, 1e3)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    ranks, steps = draw(st.integers(1, 4)), draw(st.integers(2, 15))
    rows = st.lists(
        st.lists(SECONDS, min_size=steps, max_size=steps), min_size=ranks, max_size=ranks
    )
    return draw(rows), draw(rows)


@given(_steps(), st.booleans())
def test_the_slower_is_never_taken_against_the_interval(steps, last) -> None:
    planned, plain = steps
    verdict = judge(planned, plain, last=last)
    if verdict.speedup.low > 1:
        assert verdict.path is Path.PLANNED
    elif verdict.speedup.high < 1:
        assert verdict.path is Path.PLAIN
    elif not last:
        assert verdict.path is None
    else:
        assert verdict.path is (Path.PLANNED if verdict.speedup.ratio >= 1 else Path.PLAIN)


@given(_steps(), st.booleans())
def test_what_one_rank_says_is_what_the_others_hear(steps, last) -> None:
    verdict = judge(*steps, last=last)
    assert Verdict.from_row(verdict.to_row()) == verdict
    assert judge(*steps, last=last) == verdict


@given(_steps())
def test_exchanged_seconds_exchange_the_winner(steps) -> None:
    planned, plain = steps
    one, other = judge(planned, plain, last=True), judge(plain, planned, last=True)
    assert one.speedup.ratio == pytest.approx(1 / other.speedup.ratio)
    if one.speedup.ratio != 1:
        assert {one.path, other.path} == set(Path)
    assert one.seconds == pytest.approx(other.seconds) or one.speedup.ratio == 1


def test_a_step_takes_what_it_takes_on_the_average_of_the_ranks() -> None:
    """A rank that begins late in one step and early in the next does not make steps longer."""
    steady = [[1.0] * 6, [1.0] * 6]
    jitter = [[1.4, 0.6] * 3, [0.6, 1.4] * 3]
    verdict = judge(jitter, steady, last=True)
    assert verdict.speedup.ratio == pytest.approx(1.0)
    assert verdict.seconds == pytest.approx(1.0)


def test_figures_by_hand() -> None:
    planned, plain = [[1.0, 1.0, 1.0]], [[2.0, 2.0, 2.0]]
    verdict = judge(planned, plain, last=False)
    assert (verdict.path, verdict.seconds) == (Path.PLANNED, 1.0)
    assert (verdict.speedup.ratio, verdict.speedup.low, verdict.speedup.high) == (2.0, 2.0, 2.0)
    verdict = judge(plain, planned, last=False)
    assert (verdict.path, verdict.seconds, verdict.speedup.ratio) == (Path.PLAIN, 1.0, 0.5)


@pytest.mark.parametrize("factor", [0.7, 0.95, 1.05, 1.5])
def test_noise_and_interruptions_do_not_hide_a_difference(factor) -> None:
    """Of 200 trials with 2 % of noise and a step in ten interrupted, hardly one goes wrong."""
    wrong = 0
    for seed in range(200):
        wrong += _winner(random.Random(seed), factor) is not (
            Path.PLANNED if factor > 1 else Path.PLAIN
        )
    assert wrong <= 2


def _winner(rng: random.Random, factor: float) -> Path:
    """Return who wins where planned steps take 1 s and plain ones `factor` s."""
    turns, now = Turns(ORDER, TURN_STEPS), 0.0
    while True:
        path = turns.next(now)
        if turns.turn_begins and turns.num_turns in LOOKS:
            planned, plain = turns.seconds
            verdict = judge([planned], [plain], last=turns.num_turns == LOOKS[-1])
            if verdict.path is not None:
                assert verdict.seconds == median(turns.seconds[verdict.path])
                return verdict.path
        seconds = (1.0 if path is None or path == Path.PLANNED else factor) * rng.gauss(1, 0.02)
        now += seconds + (rng.random() < 0.1) * rng.random()
