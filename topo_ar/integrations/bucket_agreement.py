"""Buckets that are new have to be the same on all ranks before they are reduced."""

import torch

from topo_ar.execution.communicator import Communicator
from topo_ar.execution.fingerprint import fingerprint
from topo_ar.integrations.bucket import Bucket
from topo_ar.integrations.observer import Observer

# Names beyond this length are told apart by a fingerprint: DDP's first bucket may have all.
_LONGEST_NAMES = 4096


class BucketAgreement(Observer):
    """Compares every bucket that was not there before, once, with those of all ranks.

    That is in the first step and in those for which DDP has rebuilt its buckets. The engine itself
    refuses buckets of different sizes, dtypes and plans in every step, but not those in which
    parameters of equal size have changed places, and it cannot tell which they are.

    Parameters
    ----------
    communicator : Communicator
        Of the gradients.
    names : dict
        Parameter names by ``id`` of the parameter.
    """

    def __init__(self, communicator: Communicator, names: dict[int, str]) -> None:
        self._communicator = communicator
        self._names = names
        self._agreed: set[tuple[object, ...]] = set()

    def called(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Have a new bucket compared before its reduction, which fails where ranks differ.

        Raises
        ------
        ExecutionError
            If ranks differ, for a bucket that NCCL would reduce; else the communicator fails.
        """
        parameters = bucket.parameters()
        key = (
            *(bucket.index(), bucket.is_last(), tensor.numel()),
            *(tensor.dtype, tensor.layout, tensor.device),
            *map(id, parameters),
        )
        if key in self._agreed or self._communicator.world_size == 1:
            return
        self._agreed.add(key)
        names = [self._names.get(id(parameter), "?") for parameter in parameters]
        facts = self._facts(tensor, names) | {"last": str(bucket.is_last())}
        compared = self._communicator.require_equal(
            {f"{name} of bucket {bucket.index()}": value for name, value in facts.items()}
        )
        # What does not go through the communicator's thread must not overtake.
        if tensor.is_cuda and self._communicator.uses_nccl:
            compared.wait()

    def _facts(self, tensor: torch.Tensor, names: list[str]) -> dict[str, str]:
        listed = ", ".join(names)
        if len(listed) > _LONGEST_NAMES:
            mark = fingerprint(listed.encode()) & (1 << 64) - 1
            listed = f"{len(names)}, {names[0]} to {names[-1]} ({mark:016x})"
        facts = {
            "elements": str(tensor.numel()),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "layout": str(tensor.layout).removeprefix("torch."),
            "device": tensor.device.type,
            "parameters": listed,
        }
        if tensor.layout is torch.strided and tensor.numel():
            itemsize = tensor.dtype.to_real().itemsize
            plan = self._communicator.plan_for(tensor.nbytes, itemsize, tensor.device.type)
            facts["plan"] = f"{plan.family} {plan.hash}"
        return facts
