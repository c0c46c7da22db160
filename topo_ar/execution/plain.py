"""The plain path: a whole all-reduce by gloo, made to mean what it means on the fast path.

Gloo compares with ``<``, so that a NaN survives in some places of a MIN or MAX and not in others;
it divides a sum, which in 16 bits may have overflowed; it counts bools in a byte.
"""

import torch
import torch.distributed as dist

from topo_ar.execution.gather import Channel

_OF_BOOLS = {dist.ReduceOp.SUM: dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN}


def reduce_plainly(channel: Channel, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
    """Reduce `tensor` in place over all ranks of `channel`.

    Raises
    ------
    RuntimeError
        If a rank is gone or late.
    """
    # Values that inference mode makes inside a sparse tensor could not be coalesced later.
    with torch.no_grad() if tensor.is_sparse else torch.inference_mode():
        if op == dist.ReduceOp.AVG and (tensor.is_sparse or tensor.itemsize == 2):
            tensor.div_(channel.world_size)
            op = dist.ReduceOp.SUM
        elif tensor.dtype is torch.bool:
            op = _OF_BOOLS.get(op, op)
        elif op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX) and tensor.is_floating_point():
            _reduce_order(channel, tensor, op)
            return
        channel.all_reduce(tensor, op)


def _reduce_order(channel: Channel, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
    """Take MIN or MAX of floats by integers of the same order, beyond which a NaN lies."""
    wide = tensor.float() if tensor.itemsize == 2 else tensor
    bits = torch.int64 if wide.itemsize == 8 else torch.int32
    limits = torch.iinfo(bits)
    keys = _flipped(wide.view(bits))
    keys[wide.isnan()] = limits.max if op == dist.ReduceOp.MAX else limits.min
    channel.all_reduce(keys, op)
    tensor.copy_(_flipped(keys).view(wide.dtype))


def _flipped(words: torch.Tensor) -> torch.Tensor:
    """Turn sign and magnitude into two's complement or back; either extreme turns into a NaN."""
    limits = torch.iinfo(words.dtype)
    return words ^ ((words >> (limits.bits - 1)) & limits.max)
