"""Are the replicas still the same? Checksums of all parameters, compared every so many steps."""

import zlib
from collections.abc import Sequence

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from topo_ar.execution.agreement import STAGE, DisagreementError, name_ranks, odd_ranks
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.fingerprint import fingerprint
from topo_ar.execution.torch_private import in_backward
from topo_ar.integrations.observer import Observer

_NUM_SHOWN = 5


class ReplicaCheck(Observer):
    """Compares the parameters of all ranks bit for bit, by checksum, at the start of backward.

    A checksum takes as long as reading the parameters at 2 GB/s of one core (CRC-32 of zlib, as
    measured; those on a device are copied to the host first), and one exchange of 16 bytes a rank.
    Only where ranks differ a second exchange finds which parameters those are.

    Parameters are what DDP keeps equal. Buffers are not looked at: those of a BatchNorm differ
    until DDP broadcasts them in the next forward pass. Nor is the state of the optimizer: what
    differs in it differs in the parameters after a step. Ranks that have run out of batches within
    ``join()`` stand aside, for their parameters stay behind until the others are through.

    Parameters
    ----------
    communicator : Communicator
        Of the gradients.
    ddp : DistributedDataParallel
        The replica. Parameters that it was told to ignore are left out.
    every : int
        Steps between two checks; the first step is checked.
    """

    def __init__(
        self, communicator: Communicator, ddp: DistributedDataParallel, every: int
    ) -> None:
        self._communicator = communicator
        self._module = ddp.module
        self._ignored = frozenset(ddp.parameters_to_ignore)
        self._every = every

    def begin(self, step: int) -> None:
        """Compare the replicas if it is their turn. Collective; nothing is in flight.

        Raises
        ------
        DisagreementError
            On all ranks, if parameters differ; names the first of them, with the ranks that are
            not as most are.
        ExecutionError
            If a rank failed.
        """
        if step % self._every or self._communicator.world_size == 1:
            return
        named = [(n, p) for n, p in self._module.named_parameters() if n not in self._ignored]
        sums = torch.tensor(
            [checksum(parameter) for _, parameter in named], dtype=torch.int64, device="cpu"
        )
        digest = fingerprint(msgspec.json.encode(sums.tolist()))
        mine = torch.tensor([digest, in_backward()], dtype=torch.int64, device="cpu")
        rows = self._communicator.gather_rows(mine).wait().tolist()
        training = [rank for rank, (_, has_batch) in enumerate(rows) if has_batch]
        if len({rows[rank][0] for rank in training}) <= 1:
            return
        theirs = self._communicator.gather_rows(sums).wait()[training]
        raise _difference(step, training, [name for name, _ in named], theirs)


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's elements in order, whatever its strides.

    Parameters
    ----------
    tensor : Tensor
        Dense, any shape, dtype and device.

    Returns
    -------
    int
        Unsigned, 32 bits: one in 4e9 pairs of different tensors is taken for equal.
    """
    host = tensor.detach().cpu().contiguous()
    # Also where a dimension of size one has a stride that is no use to `view`.
    flat = host.as_strided((host.numel(),), (1,))
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def _difference(
    step: int, ranks: Sequence[int], names: Sequence[str], sums: torch.Tensor
) -> DisagreementError:
    found = {}
    for name, column in zip(names, sums.T.tolist(), strict=True):
        if len(set(column)) > 1:
            found[name] = tuple(ranks[place] for place in odd_ranks(column))
    shown = [f"{name} ({name_ranks(odd)})" for name, odd in list(found.items())[:_NUM_SHOWN]]
    more = len(found) - len(shown)
    return DisagreementError(
        f"step {step}: the replicas differ, in {len(found)} of {len(names)} parameters: "
        + ", ".join(shown)
        + (f" and {more} more" if more else "")
        + "; load one state on all ranks, and change parameters in the same way on all of them",
        ranks=tuple(sorted({rank for odd in found.values() for rank in odd})),
        stage=STAGE,
    )
