"""Training with compression between nodes, in real jobs whose ranks count as several hosts."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from experiments.simulated_ranks import SimulatedJob
from tests.compressed_training import (
    CODECS,
    TWO_BY_TWO,
    Given,
    attached,
    batch,
    model,
    on_hosts,
    train_step,
    weights,
)
from tests.ranks import tell
from topo_ar.compression import two_shot
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.parts import part_of
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.compression.registry import make
from topo_ar.compression.shards import shard_bounds
from topo_ar.errors import ConfigError
from topo_ar.integrations import compressed
from topo_ar.integrations.compression_trial import Trial
from topo_ar.planning.codec_costs import CPU_COSTS
from topo_ar.planning.codecs import BLOCK, NONE, parse_codec


def _trains(rank, world_size, hosts, compression, options, steps=6):
    on_hosts(rank, hosts)
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    ddp = DistributedDataParallel(model(dtype), **{"bucket_cap_mb": 0.02, **options.pop("ddp", {})})
    plain = DistributedDataParallel(copy.deepcopy(ddp.module))
    with attached(ddp, compression, **options) as handle:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, plain)]
        for step in range(steps):
            for each, optimizer in zip((ddp, plain), optimizers, strict=True):
                train_step(each, optimizer, batch(rank, step, dtype))
        report = handle.compression
        assert handle.error is None
        assert all(p.grad.dtype == dtype for p in ddp.parameters())
    return weights(ddp), weights(plain), report


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("hosts", [TWO_BY_TWO, [0, 1, 2]], ids=str)
def test_replicas_are_bit_identical_and_near_plain_ddp(ranks, hosts, codec) -> None:
    # Compared after every step, too.
    results = ranks.run(_trains, len(hosts), hosts, codec, {"check_replicas_every": 1})
    ours, plain, report = results[0]
    for theirs, _, _ in results:
        assert torch.equal(theirs, ours)
    moved = float((plain - weights(model())).norm())
    limits = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, "int4": 0.1}
    assert 0 < float((ours - plain).norm()) < limits.get(codec, 0.9) * moved
    assert 0 < report.sent_nbytes < report.dense_nbytes
    assert {codec} <= {each for bucket in report.buckets for each in bucket.codecs}
    assert report.reason == ""


@pytest.mark.parametrize(
    "options",
    [
        {"ddp": {"gradient_as_bucket_view": True}},
        {"ddp": {"find_unused_parameters": True}},
        {"ddp": {"static_graph": True}},
        {"dtype": torch.bfloat16},
        {"ddp": {"bucket_cap_mb": 25}},
        {"start_step": 0},
    ],
    ids=str,
)
def test_options_of_ddp(ranks, options) -> None:
    results = ranks.run(_trains, 4, TWO_BY_TWO, "int8", options)
    ours, plain, _ = results[0]
    assert all(torch.equal(theirs, ours) for theirs, _, _ in results)
    moved = float((plain - weights(model(ours.dtype))).float().norm())
    assert float((ours - plain).float().norm()) < 0.05 * moved


# --- against simulated ranks ---

SHAPES = {"a": (60, 50), "b": (50,), "c": (33, 64), "d": (3, 7), "e": (20, 9, 3, 3)}


def _factors(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _given(rank, world_size, hosts, codec, steps):
    on_hosts(rank, hosts)
    ddp = DistributedDataParallel(Given(SHAPES))
    found = []
    with attached(ddp, codec, start_step=0) as handle:
        for step in range(steps):
            ddp.zero_grad()
            ddp(_factors(rank, step)).backward()
            order = handle.compression.buckets[0].parameters
            found.append((order, ddp.module.gradients()))
    return found


def _simulated(codec: str, nodes: int, local: int, orders: list[tuple[str, ...]]):
    world = nodes * local
    headroom = 2 ** math.ceil(math.log2(world))

    def work(v, k, rail, node):
        feedback, means = ErrorFeedback(make(parse_codec(codec))), []
        before = None
        for step, order in enumerate(orders):
            if order != before:
                pieces, at = [], 0
                for name in (name.removeprefix("values.") for name in order):
                    numel = math.prod(SHAPES[name])
                    pieces.append(Piece(f"values.{name}", SHAPES[name], 0, numel, at))
                    at += numel
                whole = Layout(0, tuple(pieces))
                bounds = shard_bounds(whole, parse_codec(codec), local)
                layout = part_of(whole, bounds[k], bounds[k + 1])
                feedback.reshard(layout, node, step=step)
                before = order
            flat = [
                torch.cat([f[p.name.removeprefix("values.")].flatten() for p in whole.pieces])
                for f in (_factors(v * local + i, step) for i in range(local))
            ]
            shard = sum(flat[1:], flat[0])[bounds[k] : bounds[k + 1]] / headroom
            total = feedback.reduce(shard, layout, rail, node, step, scale=1 / headroom).total
            mean = torch.cat(node.all_gather(total / (world / headroom)))
            means.append(
                {
                    p.name.removeprefix("values."): mean[p.offset : p.offset + p.end].view(p.shape)
                    for p in whole.pieces
                }
            )
        return means

    with SimulatedJob(nodes, local) as job:
        return job.run(work)[0]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("hosts", "nodes"), [(TWO_BY_TWO, 2), ([0, 1, 2], 3)], ids=str)
def test_gradients_are_those_of_simulated_ranks(ranks, hosts, nodes, codec) -> None:
    results = ranks.run(_given, len(hosts), hosts, codec, 4)
    orders = [order for order, _ in results[0]]
    expected = _simulated(codec, nodes, len(hosts) // nodes, orders)
    for found in results:
        for (_, ours), theirs in zip(found, expected, strict=True):
            for name, gradient in ours.items():
                assert torch.equal(gradient, theirs[name]), name


def _in_chunks(rank, world_size, hosts, codec, numel):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_shot, "_CHUNK", numel)
        # A thousand chunks take long to measure.
        patch.setattr(compressed, "costs_here", lambda *_: CPU_COSTS)
        steps = _given(rank, world_size, hosts, codec, 3)
        return steps, _counted(rank, world_size, hosts, codec)


@pytest.mark.parametrize("codec", ["bf16", "int4", "sign"])
@pytest.mark.parametrize("hosts", [TWO_BY_TWO, [0, 1, 2]], ids=str)
def test_chunks_on_the_wire_change_no_sum_and_no_byte(ranks, hosts, codec) -> None:
    whole = ranks.run(_in_chunks, len(hosts), hosts, codec, 1 << 18)
    chunks = ranks.run(_in_chunks, len(hosts), hosts, codec, 8 * BLOCK)
    # What is lost in the second encoding belongs to other nodes, which shows from step 1 on.
    expected = whole[0][0][0][1]
    for steps, _ in chunks:
        assert all(torch.equal(steps[0][1][name], expected[name]) for name in expected)
        for (_, found), (_, first) in zip(steps, chunks[0][0], strict=True):
            assert all(torch.equal(found[name], first[name]) for name in first)
    sent = [sum(counted[0] for _, counted in found) for found in (whole, chunks)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("codec", ["powersgd:1", "powersgd:3"])
def test_hierarchical_powersgd_equals_the_flat_one(ranks, codec) -> None:
    flat = ranks.run(_given, 4, [0, 1, 2, 3], codec, 4)
    hierarchical = ranks.run(_given, 4, TWO_BY_TWO, codec, 4)
    for (_, one), (_, other) in zip(flat[0], hierarchical[0], strict=True):
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-5)


# --- bytes ---


def _counted(rank, world_size, hosts, codec):
    on_hosts(rank, hosts)
    ddp = DistributedDataParallel(Given(SHAPES))
    with attached(ddp, codec, start_step=0) as handle:
        for step in range(2):
            ddp(_factors(rank, step)).backward()
        (bucket,) = handle.compression.buckets
    return bucket.sent_nbytes, bucket.dense_nbytes, bucket.parameters


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("hosts", "nodes"), [([0, 1], 2), (TWO_BY_TWO, 2), ([0, 1, 2], 3)], ids=str
)
def test_counted_bytes_are_the_planned_bytes(ranks, hosts, nodes, codec) -> None:
    counted = ranks.run(_counted, len(hosts), hosts, codec)
    order = [name.removeprefix("values.") for name in counted[0][2]]
    local = len(hosts) // nodes
    planned = parse_codec(codec).sent_nbytes([SHAPES[name] for name in order], nodes) * nodes
    # Whether a step is finite is a float of each rail, all-reduced.
    flags = 2 * (nodes - 1) * 4 * local
    # k is rounded up in each shard, each part of a shard has scales of its own.
    slack = 8 * nodes * local if codec[:4] in ("topk", "rand", "sign") and len(hosts) > 2 else 0
    if codec == "sign":
        slack = 4 * len(order) * nodes * local * nodes
    assert 0 <= sum(sent for sent, _, _ in counted) - planned - flags <= slack
    numel = sum(map(math.prod, SHAPES.values()))
    assert sum(dense for _, dense, _ in counted) == pytest.approx(
        2 * (nodes - 1) * 4 * numel, rel=0.01
    )


# --- public reports ---


def _padding(rank, world_size, hosts, codec, feeds):
    on_hosts(rank, hosts)
    ddp = DistributedDataParallel(nn.Embedding(10, 4, padding_idx=0, sparse=True))
    columns = []
    with attached(ddp, codec, start_step=0):
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.tensor(feeds[rank])).sum().backward()
            columns.append(ddp.module.weight.grad.to_dense()[:, 0].tolist())
    return columns


@pytest.mark.parametrize("codec", ["none", "rows", *CODECS])
def test_one_rank_sees_only_the_padding_index(ranks, codec) -> None:
    """R01."""
    right = [0, 1.0, 0.5, 0, 0, 0, 0, 0, 0, 0]
    feeds = [[1, 2, 1], [0, 0, 0]]
    assert ranks.run(_padding, 2, [0, 1], codec, feeds) == [[right] * 2] * 2
    nothing = [[0, 0, 0]] * 2
    assert ranks.run(_padding, 2, [0, 1], codec, nothing) == [[[0.0] * 10] * 2] * 2


def _uneven(rank, world_size, codec):
    on_hosts(rank, [0, 1])
    module = nn.Linear(64, 32, bias=False)
    nn.init.constant_(module.weight, 7.0)
    ddp = DistributedDataParallel(module)
    norms = []
    with attached(ddp, codec, start_step=0) as handle:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        with ddp.join():
            for step in range(5 if rank == 0 else 3):
                optimizer.zero_grad()
                noise = 0 if codec == "none" else batch(rank, step)[:1].repeat(1, 2)
                ddp(torch.ones(1, 64) * (rank + 1) + noise).sum().backward()
                optimizer.step()
                if rank == 1 and step == 2:
                    norms.append(_residual_norm(handle))
        norms.append(_residual_norm(handle))
    return module.weight.detach().clone(), norms


def _residual_norm(handle) -> float:
    if handle.hook.compression is None:
        return 0.0
    handle.hook.compression.settle()
    (stream,) = handle.hook.compression.streams.values()
    return sum(float(run.values.norm()) for run in stream.feedback.store.runs())


@pytest.mark.parametrize("codec", ["none", *CODECS])
def test_uneven_numbers_of_batches(ranks, codec) -> None:
    """R02."""
    (first, _), (second, norms) = ranks.run(_uneven, 2, codec)
    assert torch.equal(first, second)
    if codec == "none":
        assert (first == 1.5).all()
    else:
        assert norms[0] == norms[1] > 0


def _ramp(rank, world_size, codec):
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(Given({"p": (100, 100), "q": (5,)}))
    ramp = torch.arange(1.0, 10001).view(100, 100)
    with attached(ddp, codec, start_step=0) as handle:
        ddp({"p": ramp, "q": torch.ones(5)}).backward()
        compression = handle.hook.compression
        compression.settle()
        runs = [r for s in compression.streams.values() for r in s.feedback.store.runs()]
        residual = sum(float(r.values.double().sum()) for r in runs) / compression.scale
    return ddp.module.gradients(), residual


def test_top_k_keeps_a_hundredth_wherever_else_ranks_are_set(ranks) -> None:
    """R04."""
    for gradients, residual in ranks.run(_ramp, 2, {"*p": "topk:0.01", "*q": "powersgd:64"}):
        kept = gradients["p"].flatten()
        assert kept.nonzero().flatten().tolist() == list(range(9900, 10000))
        assert kept[9900:].tolist() == [float(value) for value in range(9901, 10001)]
        assert gradients["q"].tolist() == [1.0] * 5
        assert residual == 49_009_950


# --- how a step may go ---


def _accumulates(rank, world_size):
    """Passes that are not synchronised neither count nor reach the error memory."""
    on_hosts(rank, TWO_BY_TWO)
    found = []
    for parts in (1, 3):
        ddp = DistributedDataParallel(Given(SHAPES))
        with attached(ddp, "randomk:0.1", start_step=0) as handle:
            for step in range(3):
                ddp.zero_grad()
                factors = {name: 6 * f.sign() for name, f in _factors(rank, step).items()}
                part = {name: f / parts for name, f in factors.items()}
                for _ in range(parts - 1):
                    with ddp.no_sync():
                        ddp(part).backward()
                ddp(part).backward()
            found.append((ddp.module.gradients(), handle.hook.compression.next_step))
    (one, steps), (other, same) = found
    return steps == same == 3 and all(torch.equal(one[name], other[name]) for name in one)


def test_accumulated_gradients_are_one_step(ranks) -> None:
    assert ranks.run(_accumulates, 4) == [True] * 4


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 48), nn.Linear(64, 48)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


def _unused(rank, world_size, codec):
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    with attached(ddp, codec, start_step=0) as handle:
        for step, left in enumerate([True, False, False]):
            ddp.zero_grad()
            ddp(batch(rank, step).repeat(1, 2), left).square().sum().backward()
            kept = handle.state_dict()["residual/left.weight"]
            if step == 0:
                first = kept
            else:
                assert ddp.module.left.weight.grad is None
        return bool(first.any()) and torch.equal(kept, first)


@pytest.mark.parametrize("codec", ["int4", "topk:0.05", "powersgd:2"])
def test_a_parameter_that_nobody_uses_keeps_what_it_has_not_sent(ranks, codec) -> None:
    assert ranks.run(_unused, 4, codec) == [True] * 4


def _until_killed(rank, world_size, codec):
    on_hosts(rank, TWO_BY_TWO)
    ddp = DistributedDataParallel(Given({"a": (600, 500)}))
    factors = {"a": torch.ones(600, 500)}
    with attached(ddp, codec, start_step=0, timeout_s=30.0) as handle:
        try:
            for step in range(10_000):
                ddp(factors).backward()
                if step == 3:
                    tell("running")
        except RuntimeError as error:
            return str(error), handle.error.ranks
    return "no error", ()


@pytest.mark.parametrize("codec", ["int8", "powersgd:2"])
def test_survivors_of_a_killed_rank_name_it(ranks, codec) -> None:
    def on_message(run, rank, message) -> None:
        if rank == 2:
            run.kill(2)

    outcomes = ranks.fresh(_until_killed, 4, codec, deadline_s=15.0, on_message=on_message)
    for outcome in outcomes:
        if outcome.rank != 2:
            assert outcome.exitcode == 0, outcome.error
            text, culprits = outcome.result
            assert "rank 2" in text
            assert culprits == (2,)


# --- what is asked for ---


def _refused(rank, world_size, options):
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(model())
    try:
        with attached(ddp, **options):
            return "attached"
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": "int9"}, "'int9' is not a codec"),
        ({"compression": {"*.wieght": "int8"}}, "the pattern '*.wieght' fits no parameter"),
        ({"compression": "auto", "policy": "lossy"}, "needs a relative error"),
        ({"compression": "int8", "start_step": -1}, "start_step=-1 must be 0 or more"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(ranks, options, text) -> None:
    for said in ranks.run(_refused, 2, options):
        assert text in said


def _differing(rank, world_size):
    return _refused(rank, world_size, {"compression": "int8" if rank else "none"})


def test_options_that_differ_between_ranks_are_refused(ranks) -> None:
    for said in ranks.run(_differing, 3 - 1):
        assert "compression is int8 on rank 1 but none on rank 0" in said


def test_a_mapping_splits_a_bucket_by_codec(ranks) -> None:
    mapping = {"0.weight": "powersgd:2", "2.*": "int8"}
    results = ranks.run(_trains, 4, TWO_BY_TWO, mapping, {"ddp": {"bucket_cap_mb": 25}})
    ours, plain, report = results[0]
    assert all(torch.equal(theirs, ours) for theirs, _, _ in results)
    (bucket,) = report.buckets
    assert sorted(bucket.codecs) == ["int8", "none", "powersgd:2"]
    moved = float((plain - weights(model())).norm())
    assert 0 < float((ours - plain).norm()) < 0.9 * moved
    # What stays exact has the gradient of plain DDP as long as the weights are the same.
    assert ours.shape == plain.shape


def _logged(rank, world_size, hosts, compression, options, steps):
    import logging

    class Keep(logging.Handler):
        def __init__(self):
            super().__init__()
            self.lines = []

        def emit(self, record):
            self.lines.append(f"{record.levelname}: {record.getMessage()}")

    logger = logging.getLogger("topo_ar")
    keep, level = Keep(), logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        ours, plain, report = _trains(rank, world_size, hosts, compression, options, steps)
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)
    return keep.lines, ours, plain, report


@pytest.mark.parametrize(
    ("hosts", "why"),
    [([0, 0], "there is one node"), ([0, 0, 1], "the nodes have unequal numbers of ranks")],
    ids=str,
)
def test_where_nothing_can_be_compressed_all_is_exact_and_said_once(ranks, hosts, why) -> None:
    results = ranks.run(_logged, len(hosts), hosts, "topk:0.01", {"start_step": 0}, 4)
    lines, ours, plain, report = results[0]
    assert [line for line in lines if "nothing is compressed" in line] == [f"INFO: {report.reason}"]
    assert why in report.reason
    assert report.buckets == ()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(theirs, ours) for _, theirs, _, _ in results)


def test_top_k_with_adam_warns_with_the_measured_reason(ranks) -> None:
    options = {"optimizer": "AdamW"}
    lines = ranks.run(_logged, 2, [0, 1], "topk:0.01", options, 4)[0][0]
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert "topk:0.01 is not safe with adamw" in warning
    assert "69 %" in warning


def test_a_codec_that_drifts_backs_off_and_is_then_turned_off_on_all_ranks(ranks, monkeypatch):
    """Entries that wait for some 50 steps are too many for a limit of one gradient."""
    results = ranks.run(_drifts, 4)
    lines, _, _, report = results[0]
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 2
    assert "topk:0.05 drifts: the residual is" in warnings[0]
    assert "all ranks go on with topk:0.1" in warnings[0]
    assert "all ranks stop to compress" in warnings[1]
    assert report.buckets == ()
    assert all(torch.equal(ours, results[0][1]) for _, ours, _, _ in results)


def _drifts(rank, world_size):
    from topo_ar.compression import drift

    before, drift._MOST_WAITING = drift._MOST_WAITING, 0.01
    try:
        return _logged(rank, world_size, TWO_BY_TWO, "topk:0.05", {"guard_steps": 2}, 12)
    finally:
        drift._MOST_WAITING = before


def test_a_sound_codec_does_not_drift(ranks) -> None:
    for codec in ("int8", "powersgd:2", "topk:0.05"):
        lines = ranks.run(_logged, 4, TWO_BY_TWO, codec, {"guard_steps": 1}, 12)[0][0]
        assert [line for line in lines if line.startswith("WARNING")] == []


@pytest.mark.parametrize("policy", ["exact", "lossy:0.05"])
def test_auto_asks_the_planner_and_all_ranks_keep_what_is_fastest(ranks, policy) -> None:
    options = {"policy": policy, "optimizer": "sgd"}
    results = ranks.run(_logged, 4, TWO_BY_TWO, "auto", options, 45)
    lines, ours, plain, report = results[0]
    assert all(torch.equal(theirs, ours) for _, theirs, _, _ in results)
    assert {r.reason for _, _, _, r in results} == {report.reason}
    assert lines.count(f"INFO: {report.reason}") == 1
    if policy == "exact":
        assert "the policy is exact" in report.reason
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    else:
        assert "In turns a step took: " in report.reason
        moved = float((plain - weights(model())).norm())
        assert float((ours - plain).norm()) < 0.05 * moved


def _exact_is_fastest(rank, world_size):
    """What was left out in the trial comes in one step, exactly; then all is exact."""
    on_hosts(rank, TWO_BY_TWO)
    Trial.winner, before = lambda self, communicator: (self.choices[-1], "exact."), Trial.winner
    Trial.__init__, made = _exact_last, Trial.__init__
    ddp, given, got = DistributedDataParallel(Given(SHAPES)), 0.0, 0.0
    try:
        with attached(ddp, "auto", policy="topk:0.05,int4", start_step=0) as handle:
            auto = handle.hook.compression.auto
            for step in range(48):
                ddp.zero_grad()
                ddp(_factors(rank, step)).backward()
                got = got + ddp.module.gradients()["a"].double()
                given = given + sum(_factors(r, step)["a"].double() for r in range(4)) / 4
                if step == 20:
                    outstanding = float((given - got).norm())
            assert auto.done
            # Then exact sums have to prove themselves against plain ones.
            assert handle.choice.trials == 1
            return outstanding, float((given - got).norm()), handle.compression.buckets
    finally:
        Trial.winner, Trial.__init__ = before, made


def _exact_last(self, choices, made=Trial.__init__):
    made(self, sorted(choices, key=lambda choice: choice.codec == NONE))


def _costs(rank, world_size, hosts, compression, policy):
    on_hosts(rank, hosts)
    ddp = DistributedDataParallel(model())
    with attached(ddp, compression, policy=policy) as handle:
        return handle.compression.costs


@pytest.mark.parametrize(
    ("compression", "policy", "measured"),
    [
        ("int8", "exact", ("int8",)),
        ({"0.*": "int8", "*": "powersgd:2"}, "exact", ("int8", "powersgd:2")),
        ("auto", "lossy:0.05", ("fp16", "bf16", "int8")),
        ("rows", "exact", ()),
    ],
)
def test_costs_are_measured_at_start_up_and_agreed(ranks, compression, policy, measured) -> None:
    first, second = ranks.run(_costs, 2, [0, 1], compression, policy)
    assert first == second
    assert first.measured == measured
    for codec in map(parse_codec, measured):
        assert 0 < first.per_byte(codec) < 1e-6
        assert 0 < first.launch(codec) < 1
    assert ("measured at start-up on the slowest rank" in first.source) == bool(measured)


def test_on_one_host_costs_are_not_measured(ranks) -> None:
    (costs, _) = ranks.run(_costs, 2, [0, 0], "int8", "exact")
    assert costs.measured == ()
    assert "assumed" in costs.source


def test_where_exact_sums_are_fastest_nothing_is_lost(ranks) -> None:
    for outstanding, left, buckets in ranks.run(_exact_is_fastest, 4):
        assert outstanding > 1
        assert left < 1e-3
        assert buckets == ()


def test_warm_up_lets_the_density_fall(ranks) -> None:
    from topo_ar.compression.drift import warm_up_density

    found = [warm_up_density(0.001, done / 10) for done in range(12)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 0.25
    assert found[10] == found[11] == 0.001
    for sent in ranks.run(_warms_up, 2):
        assert sent == [3000, 3000, 750, 750, 188, 47, 30, 30]


def _warms_up(rank, world_size):
    """How many entries arrive in each step: first all, then ever fewer."""
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(Given({"a": (60, 50)}))
    ramp = torch.arange(1.0, 3001).view(60, 50)
    sent = []
    with attached(ddp, "topk:0.01", start_step=2, warm_up_steps=4):
        for _ in range(8):
            ddp.zero_grad()
            ddp({"a": ramp}).backward()
            sent.append(int(ddp.module.gradients()["a"].count_nonzero()))
    return sent


def test_ddp_takes_compression_and_its_handle_is_found(ranks) -> None:
    for sent, dense in ranks.run(_by_ddp, 2):
        assert 0 < sent < 0.7 * dense


def _by_ddp(rank, world_size):
    on_hosts(rank, [0, 1])
    made = topo_ar.ddp(model(), compression="fp16", start_step=0, timeout_s=20.0)
    with topo_ar.handle_of(made) as handle:
        for _ in range(2):
            made(batch(rank, 0)).sum().backward()
        found = handle.compression.sent_nbytes, handle.compression.dense_nbytes
    with pytest.raises(ConfigError, match="has no hook of topo_ar"):
        topo_ar.handle_of(DistributedDataParallel(model()))
    return found
