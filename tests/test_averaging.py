"""Averaging between nodes every H steps: held to plain DDP, to loops in one process, to itself."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.ranks import tell
from tests.test_ddp import HOSTS, _model, _on_hosts
from topo_ar.errors import ConfigError, ExecutionError

UNEVEN = [0, 0, 0, 1]
RATE = 0.05


def _batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 32, generator=generator, dtype=torch.float64)


def _made(rank, kind, hosts=HOSTS, momentum=0.0, dtype=torch.float64, **options):
    _on_hosts(rank, hosts)
    model = DistributedDataParallel(_model(dtype), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    return model, optimizer, kind(model, optimizer, timeout_s=20.0, **options)


def _train(model, optimizer, rank, steps):
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        model(_batch(rank, step).to(dtype)).square().mean().backward()
        optimizer.step()


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _all_flats(model):
    flat = _flat(model)
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return found


def _equal(flats):
    return all(torch.equal(flats[0], each) for each in flats)


def _reference(hosts, num_steps, every, delay, outer):
    """Train in one process, node by node; `outer` makes the next anchor of the mean movement."""
    nodes = [[r for r, host in enumerate(hosts) if host == node] for node in sorted(set(hosts))]
    models = [_model(torch.float64) for _ in nodes]
    anchor = _flat(models[0])
    snapshots = target = None
    for step in range(num_steps):
        for model, node in zip(models, nodes, strict=True):
            model.zero_grad()
            for rank in node:
                (model(_batch(rank, step)).square().mean() / len(node)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad
        if (step + 1) % every == 0:
            snapshots = [_flat(model) for model in models]
            weights = [len(node) / len(hosts) for node in nodes]
            mean = sum(w * s for w, s in zip(weights, snapshots, strict=True))
            anchor = target = outer(anchor, mean - anchor)
        if target is not None and (step + 1) % every == delay % every:
            for model, snapshot in zip(models, snapshots, strict=True):
                moved = target + _flat(model) - snapshot
                nn.utils.vector_to_parameters(moved, model.parameters())
            target = None
    return [_flat(model) for model in models]


def _mean_of(anchor, moved):
    return anchor + moved


class _Nesterov:
    """Sutskever's form, as torch has it: v = m v + g, x -= rate (g + m v)."""

    def __init__(self):
        self.velocity = 0.0

    def __call__(self, anchor, moved):
        gradient = -moved
        self.velocity = 0.9 * self.velocity + gradient
        return anchor - 0.7 * (gradient + 0.9 * self.velocity)


def _every_step(rank, size, hosts, momentum):
    plain = DistributedDataParallel(_model(torch.float64))
    sgd = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=momentum)
    _train(plain, sgd, rank, range(6))
    model, optimizer, averaging = _made(rank, topo_ar.LocalSGD, hosts, momentum, sync_every=1)
    with averaging:
        _train(model, optimizer, rank, range(6))
        return float((_flat(model) - _flat(plain)).abs().max()), _equal(_all_flats(model))


@pytest.mark.parametrize(
    "hosts",
    [
        HOSTS,
        UNEVEN,
        pytest.param([0, 1, 2, 3], marks=pytest.mark.slow),
        pytest.param([0, 0, 0, 0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_exchange_in_every_step_is_plain_ddp(ranks, hosts) -> None:
    for distance, same in ranks.run(_every_step, 4, hosts, 0.9):
        assert distance <= 1e-12
        assert same


def _like_reference(rank, size, kind, hosts, every, delay, num_steps):
    model, optimizer, averaging = _made(rank, kind, hosts, sync_every=every, delay=delay)
    with averaging:
        _train(model, optimizer, rank, range(num_steps))
        flat = _flat(model)
        flats = _all_flats(model)
        before = averaging.num_exchanges
        averaging.synchronize()
        return flat, _equal(flats), _equal(_all_flats(model)), before


@pytest.mark.parametrize(
    ("kind", "outer"),
    [(topo_ar.LocalSGD, lambda: _mean_of), (topo_ar.DiLoCo, _Nesterov)],
    ids=["LocalSGD", "DiLoCo"],
)
@pytest.mark.parametrize(
    ("hosts", "every", "delay"),
    [(HOSTS, 4, 0), pytest.param(HOSTS, 4, 1, marks=pytest.mark.slow), (UNEVEN, 3, 2)],
    ids=str,
)
def test_it_trains_as_a_loop_in_one_process(ranks, kind, outer, hosts, every, delay) -> None:
    num_steps = 3 * every
    found = ranks.run(_like_reference, 4, kind, hosts, every, delay, num_steps)
    expected = _reference(hosts, num_steps, every, delay, outer())
    for (flat, same, same_at_end, exchanges), host in zip(found, hosts, strict=True):
        assert float((flat - expected[host]).abs().max()) <= 1e-12
        assert same == (delay == 0)
        assert same_at_end
        assert exchanges == (3 if delay == 0 else 2)


def _forms(rank, size):
    plain = {"lr": 1.0, "momentum": 0.0}
    found = []
    for kind, options in (
        (topo_ar.LocalSGD, {}),
        (topo_ar.DiLoCo, {"outer_optimizer": lambda ps: torch.optim.SGD(ps, **plain)}),
    ):
        model, optimizer, averaging = _made(rank, kind, sync_every=3, momentum=0.9, **options)
        with averaging:
            _train(model, optimizer, rank, range(9))
        found.append(_flat(model))
    return float((found[0] - found[1]).abs().max())


def test_an_outer_rate_of_one_without_momentum_is_averaging(ranks) -> None:
    assert max(ranks.run(_forms, 4)) <= 1e-12


def _bytes_sent(rank, size, every, delay, compression):
    model, optimizer, averaging = _made(
        rank,
        topo_ar.LocalSGD,
        dtype=torch.float32,
        sync_every=every,
        delay=delay,
        compression=compression,
    )
    with averaging:
        before = averaging.nbytes_sent_between
        _train(model, optimizer, rank, range(15))
        return averaging.nbytes_sent_between - before, averaging.num_exchanges


def test_bytes_between_nodes_are_one_all_reduce_every_so_many_steps(ranks) -> None:
    nbytes = sum(4 * p.numel() for p in _model().parameters())
    for every, delay in ((1, 0), (4, 0), (6, 3)):
        found = ranks.run(_bytes_sent, 4, every, delay, "none")
        # Two nodes exchange what they have: each sends the parameters once.
        assert sum(sent for sent, _ in found[:2]) == nbytes * (15 // every)
        assert [exchanges for _, exchanges in found] == [15 // every] * 4


def _compressed(rank, size, codec, delay):
    options = {"sync_every": 4, "delay": delay, "compression": codec, "dtype": torch.float32}
    model, optimizer, averaging = _made(rank, topo_ar.DiLoCo, **options)
    with averaging:
        _train(model, optimizer, rank, range(40))
        averaging.synchronize()
        flats = _all_flats(model)
        sent = averaging.nbytes_sent_between
        residuals = [v for k, v in averaging.state_dict()["compression"].items() if "residual" in k]
    exact_model, optimizer, averaging = _made(
        rank, topo_ar.DiLoCo, sync_every=4, delay=delay, dtype=torch.float32
    )
    with averaging:
        before = _flat(exact_model)
        _train(exact_model, optimizer, rank, range(40))
        averaging.synchronize()
        exact = _flat(exact_model)
        exact_sent = averaging.nbytes_sent_between
    distance = float((flats[0] - exact).norm() / (exact - before).norm())
    return _equal(flats), sent, exact_sent, distance, any(bool(each.any()) for each in residuals)


@pytest.mark.parametrize(
    ("codec", "delay", "most"),
    [pytest.param("int8", 0, 0.35, marks=pytest.mark.slow), ("topk:0.1", 2, 0.3)],
)
def test_codecs_compress_what_moved_and_ranks_stay_equal(ranks, codec, delay, most) -> None:
    found = ranks.run(_compressed, 4, codec, delay)
    assert sum(sent for _, sent, *_ in found) < most * sum(exact for _, _, exact, *_ in found)
    for same, _, _, distance, keeps in found:
        assert same
        assert 0 < distance < 0.5
        assert keeps


def _resumes(rank, size, kind, delay, compression, stop):
    options = {"sync_every": 4, "delay": delay, "compression": compression, "momentum": 0.9}
    options["dtype"] = torch.float32
    model, optimizer, averaging = _made(rank, kind, **options)
    with averaging:
        _train(model, optimizer, rank, range(stop))
        saved = copy.deepcopy(
            (model.module.state_dict(), optimizer.state_dict(), averaging.state_dict())
        )
        _train(model, optimizer, rank, range(stop, 20))
        uninterrupted = _flat(model)
    model, optimizer, averaging = _made(rank, kind, **options)
    with averaging:
        model.module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        averaging.load_state_dict(saved[2])
        _train(model, optimizer, rank, range(stop, 20))
        return torch.equal(uninterrupted, _flat(model)), averaging.num_exchanges


@pytest.mark.parametrize(
    ("kind", "delay", "compression", "stop"),
    [
        pytest.param(topo_ar.LocalSGD, 0, "none", 6, marks=pytest.mark.slow),
        (topo_ar.LocalSGD, 3, "int8", 9),  # while an exchange is under way
        (topo_ar.DiLoCo, 2, "topk:0.1", 13),
    ],
    ids=str,
)
def test_a_job_goes_on_bit_for_bit(ranks, kind, delay, compression, stop) -> None:
    exchanges = 5 if delay == 0 else 4
    assert ranks.run(_resumes, 4, kind, delay, compression, stop) == [(True, exchanges)] * 4


def _warms_up(rank, size):
    model, optimizer, averaging = _made(rank, topo_ar.DiLoCo, sync_every=4, warmup_steps=5)
    with averaging:
        _train(model, optimizer, rank, range(5))
        warm = _all_flats(model)
        _train(model, optimizer, rank, range(5, 8))
        apart = _all_flats(model)
        exchanges = averaging.num_exchanges
        _train(model, optimizer, rank, range(8, 9))
        together = _all_flats(model)
    plain = DistributedDataParallel(_model(torch.float64))
    _train(plain, torch.optim.SGD(plain.parameters(), lr=RATE), rank, range(5))
    distance = float((warm[0] - _flat(plain)).abs().max())
    return distance, _equal(warm), _equal(apart), exchanges, _equal(together)


def test_the_first_steps_may_be_plain_ones(ranks) -> None:
    for distance, *rest in ranks.run(_warms_up, 4):
        assert distance <= 1e-12
        assert rest == [True, False, 0, True]


def _buffers(rank, size):
    _on_hosts(rank, HOSTS)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with topo_ar.LocalSGD(model, sync_every=2, timeout_s=20.0) as averaging:
        _train(model, optimizer, rank, range(1))
        averaging.step()
        apart = model.module[1].running_mean.clone()
        _train(model, optimizer, rank, range(1, 2))
        averaging.step()
        return apart.tolist(), model.module[1].running_mean.tolist()


def test_statistics_are_averaged_with_the_parameters(ranks) -> None:
    found = ranks.run(_buffers, 4)
    assert len({tuple(apart) for apart, _ in found}) == 4
    assert len({tuple(together) for _, together in found}) == 1


def _refuses(rank, size):
    _on_hosts(rank, HOSTS)
    model = DistributedDataParallel(_model())
    for options, message in (
        ({"sync_every": 0}, "sync_every=0 must be positive"),
        ({"sync_every": 4, "delay": 4}, "delay=4 from 0 to less than that"),
        ({"compression": "auto"}, "name a codec"),
        ({"compression": "int9"}, "int9"),
    ):
        with pytest.raises(ConfigError, match=message):
            topo_ar.LocalSGD(model, **options)
    with pytest.raises(ConfigError, match="takes a DistributedDataParallel.*not a Sequential"):
        topo_ar.DiLoCo(model.module)
    with pytest.raises(ConfigError, match="sync_every"):
        topo_ar.LocalSGD(model, sync_every=4 + rank, timeout_s=20.0)
    with topo_ar.LocalSGD(model, timeout_s=20.0) as averaging:
        state = averaging.state_dict()
        with pytest.raises(ConfigError, match="another model or of other options"):
            averaging.load_state_dict({**state, "anchors": [torch.ones(3)]})
        with pytest.raises(ConfigError, match="already has a communication hook"):
            topo_ar.DiLoCo(model)
    return True


def test_what_cannot_be_is_refused(ranks) -> None:
    assert ranks.run(_refuses, 4) == [True] * 4


def _survives(rank, world_size):
    model, optimizer, _ = _made(rank, topo_ar.LocalSGD, sync_every=5, delay=2)
    _train(model, optimizer, rank, range(6))
    if rank == 3:
        tell("trained")
    try:
        _train(model, optimizer, rank, range(6, 100_000))
    except (ExecutionError, RuntimeError) as error:
        tell(str(error))


def test_a_killed_rank_makes_all_others_raise(ranks) -> None:
    said = {}

    def heard(running, rank, message):
        if message == "trained":
            running.kill(3)
        else:
            said[rank] = message

    outcomes = ranks.fresh(_survives, 4, on_message=heard)
    assert [outcome.exitcode for outcome in outcomes][3] == -9
    assert sorted(said) == [0, 1, 2], outcomes
    assert re.search(r"node of ranks \[2, 3\].*rank 1 ", said[2])
    # Rank 2, whose node is at its end, may leave before the others come to see that of rank 3.
    assert all(re.search(r"rank [23] ", said[rank]) for rank in (0, 1)), said
