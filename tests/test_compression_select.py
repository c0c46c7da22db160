"""The selected entries are the first k of a stable sort by falling magnitude."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_ar.compression.select import _on_device, top_k_indices


def by_sorting(x, k):
    return np.sort(np.argsort(-np.abs(x.astype(np.float64)), kind="stable")[:k])


def draw(kind, numel, seed):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(numel).astype(np.float32)
    match kind:
        case "zeros":
            x[:] = 0
            x[::2] = -0.0
        case "ties":
            x = np.round(x)
        case "few":
            x[generator.random(numel) < 0.99] = 0
        case "subnormal":
            x = (x * np.float32(1e-41)).astype(np.float32)
        case "sorted":
            x = np.sort(x)
        case "periodic":
            x[np.arange(numel) % 61 != 0] = 1e-3  # the sample sees only large ones
        case "hidden":
            x[::61] = 0  # the sample sees only zeros
    return x


@settings(max_examples=150)
@given(
    kind=st.sampled_from(
        ["normal", "zeros", "ties", "few", "subnormal", "sorted", "periodic", "hidden"]
    ),
    numel=st.integers(1, 5000),
    share=st.one_of(st.floats(0, 1), st.floats(0, 0.02)),
    seed=st.integers(0, 1000),
)
def test_the_set_of_a_stable_sort(kind, numel, share, seed):
    x = draw(kind, numel, seed)
    k = round(share * numel)
    expected = by_sorting(x, k)
    assert np.array_equal(top_k_indices(torch.from_numpy(x), k).numpy(), expected)
    if 0 < k < numel:
        assert np.array_equal(_on_device(torch.from_numpy(x), k).numpy(), expected)


@pytest.mark.parametrize("kind", ["normal", "ties", "few", "periodic", "hidden"])
@pytest.mark.parametrize("k", [1, 999, 10_000])
def test_large(kind, k):
    x = draw(kind, 1_000_003, 3)
    assert np.array_equal(top_k_indices(torch.from_numpy(x), k).numpy(), by_sorting(x, k))


def test_the_multiset_of_torch():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    mine = x[top_k_indices(x, 2000)].abs().sort().values
    assert torch.equal(mine, torch.topk(x.abs(), 2000).values.sort().values)
