"""CUDA tensors that are reduced in host memory, where the process group has no NCCL.

The tensor is copied to pinned memory, reduced there as any tensor on CPU, and copied back, each on
a side stream: neither the caller nor the GPU's other work waits for it.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from topo_ar.execution.entrance import Ready
from topo_ar.execution.ticket import Ticket


class HostCopies:
    """Copies of one device's tensors.

    Parameters
    ----------
    device : torch.device
        A CUDA device, or ``cpu``, whose tensors are then copied at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out: torch.cuda.Stream | None = None
        self._back: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Two, so that no result waits behind a tensor that is still being computed.
            self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for a contiguous `tensor`: pinned, where it is for a GPU."""
        pinned = self._out is not None
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)

    def fetch(self, tensor: torch.Tensor, host: torch.Tensor) -> Ready | None:
        """Copy `tensor` to `host` after what the current stream has to do; None if it is there."""
        if self._out is None:
            host.copy_(tensor.detach())
            return None
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(tensor.detach(), non_blocking=True)
            ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ready.record(self._out)
        # The caller may drop the tensor; its memory must not be given to others yet.
        tensor.record_stream(self._out)
        return ready

    def bring_back(self, ticket: Ticket, reduced: "torch.futures.Future[torch.Tensor]") -> None:
        """Copy what was reduced to the tensor of `ticket` and complete it, or fail it.

        Its future carries the event of the copy to whoever waits for it.
        """
        try:
            host = reduced.value()
            with _on(self._back):
                ticket.tensor.detach().copy_(host, non_blocking=True)
                if self._back is not None:
                    ticket.tensor.record_stream(self._back)
                ticket.complete()
        except BaseException as error:
            ticket.fail(error)
            if not isinstance(error, Exception):
                raise


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
