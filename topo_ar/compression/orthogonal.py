"""Orthonormal columns, also of a matrix whose rows lie on several ranks.

Gram-Schmidt loses orthogonality with the condition of the matrix, and all of it when the rank is
deficient. Here a zero or rank-deficient matrix is as good as any other: on CPU Householder QR; on
CUDA, where QR of tall matrices is slow and waits for the host, shifted Cholesky QR, three times.

References
----------
J. Demmel, L. Grigori, M. Hoemmen, J. Langou, "Communication-optimal parallel and sequential QR and
LU factorizations", SIAM J. Sci. Comput. 34 (2012).
T. Fukaya, R. Kannan, Y. Nakatsukasa, Y. Yamamoto, Y. Yanagisawa, "Shifted Cholesky QR for computing
the QR factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42 (2020).
"""

from collections.abc import Callable, Sequence

import torch

from topo_ar.compression.protocol import Group

_PASSES = 3


def orthogonalize(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each matrix an orthonormal basis that spans its columns.

    Parameters
    ----------
    matrices : sequence of Tensor
        Transposed: r x a with r <= a, of one dtype and device. Not changed.

    Returns
    -------
    list of Tensor
        r x a each; the rows are orthonormal. A zero row stays finite.
    """
    if matrices and matrices[0].is_cuda:
        return cholesky_qr(matrices)
    return [torch.linalg.qr(matrix.T).Q.T.contiguous() for matrix in matrices]


def orthogonalize_blocks(blocks: Sequence[torch.Tensor], node: Group) -> list[torch.Tensor]:
    """Return this rank's blocks of the bases of matrices whose rows are spread over `node`.

    All members call it together, with the same number of blocks. On CPU one all-gather of an r x r
    triangle for each matrix does it (TSQR), on CUDA three all-reduces of the Gram matrices.

    Parameters
    ----------
    blocks : sequence of Tensor
        Transposed: r x a_l, where a_l is the number of rows here; it may be 0.
    node : Group
        The ranks over which the rows are spread.

    Returns
    -------
    list of Tensor
        r x a_l each.
    """
    if blocks and blocks[0].is_cuda:
        return cholesky_qr(blocks, node.all_reduce)
    return _tall_skinny_qr(blocks, node)


def cholesky_qr(
    blocks: Sequence[torch.Tensor],
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda gram: gram,
) -> list[torch.Tensor]:
    """Return bases by shifted Cholesky QR; nothing in it waits for the host.

    The Gram matrices are fp64, so that single precision loses nothing by squaring the condition.

    Parameters
    ----------
    blocks : sequence of Tensor
        Transposed: r x a_l; all r are equal.
    add_up : callable
        Sums the Gram matrices (k x r x r) over the ranks that hold the other rows.
    """
    if not blocks:
        return []
    wide = [block.double() for block in blocks]
    eye = torch.eye(len(wide[0]), dtype=torch.float64, device=wide[0].device)
    for _ in range(_PASSES):
        gram = add_up(torch.stack([block @ block.T for block in wide]))
        trace = gram.diagonal(dim1=1, dim2=2).sum(1)
        # Above the rounding of the Gram matrix, and above zero for a matrix of zeros.
        shift = 4 * len(eye) * torch.finfo(torch.float64).eps * trace + 1e-280
        factor = torch.linalg.cholesky_ex(gram + shift[:, None, None] * eye).L
        wide = [
            torch.linalg.solve_triangular(lower, block, upper=False)
            for lower, block in zip(factor, wide, strict=True)
        ]
    return [basis.to(block.dtype) for basis, block in zip(wide, blocks, strict=True)]


def _tall_skinny_qr(blocks: Sequence[torch.Tensor], node: Group) -> list[torch.Tensor]:
    local = [torch.linalg.qr(block.T) for block in blocks]
    triangles = torch.stack([_square(triangle) for _, triangle in local])
    # k x (L r) x r: what each member made of its rows, one below the other.
    stacked = torch.cat(node.all_gather(triangles), dim=1)
    rank = triangles.shape[-1]
    joint = torch.linalg.qr(stacked).Q[:, node.index * rank : (node.index + 1) * rank]
    return [
        (basis @ turn[: basis.shape[1]]).T.contiguous()
        for (basis, _), turn in zip(local, joint, strict=True)
    ]


def _square(triangle: torch.Tensor) -> torch.Tensor:
    missing = triangle.shape[1] - triangle.shape[0]
    return torch.nn.functional.pad(triangle, (0, 0, 0, missing))
