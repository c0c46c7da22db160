"""The co-located ranks as a group: messages through the shared memory of the input slots."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from topo_ar.errors import ExecutionError
from topo_ar.execution.errand import Errand, Wait
from topo_ar.execution.messages import Attend, Bytes, Call, add_up, octets, shaped, typed
from topo_ar.execution.transports.segment import Counter
from topo_ar.execution.transports.shm import Node
from topo_ar.planning.schedule import Stage

# Fingerprint and lengths before a message; a whole page, so that messages begin on one.
_HEAD_NBYTES = 4096
_LINE_NBYTES = 64


class NodeGroup:
    """The co-located ranks of a communicator, in rank order; see `Groups`.

    Messages go round by round: each rank posts a part of its own, all read, and the other half of
    the memory takes the next part meanwhile.
    """

    def __init__(self, node: Node, attend: Attend, call: Call) -> None:
        self.index = node.local_rank
        self.size = len(node.ranks)
        self._node = node
        self._attend = attend
        self._call = call
        self._round = 0
        self._capacity = node.owned.segment.message(0).nbytes - _HEAD_NBYTES

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum in rank order, added in at least fp32; see `Group`."""
        if self.size == 1:
            return tensor.clone()
        flat = tensor.contiguous().view(-1)
        total = torch.empty_like(flat)
        step = self._capacity // flat.itemsize
        mark = self._call.mark("node all_reduce", flat.dtype, tensor.shape)
        for begin in range(0, max(1, flat.numel()), step):
            end = min(begin + step, flat.numel())
            bodies = self._exchange([mark], octets(flat[begin:end]))
            nbytes = (end - begin) * flat.itemsize
            total[begin:end] = add_up([typed(body[:nbytes], flat.dtype) for body in bodies])
            self._close()
        return total.view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's tensor; see `Group`."""
        mine = octets(tensor)
        found = self._streams("node all_gather", tensor.dtype, [mine])
        return [
            tensor.clone() if member == self.index else shaped(typed(parts, tensor.dtype), tensor)
            for member, parts in enumerate(found)
        ]

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``parts[i]`` to member i and return what each member sent here; see `Group`."""
        dtype = parts[0].dtype
        empty = np.empty(0, np.uint8)
        mine = [empty if i == self.index else octets(part) for i, part in enumerate(parts)]
        found = self._streams("node all_to_all", dtype, mine)
        return [
            parts[member].clone() if member == self.index else typed(part, dtype)
            for member, part in enumerate(found)
        ]

    def reduce_scatter(self, buffer: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        """Return the sum of this rank's part of the members' buffers, added in rank order.

        Parameters
        ----------
        buffer : Tensor
            Flat, contiguous; the same size and dtype on all members. Not changed.
        bounds : sequence of int
            ``size + 1`` places in the buffer: member i gets the elements from ``bounds[i]`` to
            ``bounds[i + 1]``. The same on all members.

        Returns
        -------
        Tensor
            In fp32 for half precision, else in the buffer's dtype.
        """
        wide = torch.promote_types(buffer.dtype, torch.float32)
        begin, end = bounds[self.index], bounds[self.index + 1]
        if self.size == 1:
            return buffer[begin:end].to(wide, copy=True)
        shard = torch.empty(end - begin, dtype=wide)
        source, itemsize = octets(buffer), buffer.itemsize
        room = self._capacity // self.size // _LINE_NBYTES * _LINE_NBYTES
        step = room // itemsize
        mark = self._call.mark("node reduce_scatter", buffer.dtype, bounds)
        for at in range(0, max(1, *(b - a for a, b in pairwise(bounds))), step):

            def write(body: Bytes, at: int = at) -> None:
                for member, (first, last) in enumerate(pairwise(bounds)):
                    low, high = first + at, min(first + at + step, last)
                    if high > low and member != self.index:
                        place = member * room
                        nbytes = (high - low) * itemsize
                        body[place : place + nbytes] = source[low * itemsize : high * itemsize]

            bodies = self._exchange([mark], write)
            low, high = begin + at, min(begin + at + step, end)
            if high > low:
                place, nbytes = self.index * room, (high - low) * itemsize
                theirs = [
                    buffer[low:high]
                    if member == self.index
                    else typed(body[place : place + nbytes], buffer.dtype)
                    for member, body in enumerate(bodies)
                ]
                add_up(theirs, shard[low - begin : high - begin])
            self._close()
        return shard

    def all_gather_into(
        self, buffer: torch.Tensor, bounds: Sequence[int], shard: torch.Tensor
    ) -> None:
        """Write every member's shard to its part of the buffer.

        Parameters
        ----------
        buffer : Tensor
            Flat, contiguous, on the CPU; written to.
        bounds : sequence of int
            As for `reduce_scatter`.
        shard : Tensor
            This member's part, flat, of the buffer's dtype; it may be a part of the buffer.
        """
        target, itemsize = octets(buffer), buffer.itemsize
        mine = octets(shard)
        target[bounds[self.index] * itemsize : bounds[self.index + 1] * itemsize] = mine
        if self.size == 1:
            return
        longest = max(b - a for a, b in pairwise(bounds)) * itemsize
        mark = self._call.mark("node all_gather_into", buffer.dtype, bounds)
        for at in range(0, max(1, longest), self._capacity):
            bodies = self._exchange([mark], mine[at : at + self._capacity])
            for member, (first, last) in enumerate(pairwise(bounds)):
                low, high = first * itemsize + at, last * itemsize
                high = min(high, low + self._capacity)
                if high > low and member != self.index:
                    target[low:high] = bodies[member][: high - low]
            self._close()

    def finish(self) -> None:
        """Wait until all have read what was posted: the pipeline may have its slots back."""
        self._until(Counter.READ, self._round)

    def _streams(self, op: str, dtype: torch.dtype, parts: Sequence[Bytes]) -> list[Bytes]:
        """Exchange messages whose lengths only their senders know; return those for this rank.

        One part is for all members, else there is one for each.
        """
        if self.size == 1:
            return [np.empty(0, np.uint8)]
        lengths = [part.nbytes for part in parts]
        mark = self._call.mark(op, dtype)
        stream = list(accumulate(lengths, initial=0))
        found: list[Bytes] = []
        places: list[tuple[int, int]] = []
        begin, end = 0, 1
        while begin < end:

            def write(body: Bytes, begin: int = begin) -> None:
                for first, part in zip(stream, parts, strict=False):
                    low, high = max(first, begin), min(first + part.nbytes, begin + self._capacity)
                    if high > low:
                        body[low - begin : high - begin] = part[low - first : high - first]

            bodies = self._exchange([mark, *lengths], write)
            if not begin:
                for member in range(self.size):
                    theirs = self._head(member)[1 : 1 + len(parts)].tolist()
                    place = self.index if len(parts) > 1 else 0
                    first = sum(theirs[:place])
                    places.append((first, first + theirs[place]))
                    end = max(end, sum(theirs))
                    found.append(np.empty(theirs[place], np.uint8))
            for member, (first, last) in enumerate(places):
                low, high = max(first, begin), min(last, begin + self._capacity)
                if high > low and member != self.index:
                    found[member][low - first : high - first] = bodies[member][
                        low - begin : high - begin
                    ]
            self._close()
            begin += self._capacity
        return found

    def _exchange(self, head: Sequence[int], body: Bytes | Callable[[Bytes], None]) -> list[Bytes]:
        """Post a head and a body in this round; return the bodies of all, until `_close`."""
        self._until(Counter.READ, self._round - 1)
        slot = self._node.owned.segment.message(self._round)
        slot[: 8 * len(head)].view(np.int64)[:] = head
        if callable(body):
            body(slot[_HEAD_NBYTES:])
        else:
            slot[_HEAD_NBYTES : _HEAD_NBYTES + body.nbytes] = body
        self._node.advance(Counter.POSTED, self._round + 1)
        self._until(Counter.POSTED, self._round + 1)
        ranks = self._node.ranks
        wrong = [ranks[i] for i in range(self.size) if self._head(i)[0] != head[0]]
        if wrong:
            raise ExecutionError(
                f"ranks {wrong} exchange something else than rank {ranks[self.index]}; all ranks "
                "must run with equal codecs, buckets and steps",
                ranks=wrong,
                stage=Stage.INTRA_REDUCE_SCATTER,
            )
        return [each.message(self._round)[_HEAD_NBYTES:] for each in self._node.segments]

    def _close(self) -> None:
        self._round += 1
        self._node.advance(Counter.READ, self._round)

    def _head(self, member: int) -> NDArray[np.int64]:
        head = self._node.segments[member].message(self._round)[:_HEAD_NBYTES]
        return head.view(np.int64)

    def _until(self, counter: int, value: int) -> None:
        node = self._node

        def done() -> bool:
            return node.least(counter) >= value

        if not done():
            self._attend(Errand(done, done, 1 << counter, lambda: self._late(counter, value)))

    def _late(self, counter: int, value: int) -> Wait:
        node = self._node
        late = [i for i in range(self.size) if node.value(counter, i) < value]
        # Who waits for the wire is a victim itself; the others should have come.
        idle = [i for i in late if not node.value(Counter.ON_WIRE, i)]
        return Wait(
            Stage.INTRA_REDUCE_SCATTER,
            tuple(node.ranks[i] for i in idle or late),
            "have not brought their part",
            0 if idle else 2,
        )
