"""Error feedback conserves, skips a bad step without a trace, and survives other buckets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated import run_job
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.parts import part_of
from topo_ar.compression.powersgd import PowerSGD
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.compression.registry import make
from topo_ar.compression.state import ResidualStore, Run
from topo_ar.errors import ConfigError
from topo_ar.planning.codecs import parse_codec

LOSSY = ["bf16", "int8", "int4", "sign", "topk:0.02", "randomk:0.1"]
SHAPES = {"a": (40, 50), "b": (50,), "c": (3, 7), "d": (33, 64)}


def bucket(names, bucket=0):
    """The pieces of a whole bucket."""
    pieces, offset = [], 0
    for name in names:
        numel = math.prod(SHAPES[name])
        pieces.append(Piece(name, SHAPES[name], 0, numel, offset))
        offset += numel
    return Layout(bucket, tuple(pieces))


def shard(whole, k, members):
    """The part of a bucket that local rank k of `members` reduces, and where it begins."""
    begin, end = whole.numel * k // members, whole.numel * (k + 1) // members
    return part_of(whole, begin, end), slice(begin, end)


def gradients(node, step, numel, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * step + node)
    return (torch.randn(numel, generator=generator) + 0.3 * node) * scale


def total_residual(feedback):
    return sum(run.values.double().sum().item() for run in feedback.store.runs())


# --- conservation ---


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=8)
@given(nodes=st.integers(1, 5), local=st.integers(1, 3), steps=st.integers(1, 5))
def test_what_is_not_sent_is_kept(name, nodes, local, steps):
    whole = bucket("abcd")

    def work(v, k, rail, node):
        layout, part = shard(whole, k, local)
        feedback = ErrorFeedback(make(parse_codec(name)))
        sent = torch.zeros(layout.numel, dtype=torch.float64)
        given_ = torch.zeros(layout.numel, dtype=torch.float64)
        for step in range(steps):
            gradient = gradients(v, step, whole.numel)[part]
            result = feedback.reduce(gradient, layout, rail, node, step)
            sent += result.total
            given_ += gradient
        assert feedback.settle()
        return part, sent, given_, feedback.store.get(layout).double()

    for k in range(local):
        results = [r for r in run_job(nodes, local, work) if r[0] == shard(whole, k, local)[1]]
        sent = results[0][1]
        given_ = torch.stack([r[2] for r in results]).sum(0)
        kept = torch.stack([r[3] for r in results]).sum(0)
        torch.testing.assert_close(sent + kept, given_, rtol=0, atol=2e-5 * nodes * steps)


@pytest.mark.parametrize("name", ["int4", "sign", "topk:0.02"])
def test_with_error_feedback_differs_from_without(name):
    layout = bucket("ad")

    def work(v, k, rail, node):
        codec = make(parse_codec(name))
        feedback = ErrorFeedback(make(parse_codec(name)))
        differs = []
        for step in range(3):
            gradient = gradients(v, step, layout.numel)
            plain = codec.reduce(gradient, layout, rail, node, step).total
            differs.append(
                not torch.equal(plain, feedback.reduce(gradient, layout, rail, node, step).total)
            )
        return differs

    assert run_job(2, 1, work) == [[False, True, True]] * 2


def test_exact_parts_have_no_residual():
    layout = bucket("abc")

    def work(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec("int4")))
        feedback.reduce(gradients(v, 0, layout.numel), layout, rail, node, 0)
        feedback.settle()
        return feedback.store.get(layout)

    for residual in run_job(3, 1, work):
        assert (residual[:2000] != 0).any()
        assert (residual[2000:] == 0).all()


def test_own_is_not_the_residual_where_nothing_is_lost():
    layout = bucket("bc")

    def work(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec("int8")))
        gradient = gradients(v, 0, layout.numel)
        return torch.equal(feedback.reduce(gradient, layout, rail, node, 0).own, gradient)

    assert all(run_job(2, 1, work))


# --- steps that are not finite ---


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", [*LOSSY, "none"])
def test_a_bad_step_leaves_no_trace(name, bad):
    """One element of one rank in the second of two buckets; a job of 2 x 2."""
    wholes = [bucket("ab", 0), bucket("cd", 1)]

    def train(v, k, rail, node, spoiled):
        feedback = ErrorFeedback(make(parse_codec(name)))
        totals = []
        # Random-k depends on the number of the step, so the clean job leaves the number out too.
        for step in (0, 1, 2, 3) if spoiled else (0, 1, 3):
            for whole in wholes:
                layout, part = shard(whole, k, 2)
                gradient = gradients(v, step, whole.numel)[part].clone()
                if step == 2 and whole.bucket == 1 and (v, k) == (1, 0):
                    gradient[3] = bad
                total = feedback.reduce(gradient, layout, rail, node, step).total
                if step != 2:
                    totals.append(total)
                elif whole.bucket == 1:
                    assert total.isnan().all()
                else:
                    assert total.isfinite().all()
        feedback.settle()
        return totals, [run.values for run in feedback.store.runs()]

    def work(v, k, rail, node):
        return train(v, k, rail, node, True), train(v, k, rail, node, False)

    for spoiled, clean in run_job(2, 2, work):
        for ours, theirs in zip(spoiled, clean, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", [7, 2010], ids=["matrix", "vector"])
@pytest.mark.parametrize("alternating", [False, True])
def test_powersgd_finds_what_is_not_finite_by_itself(bad, where, alternating):
    """Also in a column that was always zero, of which its factors know nothing."""
    layout = bucket("abd")

    def train(v, rail, node, steps):
        feedback = ErrorFeedback(PowerSGD(2, alternating=alternating))
        found = []
        for step, number in enumerate(steps):
            gradient = gradients(v, abs(number), layout.numel)
            gradient[:2000].view(40, 50)[:, 7] = 0
            if number < 0 and v == 1:
                gradient[where] = bad
            found.append(feedback.reduce(gradient, layout, rail, node, step).total)
        feedback.settle()
        residual = feedback.store.get(layout)
        return found, residual, feedback.compressor.state_dict()

    def work(v, k, rail, node):
        # The alternating form counts steps: what is skipped are two.
        spoiled, kept, state = train(v, rail, node, [0, 1, -2, -3, 4, 5])
        clean, right, expected = train(v, rail, node, [0, 1, 4, 5])
        assert spoiled[2].isnan().all()
        assert spoiled[3].isnan().all()
        assert all(map(torch.equal, [*spoiled[:2], *spoiled[4:]], clean))
        assert all(torch.equal(state[key], expected[key]) for key in expected)
        return torch.equal(kept, right)

    assert all(run_job(2, 1, work))


def test_overflow_of_the_codec_is_a_bad_step():
    layout = bucket("a")

    def work(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec("fp16")))
        total = feedback.reduce(torch.full((2000,), 6e4), layout, rail, node, 0).total
        return bool(total.isnan().all()), feedback.settle(), total_residual(feedback)

    assert run_job(2, 1, work) == [(True, False, 0.0)] * 2


# --- scales, rates, decay, dtypes ---


def test_powers_of_two_of_the_loss_scale_change_no_bit():
    layout = bucket("ad")

    def train(v, k, rail, node, scales):
        feedback = ErrorFeedback(make(parse_codec("int4")))
        return [
            feedback.reduce(
                gradients(v, step, layout.numel) * scale, layout, rail, node, step, scale=scale
            ).total
            / scale
            for step, scale in enumerate(scales)
        ]

    def work(v, k, rail, node):
        moving = train(v, k, rail, node, [1024.0, 512.0, 2048.0, 2048.0])
        return all(map(torch.equal, moving, train(v, k, rail, node, [1.0] * 4)))

    assert all(run_job(2, 1, work))


def test_rate_and_decay():
    layout = bucket("a")

    def kept(v, rail, node, decay, rates):
        feedback = ErrorFeedback(make(parse_codec("topk:0.02")), decay)
        zero = torch.zeros(layout.numel)
        zero[0] = 1e-30  # alive, but nothing
        first = gradients(v, 0, layout.numel)
        feedback.reduce(first, layout, rail, node, 0, rate=rates[0])
        feedback.settle()
        before = feedback.store.get(layout).clone()
        total = feedback.reduce(zero, layout, rail, node, 1, rate=rates[1]).own
        feedback.settle()
        return before, total + feedback.store.get(layout)

    def work(v, k, rail, node):
        before, after = kept(v, rail, node, 1.0, (0.1, 0.05))
        torch.testing.assert_close(after, before * 2)
        before, after = kept(v, rail, node, 0.5, (None, None))
        torch.testing.assert_close(after, before * 0.5)
        before, after = kept(v, rail, node, 1.0, (0.1, 1e-9))
        torch.testing.assert_close(after, before * 10)
        return True

    assert all(run_job(2, 1, work))
    with pytest.raises(ConfigError, match=r"decay of residuals is 1.5"):
        ErrorFeedback(make(parse_codec("int8")), 1.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_handled_in_fp32(dtype):
    layout = bucket("ad")

    def work(v, k, rail, node):
        results = []
        for convert in (lambda g: g.to(dtype), lambda g: g.to(dtype).float()):
            feedback = ErrorFeedback(make(parse_codec("int8")))
            for step in range(2):
                gradient = convert(gradients(v, step, layout.numel))
                result = feedback.reduce(gradient, layout, rail, node, step)
            assert result.total.dtype == torch.float32
            results.append(result.total)
        return torch.equal(*results)

    assert all(run_job(2, 1, work))


# --- parameters without a gradient ---


@pytest.mark.parametrize("name", ["int4", "sign", "topk:0.02", "randomk:0.1"])
def test_an_unused_parameter_sends_nothing_and_keeps_its_residual(name):
    layout = bucket("ad")
    unused = slice(0, 2000)

    def work(v, k, rail, node):
        feedback = ErrorFeedback(make(parse_codec(name)))
        feedback.reduce(gradients(v, 0, layout.numel), layout, rail, node, 0)
        feedback.settle()
        before = feedback.store.get(layout)[unused].clone()
        gradient = gradients(v, 1, layout.numel)
        gradient[unused] = 0
        total = feedback.reduce(gradient, layout, rail, node, 1).total
        feedback.settle()
        assert (total[unused] == 0).all()
        return torch.equal(feedback.store.get(layout)[unused], before) and bool(before.any())

    assert all(run_job(2, 1, work))


# --- other buckets ---


def filled(layouts, seed=0):
    store = ResidualStore()
    for i, layout in enumerate(layouts):
        generator = torch.Generator().manual_seed(seed + i)
        store.put(layout, torch.randn(layout.numel, generator=generator))
    return store


def by_element(stores):
    """What is kept of each element, over the ranks of a node; each by one rank at most."""
    found = {name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    keepers = {name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    for store in stores:
        for run in store.runs():
            found[run.name][run.begin : run.end] += run.values
            keepers[run.name][run.begin : run.end] += 1
    assert all((count <= 1).all() for count in keepers.values())
    return found


def test_rebuilt_buckets_of_one_rank_keep_every_bit():
    store = filled([bucket("ab", 0), bucket("cd", 1)])
    before = by_element([store])
    rebuilt = [bucket("d", 0), bucket("cba", 1)]
    assert store.missing(rebuilt[0]) == store.missing(rebuilt[1]) == []
    parts = [store.get(layout) for layout in rebuilt]
    assert torch.equal(parts[0], before["d"])
    assert torch.equal(parts[1], torch.cat([before["c"], before["b"], before["a"]]))
    assert all(torch.equal(value, before[name]) for name, value in by_element([store]).items())


def test_missing_names_the_gaps():
    store = ResidualStore()
    store.add(Run("a", (40, 50), 100, 200, torch.ones(100)))
    store.add(Run("a", (40, 50), 300, 2000, torch.ones(1700)))
    gaps = store.missing(Layout(0, (Piece("a", (40, 50), 50, 400, 7),)))
    assert [(g.begin, g.end, g.offset) for g in gaps] == [(50, 100, 7), (200, 300, 157)]


@settings(max_examples=25)
@given(
    local=st.integers(1, 4),
    old=st.permutations("abcd"),
    new=st.permutations("abcd"),
    old_cut=st.integers(0, 4),
    new_cut=st.integers(0, 4),
)
def test_resharding_moves_everything_and_doubles_nothing(local, old, new, old_cut, new_cut):
    def buckets(order, at):
        return [bucket(part, i) for i, part in enumerate((order[:at], order[at:])) if part]

    def work(v, k, rail, node):
        store = filled([shard(whole, k, local)[0] for whole in buckets(old, old_cut)], seed=10 * k)
        before = {r.name + str(r.begin): r for r in store.runs()}
        before = [Run(r.name, r.shape, r.begin, r.end, r.values.clone()) for r in before.values()]
        for whole in buckets(new, new_cut):
            layout, _ = shard(whole, k, local)
            store.reshard(layout, node)
            store.get(layout)
        for whole in buckets(new, new_cut):
            assert store.missing(shard(whole, k, local)[0]) == []
        return before, store

    results = run_job(1, local, work)
    kept = by_element([store for _, store in results])
    for before, _ in results:
        for run in before:
            assert torch.equal(kept[run.name][run.begin : run.end], run.values)
    held = sum(r.end - r.begin for _, store in results for r in store.runs())
    assert held == sum(math.prod(shape) for shape in SHAPES.values())
