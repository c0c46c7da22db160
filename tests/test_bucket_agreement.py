"""New buckets are compared once, before they are reduced; what differs is shown on all ranks."""

import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks
from topo_ar.execution.transports.segment import HOST_ID_ENV

HOSTS = blocks(2, 2)


class _Layers(nn.Module):
    """Equal layers, registered in an order that may differ between ranks."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(40, 40, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.c(self.d(x))))


def _trained(
    rank: int, module: nn.Module, num_steps: int, plan: str, **options: object
) -> tuple[list[int], str, tuple[int, ...]]:
    """Comparisons in each step, and the error with its ranks."""
    os.environ[HOST_ID_ENV] = str(HOSTS[rank])
    model = DistributedDataParallel(module, **options)
    with topo_ar.attach(model, plan=plan, timeout_s=20.0) as handle:
        calls, counts = [], []
        real = handle.communicator.require_equal
        handle.communicator.require_equal = lambda facts: calls.append(facts) or real(facts)
        for _ in range(num_steps):
            loss = model(torch.ones(1, 40)).sum()
            try:
                loss.backward()
            except RuntimeError as failure:
                return counts, str(failure), handle.error.ranks
            counts.append(len(calls))
            calls.clear()
    return counts, "", ()


def _counted(rank: int, world_size: int, options: dict[str, object]) -> list[int]:
    counts, error, _ = _trained(rank, _Layers(list("abcd")), 6, "hierarchical", **options)
    assert error == ""
    return counts


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"bucket_cap_mb": 0.0125}, [1, 2, 0, 0, 0, 0]),
        ({"bucket_cap_mb": 0.0125, "static_graph": True}, [1, 0, 2, 0, 0, 0]),
        ({"bucket_cap_mb": 0.0125, "find_unused_parameters": True}, [2, 0, 0, 0, 0, 0]),
        ({}, [1, 0, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_buckets_are_compared_when_they_are_new_and_never_again(ranks, options, counts) -> None:
    """One bucket in the first step, or two; rebuilt at the second, of a static graph at the third.

    Without a cap the rebuilt bucket is the first one.
    """
    assert ranks.run(_counted, 4, options) == [counts] * 4


def _swapped(rank: int, world_size: int, plan: str) -> tuple[str, tuple[int, ...]]:
    order = ["c", "b", "a", "d"] if rank == 3 else ["a", "b", "c", "d"]
    return _trained(rank, _Layers(order), 1, plan)[1:]


@pytest.mark.parametrize("plan", ["hierarchical", "flat"])
def test_equal_parameters_in_another_order_are_not_averaged_with_each_other(ranks, plan) -> None:
    """DDP takes them for equal, for their shapes are: gradients would go to other layers."""
    for text, culprits in ranks.run(_swapped, 4, plan):
        assert culprits == (3,)
        assert "rank 3 differ" in text
        head, usual, odd = text.splitlines()[-3:]
        assert head.strip() == "parameters of bucket 0"
        assert usual.split() == ["ranks", "0-2", "a.weight,", "b.weight,", "c.weight,", "d.weight"]
        assert odd.split(";")[0].split()[2:] == ["c.weight,", "b.weight,", "a.weight,", "d.weight"]


def _other_caps(rank: int, world_size: int) -> tuple[str, tuple[int, ...]]:
    cap = 25.0 if rank == 1 else 0.0125
    return _trained(
        rank,
        _Layers(list("abcd")),
        1,
        "hierarchical",
        bucket_cap_mb=cap,
        find_unused_parameters=True,
    )[1:]


def test_other_buckets_on_a_rank_are_shown_with_what_differs(ranks) -> None:
    for text, culprits in ranks.run(_other_caps, 4):
        assert culprits == (1,)
        head, usual, odd = text.splitlines()[-3:]
        for name in ("elements", "parameters", "plan", "last"):
            assert f"{name} of bucket 0" in head
        assert {"1600", "False"} <= set(usual.split())
        assert {"6400", "True"} <= set(odd.replace(";", " ").split())
        assert "dtype" not in text


def test_the_names_of_a_large_bucket_are_told_apart_by_a_fingerprint(ranks) -> None:
    for text, culprits in ranks.run(_many, 2):
        assert culprits == (0, 1)
        assert "300, layer0.weight to layer299.weight (" in text


def _many(rank: int, world_size: int) -> tuple[str, tuple[int, ...]]:
    os.environ[HOST_ID_ENV] = str(rank)
    places = [f"layer{number}" for number in range(300)]
    if rank:
        places[5], places[6] = places[6], places[5]
    module = nn.ModuleDict({place: nn.Linear(2, 2, bias=False) for place in places})
    module.forward = lambda x: sum(layer(x) for layer in module.values())
    model = DistributedDataParallel(module)
    with topo_ar.attach(model, plan="hierarchical", timeout_s=20.0) as handle:
        with pytest.raises(RuntimeError, match="parameters of bucket 0"):
            model(torch.ones(1, 2)).sum().backward()
        return str(handle.error), handle.error.ranks
