"""Parameters, optimizer states and any objects from one rank to all, or from all."""

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from topo_ar.integrations.horovod.job import ProcessSet, global_process_set
from topo_ar.integrations.horovod.operations import (
    allgather,
    allgather_async,
    broadcast_,
    broadcast_async_,
    synchronize,
)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Write the parameters of rank `root_rank` into those of all ranks.

    Parameters
    ----------
    params : mapping or list
        ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
    root_rank : int
        The rank that has them right.

    Raises
    ------
    ValueError
        If there is something else than tensors in it.
    """
    pairs = (
        list(params.items())
        if isinstance(params, Mapping)
        else [each if isinstance(each, tuple) else (None, each) for each in params]
    )
    for name, tensor in pairs:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{name or 'params'} is a {type(tensor).__name__}, not a tensor; "
                "hvd.broadcast_object takes any object"
            )
    handles = [
        broadcast_async_(
            tensor, root_rank, None if name is None else f"parameters.{name}", process_set
        )
        for name, tensor in pairs
        if tensor is not None
    ]
    synchronize(handles)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank`, which is pickled."""
    at_root = process_set.ranks[process_set.rank()] == root_rank
    data = _pickled(obj) if at_root else torch.empty(0, dtype=torch.uint8)
    size = broadcast_(torch.tensor([len(data)]), root_rank, name and f"{name}.size", process_set)
    if not at_root:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.data", process_set)
    return obj if at_root else _unpickled(data)


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in rank order; they are pickled."""
    data = _pickled(obj)
    sizes = allgather_async(torch.tensor([len(data)]), name and f"{name}.size", process_set)
    whole = allgather(data, name and f"{name}.data", process_set)
    return [_unpickled(part) for part in torch.split(whole, synchronize(sizes).tolist())]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Write the state of rank `root_rank`'s optimizer, and its options, into those of all ranks.

    Parameters
    ----------
    optimizer : Optimizer
        Also one of `DistributedOptimizer`; others than the root's may have no state yet.
    root_rank : int
        The rank that has it right.
    model : Module, optional
        Not needed here.

    Raises
    ------
    ValueError
        For LBFGS, whose state is no state of parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state does not take LBFGS")
    at_root = process_set.ranks[process_set.rank()] == root_rank
    tensors: list[torch.Tensor] = []

    def take_out(value: Any) -> Any:
        """Put a mark in the place of every tensor, in a fixed order."""
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _Mark(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
        return _mapped(value, take_out)

    skeleton = broadcast_object(
        take_out(optimizer.state_dict()) if at_root else None, root_rank, None, process_set
    )
    if not at_root:
        tensors.clear()

        def put_in(value: Any) -> Any:
            if isinstance(value, _Mark):
                tensor = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                tensors.append(tensor)
                return tensor
            return _mapped(value, put_in)

        skeleton = put_in(skeleton)
    synchronize([broadcast_async_(each, root_rank, None, process_set) for each in tensors])
    if not at_root:
        optimizer.load_state_dict(skeleton)


class _Mark:
    """Stands for a tensor."""

    def __init__(
        self, number: int, shape: tuple[int, ...], dtype: torch.dtype, device: str
    ) -> None:
        self.number, self.shape, self.dtype, self.device = number, shape, dtype, device


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(each) for each in value)
    return value


def _pickled(obj: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    pickle.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
