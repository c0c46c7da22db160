"""Every private name of torch that the package reads, in one place; a test pins them by version."""

from torch._C._distributed_c10d import GradBucket as GradBucket
from torch.nn.parallel import DistributedDataParallel


def registered_hooks(ddp: DistributedDataParallel) -> int:
    """Return how many communication hooks `ddp` already has."""
    return len(ddp._comm_hooks)


def is_static_graph(ddp: DistributedDataParallel) -> bool:
    """Tell whether `ddp` was built with ``static_graph=True``."""
    return bool(ddp.static_graph)


def skips_unused(ddp: DistributedDataParallel) -> bool:
    """Tell whether `ddp` leaves out the reduction of unused parameters."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))
