"""What a check is given, on each of its ranks, and how it says that it cannot be made here."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from topo_ar.execution.communicator import Communicator

Figures = dict[str, float | str]
"""What a check found, by name; for people and for the record."""


class _Rehearsed(Communicator):
    """Copies tensors on CPU to other memory and back, as it does with those of a device."""

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM,
        on_done: Callable[[], None] | None = None,
        *,
        plain: bool = False,
        name: str = "",
    ) -> "torch.futures.Future[torch.Tensor]":
        if tensor.numel() == 0 or self.world_size == 1:
            return super().all_reduce(tensor, op, on_done, plain=plain, name=name)
        return self._device_calls.reduce_on_host(tensor, op, on_done, plain=plain)


class LeftOutError(Exception):
    """The check makes no sense on this machine; the message says why."""


@dataclass(frozen=True)
class Context:
    """One rank of a check.

    Attributes
    ----------
    device : torch.device
        Where its tensors live.
    quick : bool
        Fewer and smaller of everything, for a rehearsal.
    timeout_s : float
        Deadline of a collective.
    """

    device: torch.device
    rank: int
    world_size: int
    quick: bool
    timeout_s: float

    @property
    def on_cuda(self) -> bool:
        """Whether this is the real thing."""
        return self.device.type == "cuda"

    def communicator(self, plan: str = "hierarchical", *, exact: bool = False) -> Communicator:
        """Return a communicator over all ranks; `exact` fixes its order of summation."""
        kind = Communicator if self.on_cuda else _Rehearsed
        return kind(plan=plan, timeout_s=self.timeout_s, reproducible=exact)

    def same_everywhere(self, made: Communicator, tensor: torch.Tensor) -> bool:
        """Tell whether all ranks have the same bits in `tensor`. Collective."""
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return len(set(made.gather(hashlib.sha256(data.tobytes()).digest()))) == 1

    def spin(self, seconds: float) -> None:
        """Keep the current stream busy; on CPU the calling thread."""
        if self.on_cuda:
            torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]
        else:
            time.sleep(seconds)

    def stream(self) -> "torch.cuda.Stream | None":
        """Return a new stream of the device; None on CPU."""
        return torch.cuda.Stream(self.device) if self.on_cuda else None  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Wait for everything that the device has to do."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], samples: int) -> list[float]:
        """Return how long `run` takes, once for each sample, after two runs that do not count."""
        times = []
        for sample in range(-2, samples):
            self.finish()
            begin = time.perf_counter()
            run()
            self.finish()
            if sample >= 0:
                times.append(time.perf_counter() - begin)
        return times

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        """Raise wherever the host would wait for the device; on CPU there is nothing to see."""
        if not self.on_cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
    """Make `stream` the current one, if it is one."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def require(holds: bool, what: str) -> None:
    """Fail the check unless something holds.

    Raises
    ------
    AssertionError
        If it does not; with `what` was expected.
    """
    if not holds:
        raise AssertionError(what)
