import pytest
import torch

from tests.simulated import run_job
from topo_ar.compression.orthogonal import cholesky_qr, orthogonalize, orthogonalize_blocks

# What the notes measured for QR and for shifted Cholesky QR; Gram-Schmidt reaches 0.88.
LIMIT = 7e-7
UNIT_ROUNDOFF = 2.0**-24


def matrix(rows, rank, condition):
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(rows, rank, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(rank, rank, dtype=torch.float64)).Q
    if condition is None:
        sizes = torch.ones(rank, dtype=torch.float64)
        sizes[(rank + 1) // 2 :] = 0
    else:
        sizes = torch.logspace(0, -torch.tensor(condition).log10().item(), rank).double()
    return (left * sizes @ right.T).T.float().contiguous()


def error(basis):
    wide = basis.double()
    return (wide @ wide.T - torch.eye(len(wide))).abs().max().item()


@pytest.mark.parametrize("condition", [10.0, 1e3, 1e5, 1e7, None])
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [64, 4096])
def test_bases_are_orthonormal_and_span_the_columns(rows, rank, condition):
    m = matrix(rows, rank, condition)
    # LAPACK sums in single precision, in an order that depends on the processor: a sum of n terms
    # is off by sqrt(n) roundoffs (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
    limits = {orthogonalize: max(LIMIT, rows**0.5 * UNIT_ROUNDOFF), cholesky_qr: LIMIT}
    for method, limit in limits.items():
        (basis,) = method([m])
        assert basis.shape == m.shape
        assert error(basis) <= limit
        # In double precision: with one thread a dot product of 4096 floats is off by as much.
        wide, exact = basis.double(), m.double()
        assert ((exact @ wide.T) @ wide - exact).norm() <= 2e-6 * exact.norm()


@pytest.mark.parametrize("condition", [10.0, 1e7, None])
@pytest.mark.parametrize("cuts", [[0, 30, 64], [0, 0, 64], [0, 2, 5, 64], [0, 64, 64, 64]])
def test_blocks_on_several_ranks_are_one_matrix(cuts, condition):
    m = matrix(64, 4, condition)

    def work(v, k, rail, node):
        blocks = [m[:, cuts[k] : cuts[k + 1]], 3 * m[:, cuts[k] : cuts[k + 1]]]
        return orthogonalize_blocks(blocks, node), cholesky_qr(blocks, node.all_reduce)

    found = run_job(1, len(cuts) - 1, work)
    for method in (0, 1):
        for place in (0, 1):
            basis = torch.cat([result[method][place] for result in found], dim=1)
            assert error(basis) <= LIMIT
            assert ((m @ basis.T) @ basis - m).norm() <= 2e-6 * m.norm()


@pytest.mark.parametrize("method", [orthogonalize, cholesky_qr])
def test_zero_and_equal_columns_stay_finite(method):
    zero, equal = method([torch.zeros(4, 64), torch.ones(4, 64)])
    assert zero.isfinite().all()
    ones = torch.ones(1, 64)
    assert torch.allclose((ones @ equal.T) @ equal, ones, atol=1e-6)
    assert method([]) == []
