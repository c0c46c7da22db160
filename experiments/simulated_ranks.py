"""A job of nodes and local ranks in one process: ranks are threads, groups hand tensors over."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import torch

_DEADLINE_S = 30
T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size


class RankGroup:
    """One rank's view of a group; a `topo_ar.compression.protocol.Group`."""

    def __init__(self, index: int, meeting: _Meeting) -> None:
        self.index = index
        self.size = len(meeting.slots)
        self._meeting = meeting

    def _exchange(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        self._meeting.slots[self.index] = value
        self._meeting.barrier.wait(_DEADLINE_S)
        found = list(self._meeting.slots)
        self._meeting.barrier.wait(_DEADLINE_S)
        return found

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum in order of positions, added up in at least fp32."""
        found = self._exchange(tensor.clone())
        wide = torch.promote_types(tensor.dtype, torch.float32)
        total: torch.Tensor = found[0].to(wide, copy=True)
        for other in found[1:]:
            total += other.to(wide)
        return total.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's tensor."""
        return self._exchange(tensor.clone())

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what each member had for this one."""
        found = self._exchange([part.clone() for part in parts])
        return [theirs[self.index] for theirs in found]


class SimulatedJob:
    """Threads for all ranks, each with a `group` of its rail and its node; close it after use."""

    def __init__(self, num_nodes: int, num_local: int, group: type[RankGroup] = RankGroup) -> None:
        rails = [_Meeting(num_nodes) for _ in range(num_local)]
        nodes = [_Meeting(num_local) for _ in range(num_nodes)]
        self._meetings = (*rails, *nodes)
        self._ranks = [
            (v, k, group(v, rails[k]), group(k, nodes[v]))
            for v in range(num_nodes)
            for k in range(num_local)
        ]
        self._pool = ThreadPoolExecutor(len(self._ranks))

    def run(self, work: Callable[[int, int, RankGroup, RankGroup], T]) -> list[T]:
        """Run ``work(node, local, rail, node_group)`` on every rank; return results by rank."""

        def rank(v: int, k: int, rail: RankGroup, node: RankGroup) -> T:
            try:
                return work(v, k, rail, node)
            except BaseException:
                for meeting in self._meetings:
                    meeting.barrier.abort()
                raise

        futures = [self._pool.submit(rank, *place) for place in self._ranks]
        errors = [error for future in futures if (error := future.exception())]
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in real or errors:
            raise error
        return [future.result() for future in futures]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
