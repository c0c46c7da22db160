"""The ranks in one place of all nodes as a group: messages over the flows between nodes."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from topo_ar.errors import ExecutionError
from topo_ar.execution.errand import Errand, Wait
from topo_ar.execution.messages import Attend, Bytes, Call, add_up, octets, shaped, typed
from topo_ar.execution.transports.segment import Counter
from topo_ar.execution.transports.shm import Node
from topo_ar.execution.transports.tcp import Flow, Kind
from topo_ar.planning.schedule import Stage


class RailGroup:
    """The ranks in one place of all nodes, in the order of the nodes; see `Groups`.

    Attributes
    ----------
    sent_nbytes : int
        Bytes sent to other nodes since the beginning, without the headers of frames.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        node: Node,
        flows: Mapping[int, Flow],
        attend: Attend,
        call: Call,
    ) -> None:
        self.index = members.index(rank)
        self.size = len(members)
        self.sent_nbytes = 0
        self._rank = rank
        self._flows = {i: flows[peer] for i, peer in enumerate(members) if peer != rank}
        self._position = {peer: i for i, peer in enumerate(members)}
        self._words = node.owned.segment.words
        self._attend = attend
        self._call = call
        # What each member still sends here, in order: all members run the same program.
        self._expected: dict[int, deque[_Exchange]] = {i: deque() for i in self._flows}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum in order of nodes, added in at least fp32; see `Group`.

        Each member adds up an n-th, and sends ``2 (n-1)/n`` of the tensor; on two nodes both add
        up all of it, which takes the same bytes and one step less.
        """
        if self.size == 1:
            return tensor.clone()
        flat = tensor.contiguous().view(-1)
        if self.size == 2:
            return add_up([part.view(-1) for part in self.all_gather(flat)]).view(tensor.shape)
        at = [flat.numel() * i // self.size for i in range(self.size + 1)]
        parts = [flat[a:b] for a, b in pairwise(at)]
        total = add_up(self.all_to_all(parts))
        return torch.cat(self.all_gather(total)).view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's tensor; see `Group`."""
        return self.begin_all_gather(tensor)()

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``parts[i]`` to member i and return what each member sent here; see `Group`."""
        return self.begin_all_to_all(parts)()

    def begin_all_gather(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begin to send; what is returned waits for the others. `tensor` must stay as it is."""
        mine = octets(tensor)
        exchange = self._begin("rail all_gather", tensor.dtype, dict.fromkeys(self._flows, mine))

        def finish() -> list[torch.Tensor]:
            self._finish(exchange)
            return [
                tensor.clone()
                if i == self.index
                else shaped(typed(exchange.arrived.pop(i), tensor.dtype), tensor)
                for i in range(self.size)
            ]

        return finish

    def begin_all_to_all(self, parts: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begin to send; what is returned waits for the others. `parts` must stay as they are."""
        dtype = parts[0].dtype
        outgoing = {i: octets(parts[i]) for i in self._flows}
        exchange = self._begin("rail all_to_all", dtype, outgoing)

        def finish() -> list[torch.Tensor]:
            self._finish(exchange)
            return [
                parts[i].clone() if i == self.index else typed(exchange.arrived.pop(i), dtype)
                for i in range(self.size)
            ]

        return finish

    def _begin(self, op: str, dtype: torch.dtype, outgoing: Mapping[int, Bytes]) -> "_Exchange":
        """Send a message to each of the other members."""
        exchange = _Exchange(self._call.mark(op, dtype), set(outgoing), set(outgoing), {})
        for position, message in outgoing.items():
            self._expected[position].append(exchange)
            flow = self._flows[position]
            flow.outstanding += 1
            done = partial(exchange.unsent.discard, position)
            payload = message.data if message.nbytes else memoryview(b"")
            flow.send(Kind.GROUP, self._call.number, exchange.mark, payload, done)
            self.sent_nbytes += message.nbytes
        self._turn()
        return exchange

    def _finish(self, exchange: "_Exchange") -> None:
        if exchange.done():
            return
        self._words[Counter.ON_WIRE] = 1
        self._attend(Errand(self._turn, exchange.done, 0, partial(self._late, exchange)))
        self._words[Counter.ON_WIRE] = 0

    def _turn(self) -> bool:
        moved = False
        for flow in self._flows.values():
            if flow.wants_out:
                moved |= flow.flush()
            if flow.outstanding:
                moved |= flow.receive(self)
        return moved

    def _late(self, exchange: "_Exchange") -> Wait:
        late = exchange.awaited or exchange.unsent
        ranks = tuple(self._flows[position].rank for position in sorted(late))
        what = (
            "have not sent their part" if exchange.awaited else "do not take the bytes sent to them"
        )
        return Wait(Stage.INTER_EXCHANGE, ranks, what, 1)

    def destination(
        self, flow: Flow, kind: int, index: int, fingerprint: int, segment: int
    ) -> memoryview:
        """Return new memory for a member's message."""
        position = self._position[flow.rank]
        expected = self._expected[position]
        if kind != Kind.GROUP or not expected or fingerprint != expected[0].mark:
            raise ExecutionError(
                f"rank {flow.rank} exchanges something else than rank {self._rank}; all ranks must "
                "run with equal codecs, buckets and steps",
                ranks=(flow.rank,),
                stage=Stage.INTER_EXCHANGE,
            )
        message = expected[0].arrived[position] = np.empty(flow.size, np.uint8)
        return message.data if message.nbytes else memoryview(b"")

    def arrived(self, flow: Flow, kind: int, index: int) -> None:
        """Take note that a member's message is there."""
        position = self._position[flow.rank]
        self._expected[position].popleft().awaited.discard(position)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Messages under way: to whom they are still to be sent, and from whom they are still to come.

    `arrived` has what came, by the position of the sender.
    """

    mark: int
    unsent: set[int]
    awaited: set[int]
    arrived: dict[int, Bytes]

    def done(self) -> bool:
        """Tell whether all is sent and has come."""
        return not self.unsent and not self.awaited
