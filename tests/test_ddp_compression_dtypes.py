"""Buckets of other dtypes than fp32 under compression, also several in one model."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.compressed_training import TWO_BY_TWO, Given, attached, on_hosts
from topo_ar.planning.codecs import parse_codec

SHAPES = {
    f"{kind}{n}": shape for kind in "dsh" for n, shape in enumerate([(60, 50), (50,), (8, 8)])
}
DTYPES = {"d": torch.float64, "s": torch.float32, "h": torch.bfloat16}
BY_NAME = {name: DTYPES[name[0]] for name in SHAPES}
STEPS = 12


def _factors(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = {}
    for name, shape in SHAPES.items():
        whole = torch.randint(-8, 9, shape, generator=generator).double()
        # With bits that fp32 has no room for, and sums that are exact in any order.
        found[name] = (whole + 2.0**-40 if name[0] == "d" else whole).to(BY_NAME[name])
    return found


def _mixed(rank, world_size, codec):
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(Given(SHAPES, BY_NAME))
    given = dict.fromkeys(SHAPES, 0.0)
    got = dict.fromkeys(SHAPES, 0.0)
    with attached(ddp, codec, start_step=0) as handle:
        for step in range(STEPS):
            ddp.zero_grad()
            ddp(_factors(rank, step)).backward()
            gradients = ddp.module.gradients()
            assert {name: g.dtype for name, g in gradients.items()} == BY_NAME
            for name in SHAPES:
                right = sum(_factors(r, step)[name].double() for r in range(4)) / 4
                if len(SHAPES[name]) == 1 or SHAPES[name] == (8, 8):
                    assert torch.equal(gradients[name].double(), right), name
                given[name] = given[name] + right
                got[name] = got[name] + gradients[name].double()
        buckets = handle.compression.buckets
    return gradients, {k: (given[k] - got[k]).norm() / given[k].norm() for k in SHAPES}, buckets


@pytest.mark.parametrize("codec", ["fp16", "int8", "sign", "topk:0.1", "powersgd:2"])
def test_each_dtype_is_compressed_in_buckets_of_its_own(ranks, codec) -> None:
    results = ranks.run(_mixed, 4, codec)
    first, lost, buckets = results[0]
    for gradients, _, _ in results:
        assert all(torch.equal(gradients[name], first[name]) for name in SHAPES)
    # Of what was given in all steps only what is outstanding is missing, and bf16's roundings.
    limits = {"fp16": 1e-3, "int8": 5e-3}
    for name in ("d0", "s0", "h0"):
        assert 0 <= lost[name] < limits.get(codec, 0.9) + (2e-3 if name == "h0" else 0), name
    # A cast makes nothing shorter that has 16 bits already.
    kinds = "ds" if codec == "fp16" else "dsh"
    coded = {name for bucket in buckets for name in bucket.parameters}
    assert coded == {f"values.{name}" for name in SHAPES if name[0] in kinds}
    for bucket in buckets:
        assert codec in bucket.codecs
        assert 0 < bucket.sent_nbytes < bucket.dense_nbytes


def _counted(rank, world_size, codec, kind):
    on_hosts(rank, [0, 1])
    names = {name: shape for name, shape in SHAPES.items() if name[0] == kind}
    ddp = DistributedDataParallel(Given(names, BY_NAME))
    with attached(ddp, codec, start_step=0) as handle:
        for step in range(2):
            ddp(_factors(rank, step)).backward()
        (bucket,) = handle.compression.buckets
    return bucket.sent_nbytes, [names[name.removeprefix("values.")] for name in bucket.parameters]


@pytest.mark.parametrize("kind", "dsh")
@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "randomk:0.1", "powersgd:2"])
def test_counted_bytes_are_the_planned_bytes(ranks, codec, kind) -> None:
    counted = ranks.run(_counted, 2, codec, kind)
    itemsize = DTYPES[kind].itemsize
    planned = 2 * parse_codec(codec).sent_nbytes(counted[0][1], 2, itemsize)
    flags = 2 * 4
    assert sum(sent for sent, _ in counted) == planned + flags


def _beyond(rank, world_size):
    """A gradient that fp32 cannot hold: skipped on all ranks, like any other that is infinite."""
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(Given({"d": (60, 50)}, {"d": torch.float64}))
    with attached(ddp, "int8", start_step=0) as handle:
        found = []
        for size in (1.0, 1e300, 1.0):
            ddp.zero_grad()
            ddp({"d": torch.full((60, 50), size, dtype=torch.float64)}).backward()
            found.append(ddp.module.gradients()["d"][0, 0].item())
        residual = handle.state_dict()["residual/values.d"]
    return found, bool(residual.isfinite().all())


def test_what_fp32_cannot_hold_is_a_bad_step(ranks) -> None:
    for (before, bad, after), finite in ranks.run(_beyond, 2):
        assert before == after == pytest.approx(1.0, rel=1e-2)
        assert bad != bad
        assert finite
