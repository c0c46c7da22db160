"""One rank of an MPI library that ``topo-ar bench`` measures beside its own.

It holds no torch and no engine of ours: numpy buffers and ``MPI_Allreduce``. Open MPI polls while
it waits, so a rank whose turn it is not waits for its next order in ``read`` instead.
"""

import os
import resource
import signal
import time
from typing import Any

import msgspec
import numpy as np

from topo_ar.execution.orders import CONNECT_SECONDS, PEER_ENV, Answer, Order, PeerPlace, serve

_EXIT_SECONDS = 5.0
_SEGMENT_NBYTES = 65536  # coll_han_allreduce_segsize


class _Rank:
    """The buffers of one rank, and what it does with them.

    Two faults of HAN in Open MPI 4.1 are kept away from: it takes MPI_IN_PLACE for an address,
    hence two buffers, and it takes the last segment for a whole one, hence the room behind them.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._mine: Any = np.empty(0)
        self._sum: Any = np.empty(0)

    def obey(self, order: Order) -> Answer:
        # A rank that never returns from MPI is ended by the kernel, and mpirun ends the others.
        signal.setitimer(signal.ITIMER_REAL, order.deadline_seconds)
        self._provide(order)
        answer = self._check(order) if order.check else self._time(order)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return answer

    def _provide(self, order: Order) -> None:
        numel = order.nbytes // np.dtype(order.dtype).itemsize
        if self._mine.dtype != order.dtype or self._mine.size != numel:
            room = np.empty((2, numel + _SEGMENT_NBYTES), order.dtype)
            room.fill(0)  # pages that exist, unlike those of np.zeros
            self._mine, self._sum = room[:, :numel]

    def _all_reduce(self, order: Order) -> None:
        self._comm.Allreduce(self._mine, self._sum)
        if order.op == "avg":
            np.divide(self._sum, self._comm.size, out=self._sum)

    def _time(self, order: Order) -> Answer:
        self._comm.Barrier()
        if order.pause_seconds:
            time.sleep(order.pause_seconds)
            self._comm.Barrier()
        for _ in range(order.warmup):
            self._all_reduce(order)
        cpu, begin = _cpu_seconds(), time.perf_counter()
        for _ in range(order.calls):
            self._all_reduce(order)
        seconds = time.perf_counter() - begin
        return Answer(seconds / order.calls, (_cpu_seconds() - cpu) / order.calls, 0)

    def _check(self, order: Order) -> Answer:
        """Count the elements that differ from the exact sum of small integers."""
        size = self._comm.size
        pattern = np.arange(self._mine.size) % 7
        self._mine[:] = pattern + self._comm.rank % 5
        expected = pattern * float(size) + sum(rank % 5 for rank in range(size))
        if order.op == "avg":
            expected /= size
        self._all_reduce(order)
        self._mine[:] = 0
        return Answer(0.0, 0.0, int(np.count_nonzero(self._sum != expected.astype(order.dtype))))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run as a rank of mpirun until the benchmark has no more orders."""
    import mpi4py

    signal.setitimer(signal.ITIMER_REAL, CONNECT_SECONDS)
    mpi4py.rc.threads = False
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    signal.setitimer(signal.ITIMER_REAL, 0)
    place = msgspec.json.decode(os.environ[PEER_ENV], type=PeerPlace)
    try:
        serve(place, comm.rank, _Rank(comm).obey)
    finally:
        # The results are out. HAN may stumble over its own end, which must not hold up mpirun.
        signal.setitimer(signal.ITIMER_REAL, _EXIT_SECONDS)


if __name__ == "__main__":
    main()
