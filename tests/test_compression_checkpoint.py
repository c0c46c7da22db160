"""Residuals in a checkpoint: tensors only, the same bits in the same job, conserved in others."""

import io

import pytest
import torch

from tests.simulated import run_job
from tests.test_compression_error_feedback import SHAPES, bucket, gradients, shard
from topo_ar.compression.checkpoint import load_state_dict, state_dict
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.registry import make
from topo_ar.errors import ConfigError
from topo_ar.planning.codecs import parse_codec

WHOLE = [bucket("abcd")]
SMALLER_CAP = [bucket("dc", 0), bucket("ba", 1)]


def run_steps(feedback, place, groups, local, wholes, steps):
    (v, k), (rail, node) = place, groups
    totals = {}
    for step in steps:
        for whole in wholes:
            layout, part = shard(whole, k, local)
            at = {p.name: p for p in bucket("abcd").pieces}
            everything = gradients(v, step, bucket("abcd").numel)
            mine = torch.cat(
                [everything[at[p.name].offset :][: p.end - p.begin] for p in whole.pieces]
            )
            totals[step, whole.bucket] = feedback.reduce(
                mine[part], layout, rail, node, step, scale=64.0
            ).total
    return totals


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(name, nodes, local, exact, wholes=WHOLE):
    def work(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec(name)))
        run_steps(feedback, (v, k), (rail, node), local, wholes, range(3))
        return state_dict(feedback, rail, node, exact=exact), list(feedback.store.runs())

    results = run_job(nodes, local, work)
    first = results[0][0]
    for state, _ in results[1:]:
        assert state.keys() == first.keys()
        assert all(torch.equal(state[key], first[key]) for key in first)
    summed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _, runs in results:
        for run in runs:
            summed[run.name].view(-1)[run.begin : run.end] += run.values
    return first, summed


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (2, 2), (3, 2)])
def test_a_state_holds_the_sum_over_the_nodes(nodes, local, exact):
    state, summed = saved("topk:0.02", nodes, local, exact)
    for name, value in summed.items():
        kept = state[f"residual/{name}"]
        assert kept.shape == ((nodes, *SHAPES[name]) if exact else SHAPES[name])
        torch.testing.assert_close(kept.sum(0) if exact else kept, value)
    assert state["step"] == 3
    assert state["loss_scale"] == 64
    assert all(isinstance(value, torch.Tensor) for value in state.values())


@pytest.mark.parametrize("name", ["int4", "topk:0.02", "sign", "randomk:0.1"])
def test_exact_resumes_bit_for_bit(name):
    state = through_a_file(saved(name, 2, 2, True)[0])

    def resumed(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec(name)))
        load_state_dict(feedback, state, rail, node)
        for whole in WHOLE:
            feedback.reshard(shard(whole, k, 2)[0], node)
        assert feedback.next_step == 3
        return run_steps(feedback, (v, k), (rail, node), 2, WHOLE, range(3, 6))

    def uninterrupted(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec(name)))
        return run_steps(feedback, (v, k), (rail, node), 2, WHOLE, range(6))

    for ours, theirs in zip(run_job(2, 2, resumed), run_job(2, 2, uninterrupted), strict=True):
        assert len(ours) == 3
        assert all(torch.equal(total, theirs[key]) for key, total in ours.items())


def test_a_sum_that_is_saved_and_loaded_at_once_goes_on_as_the_resumed_job():
    def go_on(v, k, rail, node, restart):
        feedback = ErrorFeedback(make(parse_codec("topk:0.02")))
        run_steps(feedback, (v, k), (rail, node), 2, WHOLE, range(3))
        state = state_dict(feedback, rail, node)
        if restart:
            feedback = ErrorFeedback(make(parse_codec("topk:0.02")))
            state = through_a_file(state)
        load_state_dict(feedback, state, rail, node)
        feedback.reshard(shard(WHOLE[0], k, 2)[0], node)
        return run_steps(feedback, (v, k), (rail, node), 2, WHOLE, range(3, 5))

    def work(v, k, rail, node):
        ours = go_on(v, k, rail, node, True)
        theirs = go_on(v, k, rail, node, False)
        return all(torch.equal(total, theirs[key]) for key, total in ours.items())

    assert all(run_job(3, 2, work))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (2, 2), (4, 1), (3, 2), (1, 3)])
def test_another_job_takes_over_what_is_outstanding(nodes, local, exact):
    """In mean units: the sum over the nodes grows with the number of ranks."""
    state, summed = saved("topk:0.02", 2, 2, exact)
    factor = nodes * local / 4

    def work(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec("int8")))
        load_state_dict(feedback, state, rail, node)
        for whole in SMALLER_CAP:
            layout, _ = shard(whole, k, local)
            feedback.reshard(layout, node)
            assert feedback.store.missing(layout) == []
            feedback.store.get(layout)
        return list(feedback.store.runs())

    found = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for runs in run_job(nodes, local, work):
        for run in runs:
            found[run.name].view(-1)[run.begin : run.end] += run.values
    for name, value in summed.items():
        torch.testing.assert_close(found[name], value * factor)


def test_what_is_not_a_state_is_refused():
    def work(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec("int8")))
        with pytest.raises(ConfigError, match="has schema None, this version reads up to 1"):
            load_state_dict(feedback, {}, rail, node)
        with pytest.raises(ConfigError, match="has schema 9"):
            load_state_dict(feedback, {"schema": torch.tensor(9)}, rail, node)
        return True

    assert all(run_job(1, 1, work))
