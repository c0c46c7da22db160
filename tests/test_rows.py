import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated import run_job
from topo_ar.compression.rows import reduce_rows
from topo_ar.errors import ConfigError


def coo(rows, num_rows, width, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (len(rows), *width), generator=random).to(dtype)
    return sparse(torch.tensor([rows], dtype=torch.int64), values, (num_rows, *width))


def sparse(rows, values, shape):
    return torch.sparse_coo_tensor(rows, values, shape, check_invariants=True)


def exchange(tensors, num_nodes, num_local):
    def work(v, k, rail, node):
        found = reduce_rows(tensors[v * num_local + k], rail, node)
        assert found.sent_nbytes == rail.sent_nbytes
        return found

    found = run_job(num_nodes, num_local, work)
    right = sum(t.to_dense() for t in tensors)
    for result in found:
        assert result.total.layout == found[0].total.layout
        assert torch.equal(result.total.to_dense(), found[0].total.to_dense())
        assert torch.equal(result.total.to_dense(), right)
        if result.total.is_sparse:
            assert result.total.is_coalesced()
    return found


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([(), (1,), (3,), (2, 2)]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.data(),
)
def test_sums_are_exact_on_all_ranks(num_nodes, num_local, num_rows, width, dtype, data):
    # Small whole numbers: every order of additions gives the same.
    rows = st.lists(st.integers(0, num_rows - 1), max_size=10)
    tensors = [
        coo(data.draw(rows), num_rows, width, dtype, seed) for seed in range(num_nodes * num_local)
    ]
    exchange(tensors, num_nodes, num_local)


@pytest.mark.parametrize("second", [[0, 0, 0], [1, 2, 1]])
def test_a_rank_that_saw_only_padding(second):
    # pytorch/pytorch#87497; column 0 of the mean over two ranks.
    def gradient(batch):
        embedding = torch.nn.Embedding(10, 4, padding_idx=0, sparse=True)
        embedding(torch.tensor([batch])).sum().backward()
        return embedding.weight.grad

    found = exchange([gradient([1, 2, 1]), gradient(second)], 2, 1)
    twice = second != [0, 0, 0]
    right = [0, 2.0 if twice else 1.0, 1.0 if twice else 0.5, 0, 0, 0, 0, 0, 0, 0]
    assert (found[0].total.to_dense()[:, 0] / 2).tolist() == right
    nothing = exchange([gradient([0, 0, 0]), gradient([0, 0, 0])], 2, 1)
    assert not nothing[0].total.to_dense().any()
    assert nothing[0].sent_nbytes == 8


def test_fewer_rows_than_ranks():
    exchange([coo([0], 1, (3,), seed=seed) for seed in range(6)], 2, 3)


def test_float_sums_have_the_same_bits_everywhere():
    random = torch.Generator().manual_seed(0)
    tensors = []
    for _ in range(6):
        rows = torch.randint(0, 300, (1, 200), generator=random)
        values = torch.randn(200, 5, generator=random)
        tensors.append(sparse(rows, values, (1000, 5)))
    found = run_job(3, 2, lambda v, k, rail, node: reduce_rows(tensors[2 * v + k], rail, node))
    right = sum(t.double().to_dense() for t in tensors)
    for result in found:
        assert torch.equal(result.total.to_dense(), found[0].total.to_dense())
        assert torch.allclose(result.total.to_dense().double(), right, atol=1e-5)


# --- what is sent, with 1000 rows of 16 fp32 (w = 64), i = 4, and 8 bytes for each count ---


def sent(lists, num_local=1):
    tensors = [coo(rows, 1000, (16,), seed=seed) for seed, rows in enumerate(lists)]
    return [r.sent_nbytes for r in exchange(tensors, len(lists) // num_local, num_local)]


def test_few_rows_travel_with_their_indices():
    assert sent([[1, 2, 3], [4], [3, 3, 3, 9]]) == [2 * (8 + c * 68) for c in (3, 1, 2)]


def test_rows_that_all_nodes_have_are_all_reduced_by_their_union():
    rows = list(range(0, 300, 3))
    assert sent([rows] * 4) == [3 * 8 + 3 * 100 * 4 + 2 * 3 * 6400 // 4] * 4


def test_dense_where_that_is_less():
    rows = list(range(1000))
    assert sent([rows, rows]) == [8 + 64000] * 2
    assert not exchange([coo(rows, 1000, (16,))] * 2, 2, 1)[0].total.is_sparse


def test_duplicates_and_local_ranks_cost_the_wire_nothing():
    # Each node has rows 0..9 on both of its ranks, many times: 5 on each rail.
    lists = [[*range(10)] * 7] * 4
    assert sent(lists, num_local=2) == [8 + 5 * 68] * 4


@settings(max_examples=40)
@given(st.integers(2, 4), st.floats(0, 1), st.integers(0, 99))
def test_never_much_more_than_dense_or_than_a_plain_gather(num_nodes, density, seed):
    random = torch.Generator().manual_seed(seed)
    lists = [
        (torch.rand(200, generator=random) < density).nonzero()[:, 0].tolist()
        for _ in range(num_nodes)
    ]
    tensors = [coo(rows, 200, (16,)) for rows in lists]
    total = sum(r.sent_nbytes for r in exchange(tensors, num_nodes, 1))
    n, counts = num_nodes, (num_nodes - 1) * num_nodes * 8
    gather = (n - 1) * sum(map(len, lists)) * 68
    dense = 2 * (n - 1) * 200 * 64
    union = len(set().union(*lists))
    through_union = math.ceil(2 * (n - 1) * union * 64 + gather * 4 / 68)
    assert total - counts <= gather + n
    assert total - counts <= dense * (1 + 4 * n / (2 * 64)) + n
    assert total - counts <= max(through_union, dense) + n


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 4), torch.zeros(4, 4).to_sparse(), torch.zeros(4)]
)
def test_other_tensors_are_refused(tensor):
    def work(v, k, rail, node):
        with pytest.raises(ConfigError, match="one sparse dimension"):
            reduce_rows(tensor, rail, node)

    run_job(1, 1, work)
