"""Functions that rank processes run: a communicator whose ranks count as separate hosts."""

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
        os.environ.pop(HOST_ID_ENV, None)  # of one within another


def blocks(num_nodes: int, ranks_per_node: int) -> list[int]:
    """Host of each rank when nodes are filled one after the other."""
    return [node for node in range(num_nodes) for _ in range(ranks_per_node)]


def lag(made: Communicator) -> None:
    """Let this rank's bytes leave late and in small pieces."""
    for flow in made._job.flows.values():
        flow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        flow.flush = lambda real=flow.flush: random.random() < 0.1 and real()


def wrong_under_delays(rank: int, hosts: list[int], steps: int, numels: tuple[int, ...]) -> int:
    """Reduce buckets of these sizes each step, with random pauses; return how many are wrong."""
    random.seed(rank)
    wrong = 0
    with communicator(rank, hosts, plan="hierarchical") as made:
        for step in range(steps):
            buckets = [
                torch.full((numel,), float(rank + step + i)) for i, numel in enumerate(numels)
            ]
            futures = []
            for bucket in buckets:
                if random.random() < 0.1:
                    time.sleep(random.random() * 0.002)
                futures.append(made.all_reduce(bucket))
            for i, future in enumerate(futures):
                expected = sum(r + step + i for r in range(len(hosts)))
                wrong += int(not torch.equal(future.wait(), torch.full_like(buckets[i], expected)))
    return wrong
