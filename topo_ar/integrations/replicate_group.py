"""The group that FSDP all-reduces over, in place of its own: whoever attached does the work."""

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist

from topo_ar.errors import ExecutionError
from topo_ar.execution.torch_private import uncompiled
from topo_ar.torch_backend import NAME


class Reducer(Protocol):
    """Who does the work."""

    def reduce(self, number: int, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
        """Reduce the gradients of parameter group `number` in place; on CUDA enqueue that."""
        ...


class ReplicateGroup(dist.ProcessGroup):
    """Hands the all-reduces of one of FSDP's parameter groups to a reducer; it does nothing else.

    FSDP decides what comes here, when and with which operation: accumulation, the dtype of the
    reduction and factors are its own.

    Parameters
    ----------
    group : ProcessGroup
        Whose place it takes.
    reducer : Reducer
        Not kept alive: torch's registry keeps groups longer than models live.
    number : int
        Of the parameter group.
    """

    def __init__(self, group: "dist.ProcessGroup", reducer: Reducer, number: int) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.replaced = group
        self._reducer = ref(reducer)
        self._number = number

    @property
    def reducer(self) -> Any:
        """Who does the work; None if nobody is left to."""
        return self._reducer()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return ``topo``."""
        return NAME

    @uncompiled
    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> None:
        """Reduce a tensor in place. There is nothing to wait for afterwards."""
        (tensor,) = tensors
        reducer = self._reducer()
        if reducer is None:
            raise ExecutionError("the model that this group was attached to is gone")
        reducer.reduce(self._number, tensor, opts.reduceOp.op)
