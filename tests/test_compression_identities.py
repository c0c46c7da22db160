"""What holds exactly of compression: which test shows it, and those that no other file has.

| | identity | shown by |
|---|---|---|
| 1 | top-k sends what the residual lacks, bit for bit; k exact, ties by lowest index | `test_compression_codecs::test_topk_sends_what_the_residual_lacks_bit_for_bit`, `test_compression_select::test_the_set_of_a_stable_sort`, `test_compression_select::test_the_multiset_of_torch` |
| 2 | sent + kept = given, with both residuals of two shots, odd cuts and skipped steps | `test_what_is_sent_and_kept_is_what_was_given`, `test_compression_error_feedback::test_what_is_not_sent_is_kept`, `test_powersgd::test_nothing_is_lost` |
| 3 | PowerSGD of full rank is exact | `test_powersgd::test_a_rank_that_is_not_worth_it_is_exact`, `test_powersgd_of_full_rank_is_exact` |
| 4 | PowerSGD is exact up to its rank, also where the matrix has less | `test_powersgd::test_low_rank_is_exact` |
| 5 | zero stays zero | `test_powersgd::test_zero_stays_zero_and_is_survived`, `test_compression_codecs::test_sign_of_zeros_is_zero` |
| 6 | torch's PowerSGD bit for bit; the sharded layout near it | `test_powersgd_torch::test_bit_for_bit_what_torch_gives`, `test_the_sharded_layout_gives_what_torch_gives` |
| 7 | hierarchical = flat PowerSGD | `test_powersgd::test_shards_give_what_whole_nodes_give`, `test_ddp_compression::test_hierarchical_powersgd_equals_the_flat_one` |
| 8 | gradient = mean + residual | `test_powersgd::test_nothing_is_lost` |
| 9 | not better than the best rank r, as good as random projection, better with each power step | `test_powersgd::test_not_worse_than_the_bound_and_better_with_each_power_step`, `test_powersgd::test_one_step_is_as_good_as_random_projection_promises` |
| 10 | P^' e = 0 in the local form, which sums to the global one and stays bounded | `test_powersgd::test_own_is_a_projection_and_adds_up_to_the_total`, `test_powersgd::test_the_error_stays_bounded_where_nodes_differ_for_ever` |
| 11 | the norm of the total is the norm of Q | `test_the_norm_of_a_product_is_the_norm_of_its_right_factor` |
| 12 | half a step, zero and sign of integers; an outlier stays in its block | `test_compression_codecs::test_integers_keep_half_a_step_zero_and_sign`, `test_compression_codecs::test_an_outlier_stays_in_its_block` |
| 13 | linear codecs commute with the sum; the cut changes nothing; one node is the identity | `test_linear_codecs_commute_with_the_sum`, `test_the_number_of_local_ranks_changes_no_bit`, `test_compression_codecs::test_one_node_is_the_identity` |
| 14 | counted = planned bytes = the published ones | `test_compression_codecs::test_counted_bytes_are_planned_bytes`, `test_powersgd::test_wire_bytes_are_the_planned_ones`, `test_ddp_compression::test_counted_bytes_are_the_planned_bytes`, `test_planning_codecs::test_powersgd_on_resnet18`, `test_planning_codecs::test_powersgd_on_the_lstm` |
| 15 | a step that is not finite is so on all ranks, and leaves no trace | `test_compression_error_feedback::test_a_bad_step_leaves_no_trace`, `test_ddp_compression_state::test_an_infinity_reaches_all_ranks_and_leaves_no_trace` |
| 16 | resumed = uninterrupted; another job conserves what is outstanding | `test_ddp_compression_state::test_the_same_job_resumes_bit_for_bit`, `test_ddp_compression_state::test_a_job_resumes_with_another_bucket_cap`, `test_ddp_compression_state::test_another_job_takes_over_what_is_outstanding` |
| 17 | all ranks have the same bits in every step | `test_ddp_compression::test_replicas_are_bit_identical_and_near_plain_ddp`, `test_powersgd::test_all_replicas_have_the_same_bits` |
| 18 | signs against plain operations; rounding within the limits of Hivemind's tests | `test_compression_codecs::test_sign_equals_plain_operations`, `test_compression_codecs::test_integers_of_random_values_lose_little`, `test_half_precision_of_random_values_loses_little` |
"""  # noqa: E501

import importlib
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.torch_hooks import Bucket, run_ranks, state, step
from tests.simulated import run_job
from topo_ar.compression import matrices
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.parts import part_of
from topo_ar.compression.powersgd import PowerSGD
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.compression.registry import make
from topo_ar.compression.shards import shard_bounds
from topo_ar.planning.codecs import factors_pay, parse_codec

SHAPES = {"a": (60, 50), "b": (50,), "c": (33, 64), "d": (3, 7), "e": (20, 9, 3, 3)}


def layout_of(shapes):
    pieces, offset = [], 0
    for name, shape in shapes.items():
        pieces.append(Piece(name, shape, 0, math.prod(shape), offset))
        offset += math.prod(shape)
    return Layout(0, tuple(pieces))


def whole_numbers(node, step, numel):
    """Gradients whose sums over some steps fp32 holds without rounding."""
    random = torch.Generator().manual_seed(1000 * step + node)
    return torch.randint(-50, 50, (numel,), generator=random).float()


def test_every_identity_has_its_tests():
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", __doc__, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 19))
    for _, names in rows:
        for name in re.findall(r"`(.*?)`", names):
            module, _, function = name.rpartition("::")
            found = importlib.import_module(f"tests.{module}" if module else __name__)
            assert callable(getattr(found, function)), name


@pytest.mark.parametrize("name", ["fp16", "bf16", "topk:0.02", "randomk:0.1"])
@settings(max_examples=12)
@given(nodes=st.integers(1, 6), local=st.integers(1, 3), bad=st.integers(0, 4))
def test_what_is_sent_and_kept_is_what_was_given(name, nodes, local, bad):
    """Without any tolerance: what these codecs leave out is itself a number of fp32."""
    whole = layout_of(SHAPES)

    def work(v, k, rail, node):
        layout = part_of(whole, whole.numel * k // local, whole.numel * (k + 1) // local)
        feedback = ErrorFeedback(make(parse_codec(name)))
        sent, given_ = torch.zeros(2, layout.numel, dtype=torch.float64)
        for when in range(4):
            shard = whole_numbers(7 * v + k, when, layout.numel)
            spoiled = when == bad and (v, k) == (nodes - 1, 0)
            if spoiled:
                shard[1] = math.inf
            total = feedback.reduce(shard, layout, rail, node, when).total
            if when != bad:
                sent += total
                given_ += shard
            else:
                assert total.isnan().all()
        feedback.settle()
        return k, sent, given_, feedback.store.get(layout).double()

    found = run_job(nodes, local, work)
    for k in range(local):
        rail = [results[1:] for results in found if results[0] == k]
        given_, kept = (torch.stack(each).sum(0) for each in list(zip(*rail, strict=True))[1:])
        assert torch.equal(rail[0][0] + kept, given_)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40)])
def test_powersgd_of_full_rank_is_exact(shape, monkeypatch):
    """Such factors never pay, so that this is not what is sent; but nothing would be lost."""
    monkeypatch.setattr(matrices, "factors_pay", lambda shape, rank: len(shape) > 1)
    layout = layout_of({"m": shape})
    random = torch.Generator().manual_seed(0)
    shards = torch.randn(2, layout.numel, dtype=torch.float64, generator=random)

    def work(v, k, rail, node):
        return PowerSGD(min(shape)).reduce(shards[v], layout, rail, node, 0).total

    for total in run_job(2, 1, work):
        assert (total - shards.sum(0)).norm() < 1e-14 * shards.sum(0).norm()


@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_sharded_layout_gives_what_torch_gives(rank, num_local):
    """From torch's first Q; its error memory has another form, but the sum over the nodes is one.

    The gradients have a part in common of the factors' rank: where nothing separates the directions
    that are kept from the others, each rounding grows with the steps on either side.
    """
    steps, nodes, shapes = 6, 2, {"w": (64, 48), "b": (64,), "v": (40, 64)}
    layout, common = layout_of(shapes), torch.Generator().manual_seed(5)
    both = torch.zeros(layout.numel)
    for piece in layout.pieces:
        if len(piece.shape) > 1:
            left, right = (torch.randn(n, rank, generator=common) for n in piece.shape)
            scaled = left * torch.arange(rank, 0, -1)
            both[piece.offset : piece.offset + piece.end] = (scaled @ right.T).view(-1)

    def gradient(node, when):
        random = torch.Generator().manual_seed(100 * when + node)
        return both + 0.3 * torch.randn(layout.numel, generator=random)

    def theirs(group):
        hook_state, means = state(rank, nodes), []
        for when in range(steps + 1):
            bucket = Bucket(gradient(group.index, when), list(shapes.values()), 0, True)
            step(hook_state, [bucket])
            if when == 0:
                # Ours begins at step 1 with the same Q and no residual.
                first = hook_state.q_memory_dict[0].clone()
                hook_state.error_dict[0].zero_()
            means.append(bucket.buffer().clone())
        return first, means[1:]

    first, expected = run_ranks(nodes, theirs)[0]
    rights, at = {}, 0
    for name, shape in shapes.items():
        if factors_pay(shape, rank):
            q = first[at : at + shape[1] * rank].view(shape[1], rank)
            rights[f"{name}/q"] = torch.linalg.qr(q).Q.T.contiguous()
            at += shape[1] * rank
    bounds = shard_bounds(layout, parse_codec(f"powersgd:{rank}"), num_local)

    def ours(v, k, rail, node):
        codec, begin, end = PowerSGD(rank), bounds[k], bounds[k + 1]
        codec.load_state_dict(rights)
        feedback, part = ErrorFeedback(codec), part_of(layout, begin, end)
        means = []
        for when in range(1, steps + 1):
            # Each local rank has its rows of the node's sum.
            shard = gradient(v, when)[begin:end]
            total = feedback.reduce(shard, part, rail, node, when).total
            means.append(torch.cat(node.all_gather(total)) / nodes)
        return means

    for means in run_job(nodes, num_local, ours):
        for found, right in zip(means, expected, strict=True):
            assert (found - right).norm() < 1e-5 * right.norm()


def test_the_norm_of_a_product_is_the_norm_of_its_right_factor():
    """What a clipped gradient's norm may be taken from: P^ is orthonormal."""
    layout = layout_of({"m": (60, 50)})
    random = torch.Generator().manual_seed(0)
    shards = torch.randn(2, layout.numel, dtype=torch.float64, generator=random)

    def work(v, k, rail, node):
        return PowerSGD(4).reduce(shards[v], layout, rail, node, 0).total.view(60, 50)

    total = run_job(2, 1, work)[0]
    right = torch.linalg.svd(total).U[:, :4].T @ shards.sum(0).view(60, 50)
    assert total.norm().item() == pytest.approx(right.norm().item(), rel=1e-12)


@pytest.mark.parametrize("name", ["none", "randomk:0.1", "powersgd:2", "topk:0.05"])
def test_linear_codecs_commute_with_the_sum(name):
    codec, layout = parse_codec(name), layout_of(SHAPES)
    shards = [whole_numbers(v, 0, layout.numel) for v in range(3)]

    def reduced(shards):
        def work(v, k, rail, node):
            return make(codec).reduce(shards[v], layout, rail, node, 0).total

        return run_job(len(shards), 1, work)[0]

    # Zeros on the other two: a codec that looks at single nodes chooses for them otherwise.
    apart, at_once = reduced(shards), reduced([sum(shards), *[torch.zeros_like(shards[0])] * 2])
    assert torch.allclose(apart, at_once, rtol=1e-5, atol=1e-3) == codec.linear


@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "int8", "int4"])
def test_the_number_of_local_ranks_changes_no_bit(name):
    codec, layout = parse_codec(name), layout_of(SHAPES)
    random = torch.Generator().manual_seed(0)
    sums = torch.randn(3, layout.numel, generator=random)

    def total(num_local):
        bounds = shard_bounds(layout, codec, num_local)

        def work(v, k, rail, node):
            part = part_of(layout, bounds[k], bounds[k + 1])
            shard = sums[v, bounds[k] : bounds[k + 1]]
            return torch.cat(node.all_gather(make(codec).reduce(shard, part, rail, node, 0).total))

        return run_job(3, num_local, work)[0]

    alone = total(1)
    for num_local in (2, 3, 4):
        assert torch.equal(total(num_local), alone)


def test_half_precision_of_random_values_loses_little():
    layout = layout_of({"m": (128, 128 * 64)})
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))

    def work(v, k, rail, node):
        codec = make(parse_codec("fp16"))
        zeros = codec.reduce(torch.zeros(layout.numel), layout, rail, node, 0).total
        own = codec.reduce(x if v == 0 else torch.zeros_like(x), layout, rail, node, 0).total
        return zeros, own

    for zeros, found in run_job(2, 1, work):
        assert not zeros.any()
        assert ((found - x) ** 2).mean() < 5e-8
