"""Another library's ranks as a candidate: rank 0 of the job gives the orders, the others wait.

Every wait has a deadline. A peer that misses one, or of which a rank ends, is lost for good, on all
ranks of the job at the same call.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist

from topo_ar.execution.candidates import CandidateLostError, Run, Sample
from topo_ar.execution.orders import Answer, Hello, Order, PeerPlace, send

# A rank ends itself at the deadline of an order; that it did is seen a little later.
_GRACE = 1.5
_COME_SECONDS = 30.0
_PIECE_NBYTES = 4096


class Peer:
    """Ranks that an outside launcher started and that connect to `place`, as many as the job has.

    Parameters
    ----------
    place : PeerPlace
        Where rank 0 of the job listens.
    dtype, op : str
        Of every order.
    deadline_s : float
        Seconds for one order, and at most for the ranks to come.
    group : ProcessGroup
        The job's ranks; its time-out must be three times `deadline_s`.
    """

    def __init__(
        self, place: PeerPlace, dtype: str, op: str, deadline_s: float, group: "dist.ProcessGroup"
    ) -> None:
        self.name = place.name
        self._dtype, self._op = dtype, op
        self._deadline_s = deadline_s
        self._group = group
        self._ranks: _Ranks | None = None
        self._reason = ""
        if dist.get_rank(group) == 0:
            try:
                self._ranks = _Ranks(place, dist.get_world_size(group))
            except OSError as error:
                self._reason = f"cannot listen at {place.address}:{place.port}: {error.strerror}"

    def sample(self, run: Run) -> Sample:
        """Have the ranks take one sample: all job ranks return the slowest one's."""
        answer = self._ask(run)
        return Sample(answer.seconds, answer.cpu_seconds)

    def wrong(self, nbytes: int) -> int:
        """Have the ranks all-reduce known numbers."""
        return self._ask(Run(nbytes, 1), check=True).wrong

    def close(self) -> None:
        """Let the ranks go; they end when they notice."""
        if self._ranks is not None:
            self._ranks.close()

    def _ask(self, run: Run, check: bool = False) -> Answer:
        dist.barrier(group=self._group)
        answer = None
        if self._ranks is not None:
            try:
                answer = self._ranks.obey(self._order(run, check), self._deadline_s)
            except (OSError, ValueError) as error:
                self._reason = str(error)
        told = torch.zeros(4, dtype=torch.float64)
        if answer is not None:
            told[:] = torch.tensor([1.0, answer.seconds, answer.cpu_seconds, answer.wrong])
        dist.broadcast(told, src=dist.get_global_rank(self._group, 0), group=self._group)
        came, seconds, cpu, wrong = told.tolist()
        if not came:
            self.close()
            raise CandidateLostError(self._reason)
        return Answer(seconds, cpu, int(wrong))

    def _order(self, run: Run, check: bool) -> Order:
        return Order(
            nbytes=run.nbytes,
            calls=run.calls,
            warmup=run.warmup,
            pause_seconds=run.pause_seconds,
            dtype=self._dtype,
            op=self._op,
            check=check,
            deadline_seconds=self._deadline_s,
        )


class _Ranks:
    """The connections to all ranks of a peer; OSError says which of them is amiss."""

    def __init__(self, place: PeerPlace, count: int) -> None:
        self._place = place
        self._count = count
        self._listener = socket.create_server((place.address, place.port), backlog=count)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}

    def obey(self, order: Order, seconds: float) -> Answer:
        """Return the ranks' answer within `_GRACE` times `seconds`.

        It holds the slowest rank's seconds, the mean of CPU seconds, and the sum of wrong elements.
        """
        if not self._connections:
            self._accept(min(seconds, _COME_SECONDS))
        for rank, connection in self._connections.items():
            with _amiss(f"rank {rank} ended"):
                send(connection, order)
        answers = self._answers(time.monotonic() + _GRACE * seconds)
        return Answer(
            max(answer.seconds for answer in answers),
            sum(answer.cpu_seconds for answer in answers) / self._count,
            sum(answer.wrong for answer in answers),
        )

    def close(self) -> None:
        """Close all connections: the ranks end when they notice."""
        self._listener.close()
        self._selector.close()
        for connection in self._connections.values():
            connection.close()

    def _accept(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while len(self._connections) < self._count:
            missing = self._count - len(self._connections)
            self._listener.settimeout(max(0.01, limit - time.monotonic()))
            with _amiss(f"{missing} of {self._count} ranks did not come within {seconds:g} s"):
                connection, _ = self._listener.accept()
                connection.settimeout(max(0.01, limit - time.monotonic()))
                hello = _hello(connection)
            if hello is None or hello.token != self._place.token:
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[hello.rank] = connection
            self._selector.register(connection, selectors.EVENT_READ, hello.rank)

    def _answers(self, limit: float) -> list[Answer]:
        lines = dict.fromkeys(self._connections, b"")
        while not all(line.endswith(b"\n") for line in lines.values()):
            ready = self._selector.select(max(0.0, limit - time.monotonic()))
            if not ready:
                silent = [rank for rank, line in lines.items() if not line]
                raise OSError(f"no answer from ranks {silent} in time")
            for key, _ in ready:
                with _amiss(f"rank {key.data} ended"):
                    piece = self._connections[key.data].recv(_PIECE_NBYTES)
                    if not piece:
                        raise EOFError
                lines[key.data] += piece
        return [msgspec.json.decode(line, type=Answer) for line in lines.values()]


def _hello(connection: socket.socket) -> Hello | None:
    with connection.makefile("rb") as lines:
        try:
            return msgspec.json.decode(lines.readline(_PIECE_NBYTES), type=Hello)
        except msgspec.DecodeError:
            return None


@contextlib.contextmanager
def _amiss(reason: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise OSError(reason) from error
