import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated import run_job
from topo_ar.compression.factors import draw, multiply, multiply_batches
from topo_ar.compression.powersgd import PowerSGD
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.errors import ConfigError, PlanError
from topo_ar.planning.codecs import Codec, factors_pay

MIXED = {
    "conv": (24, 3, 3, 3),
    "bias": (24,),
    "fc": (40, 30),
    "tiny": (4, 4),
    "head": (30, 64),
    "scale": (),
}


def cut(shapes, num_local, rank, uneven=False):
    """Deal a bucket out: rows of matrices in blocks, uneven or not, every third whole; the rest."""
    pieces = [[] for _ in range(num_local)]
    offsets = [0] * num_local
    for number, (name, shape) in enumerate(shapes.items()):
        rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        if not factors_pay(shape, rank):
            rows, columns = rows * columns, 1
        if number % 3 == 2:
            marks = [0] * (number % num_local + 1) + [rows] * (num_local - number % num_local)
        elif uneven:
            marks = [rows * i * i // num_local**2 for i in range(num_local + 1)]
        else:
            marks = [rows * i // num_local for i in range(num_local + 1)]
        for local, (low, high) in enumerate(pairwise(marks)):
            if low < high:
                run = Piece(name, shape, low * columns, high * columns, offsets[local])
                pieces[local].append(run)
                offsets[local] += run.end - run.begin
    return [Layout(0, tuple(mine)) for mine in pieces]


def part(gradients, layout):
    runs = [gradients[p.name].reshape(-1)[p.begin : p.end] for p in layout.pieces]
    return torch.cat([torch.zeros(0, dtype=runs[0].dtype if runs else torch.float32), *runs])


def put(gradients, layout, shard):
    for p in layout.pieces:
        gradients[p.name].view(-1)[p.begin : p.end] = shard[p.offset : p.offset + p.end - p.begin]


def random_gradients(shapes, num_nodes, step, dtype, signal=0):
    """Noise of each node and step; with a common matrix of rank `signal` in all of them."""
    noise = torch.Generator().manual_seed(1000 + step)
    common = torch.Generator().manual_seed(5)
    wide = {"dtype": torch.float64}
    gradients = [
        {name: torch.randn(s, generator=noise, **wide) for name, s in shapes.items()}
        for _ in range(num_nodes)
    ]
    for name, s in shapes.items():
        if signal and len(s) > 1:
            left = torch.randn(s[0], signal, generator=common, **wide)
            right = torch.randn(signal, math.prod(s[1:]), generator=common, **wide)
            both = (left * torch.arange(signal, 0, -1)) @ right
            for gradient in gradients:
                gradient[name] = 0.3 * gradient[name] + both.view(s)
    return [{name: g.to(dtype) for name, g in mine.items()} for mine in gradients]


class Flat:
    """PowerSGD over whole nodes in a few plain lines, with local error feedback."""

    def __init__(self, shapes, num_nodes, rank, dtype):
        self.rank, self.q = rank, {}
        self.errors = [
            {k: torch.zeros(s, dtype=dtype) for k, s in shapes.items()} for _ in range(num_nodes)
        ]

    def step(self, gradients):
        out = {}
        for name, first in gradients[0].items():
            sent = [g[name] + e[name] for g, e in zip(gradients, self.errors, strict=True)]
            if not factors_pay(tuple(first.shape), self.rank):
                out[name] = sum(sent)
                continue
            sent = [m.reshape(len(m), -1) for m in sent]
            q = self.q.get(name)
            if q is None:
                q = draw(0, f"{name}/q", self.rank, sent[0].shape[1]).T.to(first)
            q = torch.linalg.qr(q).Q
            p = torch.linalg.qr(sum(m @ q for m in sent)).Q
            self.q[name] = sum(m.T @ p for m in sent)
            out[name] = (p @ self.q[name].T).view(first.shape)
            for m, error in zip(sent, self.errors, strict=True):
                error[name] = (m - p @ (p.T @ m)).view(first.shape)
        return out


def train(
    shapes,
    num_nodes,
    num_local,
    rank,
    steps,
    dtype=torch.float32,
    uneven=False,
    signal=0,
    **kwargs,
):
    """Run PowerSGD with local error feedback on a job; return by rank (outs, errors, codec)."""
    layouts = cut(shapes, num_local, rank, uneven)

    def work(v, k, rail, node):
        codec, error, outs = PowerSGD(rank, **kwargs), 0, []
        for step in range(steps):
            gradients = random_gradients(shapes, num_nodes, step, dtype, signal)[v]
            shard = part(gradients, layouts[k]) + error
            found = codec.reduce(shard, layouts[k], rail, node, step)
            codec.commit(layouts[k])
            error = shard - found.own
            gathered = [torch.empty(layout.numel, dtype=dtype) for layout in layouts]
            codec.gather(found, layouts[k], node, gathered)
            assert torch.equal(gathered[k], found.total)
            out = {name: torch.empty(s, dtype=dtype) for name, s in shapes.items()}
            for layout, total in zip(layouts, gathered, strict=True):
                put(out, layout, total)
            outs.append(out)
        return outs, error, codec

    return run_job(num_nodes, num_local, work)


def distance(found, right):
    found, right = (torch.cat([x[k].reshape(-1) for k in right]) for x in (found, right))
    return ((found - right).norm() / right.norm()).item()


# --- hierarchical equals flat ---


@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize("num_local", [1, 2, 3, 4])
@pytest.mark.parametrize("uneven", [False, True])
def test_shards_give_what_whole_nodes_give(num_nodes, num_local, uneven):
    flat = Flat(MIXED, num_nodes, 2, torch.float64)
    right = [flat.step(random_gradients(MIXED, num_nodes, t, torch.float64)) for t in range(12)]
    for outs, _, _ in train(MIXED, num_nodes, num_local, 2, 12, torch.float64, uneven):
        for found, expected in zip(outs, right, strict=True):
            assert distance(found, expected) <= 5e-14


@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize("num_local", [1, 2, 3, 4])
def test_shards_give_what_whole_nodes_give_in_single_precision(num_nodes, num_local):
    # A signal of the factors' rank: where nothing separates the directions kept from the others,
    # power iteration makes more of each rounding, in the flat form as much as here.
    flat = Flat(MIXED, num_nodes, 4, torch.float32)
    data = [random_gradients(MIXED, num_nodes, t, torch.float32, signal=4) for t in range(12)]
    right = [flat.step(gradients) for gradients in data]
    for outs, _, _ in train(MIXED, num_nodes, num_local, 4, 12, signal=4):
        for found, expected in zip(outs, right, strict=True):
            assert distance(found, expected) <= 3e-6


@pytest.mark.parametrize("num_local", [1, 3])
def test_one_node_loses_nothing(num_local):
    for outs, error, _ in train(MIXED, 1, num_local, 2, 2):
        assert not error.any()
        for step, out in enumerate(outs):
            right = random_gradients(MIXED, 1, step, torch.float32)[0]
            assert all(torch.equal(out[k], right[k]) for k in MIXED)


@pytest.mark.parametrize("alternating", [False, True])
def test_all_replicas_have_the_same_bits(alternating):
    (first, *others) = train(MIXED, 3, 3, 2, 4, uneven=True, alternating=alternating)
    for outs, _, _ in others:
        for mine, theirs in zip(first[0], outs, strict=True):
            assert all(torch.equal(mine[k], theirs[k]) for k in MIXED)


def test_the_cut_does_not_change_the_alternating_variant():
    runs = [train(MIXED, 2, n, 2, 6, torch.float64, alternating=True) for n in (1, 2, 4)]
    for run in runs[1:]:
        for mine, theirs in zip(runs[0][0][0], run[0][0], strict=True):
            assert distance(mine, theirs) < 5e-14


# --- error feedback, local form ---


@settings(max_examples=15)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_nothing_is_lost(num_nodes, num_local, rank, alternating, shapes):
    shapes = {f"p{i}": tuple(shape) for i, shape in enumerate(shapes)}
    found = train(shapes, num_nodes, num_local, rank, 3, torch.float64, alternating=alternating)
    layouts = cut(shapes, num_local, rank)
    errors = {name: torch.zeros(s, dtype=torch.float64) for name, s in shapes.items()}
    for place, (_, error, _) in enumerate(found):
        whole = {name: torch.zeros(s, dtype=torch.float64) for name, s in shapes.items()}
        put(whole, layouts[place % num_local], error)
        errors = {name: errors[name] + whole[name] for name in shapes}
    for name in shapes:
        told = sum(out[name] for out in found[0][0]) + errors[name]
        given_ = sum(
            g[name] for t in range(3) for g in random_gradients(shapes, num_nodes, t, torch.float64)
        )
        assert torch.allclose(told, given_, rtol=0, atol=1e-12)


def reduce_once(matrices, rank, steps=1, commit=True, **kwargs):
    """Reduce one matrix a node; return by node the results of all steps, and the codec.

    A single matrix gets a second node with zeros: with one node alone nothing is compressed.
    """
    if len(matrices) == 1:
        matrices = [matrices[0], torch.zeros_like(matrices[0])]
    shape = tuple(matrices[0].shape)
    layout = Layout(0, (Piece("m", shape, 0, math.prod(shape), 0),))

    def work(v, k, rail, node):
        codec, found = PowerSGD(rank, **kwargs), []
        for step in range(steps):
            found.append(codec.reduce(matrices[v].reshape(-1), layout, rail, node, step))
            if commit:
                codec.commit(layout)
        return found, codec

    return run_job(len(matrices), 1, work)


def test_own_is_a_projection_and_adds_up_to_the_total():
    matrices = [torch.randn(40, 30, dtype=torch.float64) for _ in range(3)]
    found = [results[0] for results, _ in reduce_once(matrices, 4)]
    total = found[0].total.view(40, 30)
    basis = torch.linalg.svd(total).U[:, :4]
    for m, result in zip(matrices, found, strict=True):
        error = m - result.own.view(40, 30)
        assert (basis.T @ error).abs().max() < 1e-12
        assert torch.equal(result.total, found[0].total)
    assert torch.allclose(sum(r.own for r in found), found[0].total, rtol=0, atol=1e-12)


def test_the_error_stays_bounded_where_nodes_differ_for_ever():
    # In the global form it grows linearly, to 14 517 after 300 such steps.
    torch.manual_seed(0)
    bias = torch.randn(64, 40, dtype=torch.float64)
    layout = Layout(0, (Piece("m", (64, 40), 0, 2560, 0),))

    def work(v, k, rail, node):
        codec, error, norms = PowerSGD(1), 0, []
        for step in range(300):
            shard = (bias if v else -0.9 * bias).reshape(-1) + error
            error = shard - codec.reduce(shard, layout, rail, node, step).own
            codec.commit(layout)
            norms.append(error.norm().item())
        return norms

    for norms in run_job(2, 1, work):
        assert max(norms[200:]) < 1.05 * max(norms[100:200])


# --- approximation ---


def test_not_worse_than_the_bound_and_better_with_each_power_step():
    torch.manual_seed(0)
    m = torch.randn(60, 60, dtype=torch.float64) @ torch.diag(
        torch.logspace(0, -2, 60, dtype=torch.float64)
    )
    tail = torch.linalg.svdvals(m).square()[4:].sum().item()
    losses = [
        (m.reshape(-1) - found.total).square().sum().item()
        for found in reduce_once([m], 4, steps=6)[0][0]
    ]
    assert all(loss >= tail * (1 - 1e-12) for loss in losses)
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(losses))
    assert losses[-1] < 1.02 * tail


def test_one_step_is_as_good_as_random_projection_promises():
    # Halko, Martinsson, Tropp, theorem 10.5: k + p = r, here 2 + 4.
    torch.manual_seed(0)
    m = torch.randn(60, 50, dtype=torch.float64)
    squares = torch.linalg.svdvals(m).square()
    losses = [
        (m.reshape(-1) - reduce_once([m], 6, seed=seed)[0][0][0].total).square().sum().item()
        for seed in range(40)
    ]
    assert sum(losses) / 40 <= (1 + Fraction(2, 3)) * squares[2:].sum().item()
    assert min(losses) >= squares[6:].sum().item()


@pytest.mark.parametrize(("rank", "true_rank"), [(1, 1), (2, 1), (4, 4), (4, 2), (8, 3)])
@pytest.mark.parametrize("alternating", [False, True])
def test_low_rank_is_exact(rank, true_rank, alternating):
    torch.manual_seed(0)
    right = torch.randn(true_rank, 64, dtype=torch.float64)
    matrices = [torch.randn(80, true_rank, dtype=torch.float64) @ right for _ in range(2)]
    for found, _ in reduce_once(matrices, rank, steps=3, alternating=alternating):
        for result in found[1 if alternating else 0 :]:
            error = (result.total.view(80, 64) - sum(matrices)).norm() / sum(matrices).norm()
            assert error < 1e-13


def test_a_rank_that_is_not_worth_it_is_exact():
    m = torch.randn(12, 9)
    for rank in (9, 12, 100):
        (found,), _ = reduce_once([m], rank)[0]
        assert torch.equal(found.total, m.reshape(-1))
        assert torch.equal(found.own, m.reshape(-1))


@pytest.mark.parametrize("alternating", [False, True])
def test_zero_stays_zero_and_is_survived(alternating):
    torch.manual_seed(0)
    low = torch.randn(40, 1) @ torch.randn(1, 30)
    layout = Layout(0, (Piece("m", (40, 30), 0, 1200, 0),))

    def work(v, k, rail, node):
        codec = PowerSGD(2, alternating=alternating)
        for step in range(4):
            zero = codec.reduce(torch.zeros(1200), layout, rail, node, step)
            codec.commit(layout)
            assert not zero.total.any()
            assert not zero.own.any()
        for step in range(4, 7):
            found = codec.reduce(low.reshape(-1), layout, rail, node, step)
            codec.commit(layout)
        return found.total

    for total in run_job(2, 1, work):
        assert torch.allclose(total.view(40, 30), 2 * low, atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12, 1e25])
def test_tiny_and_huge_gradients(size):
    torch.manual_seed(0)
    m = torch.randn(40, 2) @ torch.randn(2, 30)
    for found, _ in reduce_once([m * size, m * size], 2, steps=3):
        assert torch.allclose(found[-1].total.view(40, 30) / size, 2 * m, atol=1e-4)


# --- state ---


def test_uncommitted_steps_leave_no_trace():
    torch.manual_seed(0)
    matrices = [torch.randn(40, 30) for _ in range(2)]
    for alternating in (False, True):
        for found, codec in reduce_once(matrices, 2, 3, commit=False, alternating=alternating):
            assert not codec.state_dict()
            assert torch.equal(found[0].total, found[2].total)
        layout = Layout(0, (Piece("m", (40, 30), 0, 1200, 0),))

        def work(v, k, rail, node, layout=layout, alternating=alternating):
            codec = PowerSGD(2, alternating=alternating)
            for step in range(2):
                codec.reduce(matrices[v].reshape(-1), layout, rail, node, step)
                codec.commit(layout)
            before = codec.state_dict()
            codec.reduce(1e9 * matrices[v].reshape(-1), layout, rail, node, 2)
            return before, codec.state_dict()

        for before, after in run_job(2, 1, work):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)


def test_committed_q_comes_from_the_gradient():
    m = torch.randn(40, 30)
    found, codec = reduce_once([m], 2)[0]
    q = codec.state_dict()["m/q"]
    left = torch.linalg.lstsq(found[0].total.view(40, 30).T, q.T).residuals
    assert q.shape == (2, 30)
    assert not left.numel() or left.abs().max() < 1e-6
    assert not torch.allclose(q, draw(0, "m/q", 2, 30))


@pytest.mark.parametrize("alternating", [False, True])
def test_state_moves_to_another_cut(alternating):
    def run(num_local, state, steps):
        layouts = cut(MIXED, num_local, 2)

        def work(v, k, rail, node):
            codec = PowerSGD(2, alternating=alternating)
            codec.load_state_dict(state)
            totals = []
            for step in steps:
                shard = part(random_gradients(MIXED, 2, step, torch.float64)[v], layouts[k])
                found = codec.reduce(shard, layouts[k], rail, node, step)
                codec.commit(layouts[k])
                out = {name: torch.empty(s, dtype=torch.float64) for name, s in MIXED.items()}
                gathered = [torch.empty(x.numel, dtype=torch.float64) for x in layouts]
                codec.gather(found, layouts[k], node, gathered)
                for layout, total in zip(layouts, gathered, strict=True):
                    put(out, layout, total)
                totals.append(out)
            return totals, codec.state_dict()

        found = run_job(2, num_local, work)
        return found[0][0], {k: t for _, state in found[:num_local] for k, t in state.items()}

    right, _ = run(2, {}, range(5))
    _, state = run(3, {}, range(3))
    after, _ = run(2, state, range(3, 5))
    for found, expected in zip(after, right[3:], strict=True):
        assert distance(found, expected) < 1e-12
    _, same = run(2, {}, range(3))
    again, _ = run(2, same, range(3, 5))
    for found, expected in zip(again, right[3:], strict=True):
        assert all(torch.equal(found[k], expected[k]) for k in MIXED)


def test_state_of_another_rank_is_refused():
    with pytest.raises(ConfigError, match="made with rank 4, not 2"):
        PowerSGD(2).load_state_dict({"m/q": torch.zeros(4, 30)})
    with pytest.raises(ConfigError, match="at least 1"):
        PowerSGD(0)


def test_first_q_depends_on_seed_and_name_only():
    assert torch.equal(draw(0, "a", 2, 9), draw(0, "a", 2, 9))
    assert not torch.equal(draw(0, "a", 2, 9), draw(1, "a", 2, 9))
    assert not torch.equal(draw(0, "a", 2, 9), draw(0, "b", 2, 9))
    many = draw(3, "m", 4, 50_000)
    assert abs(many.mean().item()) < 0.01
    assert abs(many.std().item() - 1) < 0.01


# --- layouts ---


def test_a_shard_that_cuts_a_row_is_refused_on_all_ranks():
    layouts = [
        Layout(7, (Piece("fc", (40, 30), 0, 605, 0),)),
        Layout(7, (Piece("fc", (40, 30), 605, 1200, 0),)),
    ]

    def work(v, k, rail, node):
        with pytest.raises(PlanError, match="elements 0 to 605 of 'fc'.*not whole rows of 30"):
            PowerSGD(2).reduce(torch.zeros(layouts[k].numel), layouts[k], rail, node, 0)
        return True

    assert all(run_job(2, 2, work))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(0, 300), (600, 1200)], "each of the 40 rows of 'fc' once"),
        ([(0, 600)], "each of the 40 rows of 'fc' once"),
        ([(0, 900), (600, 1200)], "each of the 40 rows of 'fc' once"),
        ([[(0, 300), (300, 600)], (600, 1200)], "which it holds twice"),
    ],
)
def test_a_matrix_that_is_not_there_once_is_refused(runs, message):
    from topo_ar.compression.matrices import arrange

    layouts = [
        Layout(
            0, tuple(Piece("fc", (40, 30), *run, 0) for run in (r if isinstance(r, list) else [r]))
        )
        for r in runs
    ]
    with pytest.raises(PlanError, match=message):
        arrange(layouts, 2, 2)


# --- bytes ---


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("num_local", [1, 3])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_wire_bytes_are_the_planned_ones(num_nodes, num_local, rank):
    layouts = cut(MIXED, num_local, rank, uneven=True)

    def work(v, k, rail, node):
        shard = part(random_gradients(MIXED, num_nodes, 0, torch.float32)[v], layouts[k])
        found = PowerSGD(rank).reduce(shard, layouts[k], rail, node, 0)
        assert found.sent_nbytes == rail.sent_nbytes
        return found.sent_nbytes

    sent = run_job(num_nodes, num_local, work)
    planned = num_nodes * Codec("powersgd", rank).sent_nbytes(list(MIXED.values()), num_nodes)
    # The all-reduce of each rank rounds its share of a vector down to whole bytes.
    assert planned - len(sent) <= sum(sent) <= planned + 1e-6


def test_the_alternating_variant_sends_half_the_factors():
    matrices = [torch.randn(64, 64) for _ in range(2)]
    for found, _ in reduce_once(matrices, 2, steps=2, alternating=True):
        assert [r.sent_nbytes for r in found] == [4 * 2 * 64] * 2


def test_the_tail_evens_out_what_the_nodes_answer_for():
    shapes = {"a": (64, 64), "b": (32, 64), "bias": (1000,)}
    layouts = cut(shapes, 1, 2)
    gradients = random_gradients(shapes, 4, 0, torch.float32)

    def work(v, k, rail, node):
        return PowerSGD(2).reduce(part(gradients[v], layouts[0]), layouts[0], rail, node, 0)

    sent = [found.sent_nbytes for found in run_job(4, 1, work)]
    assert max(sent) - min(sent) <= 4 * 4


# --- kernels ---


def test_batches_are_what_single_products_are():
    torch.manual_seed(0)
    pairs = {
        "a": (torch.randn(2, 8), torch.randn(8, 5)),
        "b": (torch.randn(2, 3), torch.randn(3, 5)),
        "c": (torch.randn(2, 8), torch.randn(8, 5)),
    }
    found = multiply_batches(pairs)
    right = multiply({k: f for k, (f, _) in pairs.items()}, {k: o for k, (_, o) in pairs.items()})
    assert found.keys() == right.keys()
    assert all(torch.allclose(found[k], right[k], atol=1e-6) for k in pairs)
