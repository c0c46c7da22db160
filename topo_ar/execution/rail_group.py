"""The ranks in one place of all nodes as a group: messages over the flows between nodes."""

from collections.abc import Callable, Mapping, Sequence
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
        self._mark = 0
        self._arrived: dict[int, Bytes] = {}
        self._unsent: set[int] = set()
        self._awaited: set[int] = set()

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
        mine = octets(tensor)
        self._exchange("rail all_gather", tensor.dtype, dict.fromkeys(self._flows, mine))
        return [
            tensor.clone()
            if i == self.index
            else shaped(typed(self._arrived.pop(i), tensor.dtype), tensor)
            for i in range(self.size)
        ]

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``parts[i]`` to member i and return what each member sent here; see `Group`."""
        dtype = parts[0].dtype
        self._exchange("rail all_to_all", dtype, {i: octets(parts[i]) for i in self._flows})
        return [
            parts[i].clone() if i == self.index else typed(self._arrived.pop(i), dtype)
            for i in range(self.size)
        ]

    def _exchange(self, op: str, dtype: torch.dtype, outgoing: Mapping[int, Bytes]) -> None:
        """Send a message to each of the other members and wait for theirs."""
        self._mark = self._call.mark(op, dtype)
        if not outgoing:
            return
        for position, message in outgoing.items():
            self._unsent.add(position)
            self._awaited.add(position)
            flow = self._flows[position]
            flow.outstanding += 1
            done = self._sent_to(position)
            payload = message.data if message.nbytes else memoryview(b"")
            flow.send(Kind.GROUP, self._call.number, self._mark, payload, done)
            self.sent_nbytes += message.nbytes
        self._words[Counter.ON_WIRE] = 1
        self._attend(Errand(self._turn, self._done, 0, self._late))
        self._words[Counter.ON_WIRE] = 0

    def _sent_to(self, position: int) -> Callable[[], None]:
        return lambda: self._unsent.discard(position)

    def _turn(self) -> bool:
        moved = False
        for flow in self._flows.values():
            if flow.wants_out:
                moved |= flow.flush()
            if flow.outstanding:
                moved |= flow.receive(self)
        return moved

    def _done(self) -> bool:
        return not self._unsent and not self._awaited

    def _late(self) -> Wait:
        late = self._awaited or self._unsent
        ranks = tuple(self._flows[position].rank for position in sorted(late))
        what = "have not sent their part" if self._awaited else "do not take the bytes sent to them"
        return Wait(Stage.INTER_EXCHANGE, ranks, what, 1)

    def destination(
        self, flow: Flow, kind: int, index: int, fingerprint: int, segment: int
    ) -> memoryview:
        """Return new memory for a member's message."""
        if kind != Kind.GROUP or fingerprint != self._mark:
            raise ExecutionError(
                f"rank {flow.rank} exchanges something else than rank {self._rank}; all ranks must "
                "run with equal codecs, buckets and steps",
                ranks=(flow.rank,),
                stage=Stage.INTER_EXCHANGE,
            )
        message = self._arrived[self._position[flow.rank]] = np.empty(flow.size, np.uint8)
        return message.data if message.nbytes else memoryview(b"")

    def arrived(self, flow: Flow, kind: int, index: int) -> None:
        """Take note that a member's message is there."""
        self._awaited.discard(self._position[flow.rank])
