"""Which tensors and operations can be all-reduced: refused before anything is sent, or never."""

import torch
import torch.distributed as dist

_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_OF_BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Tell in a few steps whether `tensor` is a contiguous run of memory of the CPU."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def takes(tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> bool:
    """Tell whether there is a plan for tensors of this dtype, device and layout, and this `op`.

    Equal on all ranks; false as well while a CUDA graph is captured.
    """
    dtype = tensor.dtype
    if tensor.layout is not torch.strided or dtype not in _DTYPES or op in _OF_BITS:
        return False
    if tensor.device.type not in ("cpu", "cuda") or op == dist.ReduceOp.PREMUL_SUM:
        return False
    if op == dist.ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        return False
    if dtype.is_complex and op not in _SUMS:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check(
    tensor: torch.Tensor, asked: "dist.ReduceOp.RedOpType", *, through_nccl: bool = False
) -> "dist.ReduceOp.RedOpType":
    """Refuse what would fail on the way and so end the communicator for all ranks.

    Returns
    -------
    RedOpType
        The operation that is `asked` for, also where it came inside a `ReduceOp`.

    Raises
    ------
    ValueError
        If `tensor` cannot be reduced so; names the remedy.
    """
    op: dist.ReduceOp.RedOpType = getattr(asked, "op", asked)
    layout, dtype = tensor.layout, tensor.dtype
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"all_reduce takes tensors on CPU and CUDA, not on {tensor.device}")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "all_reduce cannot be captured in a CUDA graph: ranks agree on what they do each time; "
            "call it between graphs, outside of torch.cuda.graph"
        )
    if layout is torch.strided:
        if not tensor.is_contiguous():
            raise ValueError(
                f"all_reduce needs a contiguous tensor, not strides {tensor.stride()} for shape "
                f"{tuple(tensor.shape)}; pass tensor.contiguous()"
            )
    elif layout is not torch.sparse_coo or tensor.device.type != "cpu":
        raise ValueError(
            f"all_reduce does not take {layout} on {tensor.device.type}; pass a strided tensor, or "
            "a COO tensor on CPU"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "all_reduce needs plain memory, not a lazily conjugated or negated view; pass "
            "tensor.resolve_conj() or tensor.resolve_neg()"
        )
    if op == dist.ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"AVG of {dtype} is not defined; use SUM and divide")
    if tensor.is_cuda and through_nccl:
        if dtype.is_complex and op not in _SUMS:
            raise _sums_only(str(dtype), op)
        return op
    if dtype not in _DTYPES:
        raise ValueError(f"all_reduce does not take {dtype} on CPU; convert the tensor")
    if op not in _SUMS:
        _check_other_op(tensor, op)
    return op


def _check_other_op(tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
    dtype = tensor.dtype
    if tensor.is_sparse or dtype.is_complex:
        kind = "sparse tensors" if tensor.is_sparse else str(dtype)
        raise _sums_only(kind, op)
    if op in _OF_BITS and dtype.is_floating_point:
        raise ValueError(f"{op} of {dtype} is not defined; it takes integers and bool")
    if op == dist.ReduceOp.PREMUL_SUM:
        raise ValueError("all_reduce does not take PREMUL_SUM on CPU; scale the tensor and use SUM")


def _sums_only(kind: str, op: "dist.ReduceOp.RedOpType") -> ValueError:
    return ValueError(f"all_reduce of {kind} knows sums only, not {op}")
