import math

import pytest
import torch

from experiments.torch_hooks import Bucket, run_ranks, state, step
from tests.simulated import run_job
from topo_ar.compression.powersgd_torch import TorchPowerSGD
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.errors import ConfigError, PlanError
from topo_ar.planning.codecs import Codec

# Two buckets: linear layers, biases, a convolution, some too small to compress.
BUCKETS = [
    [("fc.weight", (64, 48)), ("fc.bias", (64,)), ("conv", (32, 16, 3, 3)), ("norm", (32,))],
    [("head.weight", (10, 64)), ("head.bias", (10,)), ("wide", (16, 200))],
]


def layout(bucket, number):
    pieces, offset = [], 0
    for name, shape in bucket:
        pieces.append(Piece(name, shape, 0, math.prod(shape), offset))
        offset += math.prod(shape)
    return Layout(number, tuple(pieces))


LAYOUTS = [layout(bucket, number) for number, bucket in enumerate(BUCKETS)]
SHAPES = [[shape for _, shape in bucket] for bucket in BUCKETS]


def gradients(rank, when, number):
    random = torch.Generator().manual_seed(100 * when + 10 * rank + number)
    return torch.randn(LAYOUTS[number].numel, generator=random)


def torch_steps(num_ranks, rank, steps, **options):
    def work(group):
        hook_state, means = state(rank, num_ranks, **options), []
        for when in range(steps):
            buckets = [
                Bucket(gradients(group.index, when, n), SHAPES[n], n, n == len(SHAPES) - 1)
                for n in range(len(SHAPES))
            ]
            step(hook_state, buckets)
            means.append([bucket.buffer().clone() for bucket in buckets])
        return means, hook_state.error_dict

    return run_ranks(num_ranks, work)


def our_steps(num_ranks, rank, steps, **options):
    def work(v, k, rail, node):
        codec, means = TorchPowerSGD(rank, **options), []
        for when in range(steps):
            mine = []
            for number, whole in enumerate(LAYOUTS):
                found = codec.reduce(gradients(v, when, number), whole, rail, node, when)
                codec.commit(whole)
                mine.append(found.total / num_ranks)
            means.append(mine)
        return means, codec.state_dict()

    return run_job(num_ranks, 1, work)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"seed": 7}])
def test_bit_for_bit_what_torch_gives(rank, options):
    theirs = torch_steps(4, rank, 6, **({"random_seed": 7} if options else {}))
    ours = our_steps(4, rank, 6, **options)
    for (right, errors), (found, kept) in zip(theirs, ours, strict=True):
        for expected, mine in zip(right, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected, mine, strict=True))
        for number, error in errors.items():
            assert torch.equal(kept[f"error/{number}"], error)


def test_three_ranks_differ_by_a_rounding_only():
    for (right, _), (found, _) in zip(torch_steps(3, 2, 4), our_steps(3, 2, 4), strict=True):
        for expected, mine in zip(right, found, strict=True):
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, mine, strict=True))


def test_uncommitted_steps_leave_no_trace_and_bytes_are_planned():
    def work(v, k, rail, node):
        codec = TorchPowerSGD(2)
        first = codec.reduce(gradients(v, 0, 0), LAYOUTS[0], rail, node, 0)
        assert not codec.state_dict()
        again = codec.reduce(gradients(v, 0, 0), LAYOUTS[0], rail, node, 1)
        assert torch.equal(first.total, again.total)
        assert first.sent_nbytes == Codec("powersgd", 2).sent_nbytes(SHAPES[0], 4)
        return True

    assert all(run_job(4, 1, work))


def test_state_continues():
    def work(v, k, rail, node):
        def run(codec, steps):
            for when in steps:
                found = codec.reduce(gradients(v, when, 0), LAYOUTS[0], rail, node, when)
                codec.commit(LAYOUTS[0])
            return found.total

        whole, half, resumed = TorchPowerSGD(2), TorchPowerSGD(2), TorchPowerSGD(2)
        right = run(whole, range(4))
        run(half, range(2))
        resumed.load_state_dict(half.state_dict())
        return torch.equal(run(resumed, range(2, 4)), right)

    assert all(run_job(2, 1, work))


def test_shards_are_refused():
    def work(v, k, rail, node):
        with pytest.raises(PlanError, match="2 ranks of a node hold shards"):
            TorchPowerSGD(2).reduce(torch.zeros(LAYOUTS[0].numel), LAYOUTS[0], rail, node, 0)

    run_job(1, 2, work)
    with pytest.raises(ConfigError, match="at least 1"):
        TorchPowerSGD(0)
