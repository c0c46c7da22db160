"""A job of nodes and local ranks in one process: ranks are threads, groups exchange tensors."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

DEADLINE = 30


class _Meeting:
    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.slots = [None] * size


class SimulatedGroup:
    """One member's view of a group; every operation is a meeting of all members."""

    def __init__(self, index, meeting):
        self.index = index
        self.size = len(meeting.slots)
        self._meeting = meeting
        self.sent_nbytes = 0

    def _exchange(self, value):
        meeting = self._meeting
        meeting.slots[self.index] = value
        meeting.barrier.wait(DEADLINE)
        found = list(meeting.slots)
        meeting.barrier.wait(DEADLINE)
        return found

    def all_reduce(self, tensor):
        found = self._exchange(tensor.clone())
        self.sent_nbytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        wide = torch.promote_types(tensor.dtype, torch.float32)
        total = found[0].to(wide)
        for other in found[1:]:
            total = total + other.to(wide)
        return total.to(tensor.dtype)

    def all_gather(self, tensor):
        self.sent_nbytes += (self.size - 1) * tensor.nbytes
        return self._exchange(tensor.clone())

    def all_to_all(self, parts):
        self.sent_nbytes += sum(p.nbytes for i, p in enumerate(parts) if i != self.index)
        return [theirs[self.index] for theirs in self._exchange([part.clone() for part in parts])]


def run_job(num_nodes, num_local, work):
    """Run ``work(node_index, local_index, rail, node)`` on every rank; return results by rank."""
    rails = [_Meeting(num_nodes) for _ in range(num_local)]
    nodes = [_Meeting(num_local) for _ in range(num_nodes)]

    def rank(v, k):
        try:
            return work(v, k, SimulatedGroup(v, rails[k]), SimulatedGroup(k, nodes[v]))
        except BaseException:
            for meeting in (*rails, *nodes):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_nodes * num_local) as pool:
        places = [(v, k) for v in range(num_nodes) for k in range(num_local)]
        futures = [pool.submit(rank, v, k) for v, k in places]
        errors = [future.exception() for future in futures]
    real = [e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)]
    for error in real or [e for e in errors if e]:
        raise error
    return [future.result() for future in futures]
