"""Functions that rank processes run: a communicator whose ranks count as separate hosts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from topo_ar.execution.communicator import Communicator
from topo_ar.execution.transports.segment import HOST_ID_ENV


@contextmanager
def communicator(rank: int, hosts: list[int], **options: object) -> Iterator[Communicator]:
    """A communicator in which rank r counts as being on host ``hosts[r]``."""
    os.environ[HOST_ID_ENV] = str(hosts[rank])
    try:
        with Communicator(**{"timeout_s": 20.0, **options}) as made:
            yield made
    finally:
        del os.environ[HOST_ID_ENV]


def blocks(num_nodes: int, ranks_per_node: int) -> list[int]:
    """Host of each rank when nodes are filled one after the other."""
    return [node for node in range(num_nodes) for _ in range(ranks_per_node)]
