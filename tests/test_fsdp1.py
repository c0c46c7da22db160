"""FullyShardedDataParallel: `attach` refuses it by name, and what it says instead works."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import topo_ar
from tests.compressed_training import on_hosts
from topo_ar.errors import ConfigError

SHARDS, REPLICAS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def _mine(rank, groups, **options):
    made = [dist.new_group(group, **options) for group in groups]
    return next(group for group in made if dist.get_rank(group) >= 0)


def _gradients(rank, strategy, groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model = FullyShardedDataParallel(
        model,
        process_group=groups,
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    for _ in range(2):
        model(torch.full((2, 8), 0.1 * (rank + 1)).double()).square().mean().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
    return found, model


def _trains(rank, world_size):
    warnings.simplefilter("ignore")
    on_hosts(rank, [0, 0, 1, 1])
    whole = dist.new_group(backend="topo")
    hybrid = (_mine(rank, SHARDS), _mine(rank, REPLICAS, backend="topo"))
    plain = (_mine(rank, SHARDS), _mine(rank, REPLICAS))
    found = []
    for strategy, theirs, ours, topo in (
        (ShardingStrategy.NO_SHARD, None, whole, whole),
        (ShardingStrategy.HYBRID_SHARD, plain, hybrid, hybrid[1]),
    ):
        expected, _ = _gradients(rank, strategy, theirs)
        gradients, model = _gradients(rank, strategy, ours)
        with pytest.raises(ConfigError) as caught:
            topo_ar.attach(model)
        planned = topo.communicator is not None
        found.append((float((gradients - expected).abs().max()), planned, str(caught.value)))
    dist.destroy_process_group(whole)
    dist.destroy_process_group(hybrid[1])
    return found


def test_its_all_reduces_are_planned_by_way_of_the_backend(ranks) -> None:
    for no_shard, hybrid in ranks.run(_trains, 4, deadline_s=40.0):
        for (distance, planned, said), how in (
            (no_shard, 'NO_SHARD, .*process_group=dist.new_group(backend="topo")'),
            (hybrid, "HYBRID_SHARD, .*process_group=(SHARDS, REPLICAS)"),
        ):
            assert distance <= 1e-15
            assert planned
            before, after = how.split(".*")
            assert before in said
            assert after in said
