"""The two-shot all-reduce of encodings that cannot be added.

Each member owns a part of the shard. First shot: every member encodes each part and sends it to
its owner, which decodes and adds in fp32. Second shot: the owner encodes the sum and sends it to
all. Each member sends ``2 (n-1)/n`` of an encoded shard, whatever n is; an all-gather of encoded
shards would send ``n-1`` of them.

Long shards go in chunks, of which the next is encoded while one is on the wire.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from topo_ar.compression.parts import alone, cuts, join_bytes, split
from topo_ar.compression.protocol import Group, Layout, Pipelined, Reduced
from topo_ar.compression.stateless import Stateless
from topo_ar.planning.codecs import RUN, Codec

_FLOAT_NBYTES = 4
_CHUNK = RUN
_STAGES = 3


class Encoding(Protocol):
    """Turns fp32 values to fewer bytes and back.

    `align`: elements that must stay together.
    """

    align: int

    def encode(self, values: torch.Tensor, runs: Sequence[int]) -> list[torch.Tensor]:
        """Return flat tensors that are sent one after the other, the widest dtype first.

        Parameters
        ----------
        values : Tensor
            fp32, flat.
        runs : sequence of int
            Lengths of the parts of `values` that belong to one parameter each.
        """
        ...

    def decode(self, message: torch.Tensor, runs: Sequence[int], out: torch.Tensor) -> None:
        """Write the values of an encoded `message`, as uint8, to `out`."""
        ...


class TwoShot(Stateless):
    """Reduces by all-to-all and all-gather of encoded parts.

    Vectors and small tensors travel in the same messages as fp32. The owner of a part takes upon
    itself what the second encoding loses: its `own` there is ``its own values + decoded - sum``.
    """

    def __init__(self, codec: Codec, encoding: Encoding) -> None:
        super().__init__(codec)
        self.encoding = encoding

    def reduce(
        self, shard: torch.Tensor, layout: Layout, rail: Group, node: Group, step: int
    ) -> Reduced:
        """Add up the shards of the rail; see `Compressor.reduce`."""
        if rail.size == 1:
            return alone(shard)
        kinds = split(layout)
        coded, exact = kinds.take(shard)
        numel = coded.numel()
        step = _CHUNK if self.codec.by_runs and isinstance(rail, Pipelined) else numel
        own, total = torch.empty_like(coded), torch.empty_like(coded)
        exact_total = torch.empty_like(exact)
        chunks = []
        for begin in range(0, max(numel, 1), max(step, 1)):
            end = min(begin + step, numel)
            at = [begin + i for i in cuts(end - begin, rail.size, self.encoding.align)]
            runs = [kinds.runs_within(at[i], at[i + 1]) for i in range(rail.size)]
            # Vectors travel with the first chunk.
            beside = (exact, exact_total) if begin == 0 else (exact[:0], exact_total[:0])
            chunks.append(_Chunk(self.encoding, rail, at, runs, (coded, own, total), beside))
        for place in range(len(chunks) + _STAGES - 1):
            for stage, turn in enumerate((_Chunk.send, _Chunk.add, _Chunk.receive)):
                if 0 <= place - stage < len(chunks):
                    turn(chunks[place - stage])
        return Reduced(
            kinds.join(total, exact_total),
            kinds.join(own, exact),
            sum(chunk.sent_nbytes for chunk in chunks),
        )


class _Chunk:
    """A run of the compressed elements on its way, with `beside` it exact ones.

    Parameters
    ----------
    at : list of int
        Where it is cut into the members' parts.
    runs : list of list of int
        What those are made of.
    vectors : tuple of Tensor
        The whole shard, what of it is sent, and the total; the latter two are written to.
    beside : tuple of Tensor
        Exact elements, and their total, which is written to.
    """

    def __init__(
        self,
        encoding: Encoding,
        rail: Group,
        at: list[int],
        runs: list[list[int]],
        vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        beside: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._encoding, self._rail, self._runs = encoding, rail, runs
        self._parts = [slice(a, b) for a, b in pairwise(at)]
        self._coded, self._own, self._total = vectors
        self._exact, self._exact_total = beside
        self._exact_at = cuts(self._exact.numel(), rail.size)
        self._sum = self._coded[:0]
        self._wait: Callable[[], list[torch.Tensor]] = list
        self.sent_nbytes = 0

    def send(self) -> None:
        """Encode the parts and send each to its owner."""
        exact_at, messages = self._exact_at, []
        for i, part in enumerate(self._parts):
            encoded = join_bytes(self._encoding.encode(self._coded[part], self._runs[i]))
            self._encoding.decode(encoded, self._runs[i], self._own[part])
            messages.append(join_bytes([self._exact[exact_at[i] : exact_at[i + 1]], encoded]))
        index = self._rail.index
        self.sent_nbytes += sum(m.nbytes for i, m in enumerate(messages) if i != index)
        self._wait = _begin(self._rail, "all_to_all", messages)

    def add(self) -> None:
        """Add up the part of this member, encode the sum and send it to all."""
        index, mine = self._rail.index, self._parts[self._rail.index]
        head = (self._exact_at[index + 1] - self._exact_at[index]) * _FLOAT_NBYTES
        exact_sum = torch.zeros(head // _FLOAT_NBYTES, device=self._coded.device)
        coded_sum = torch.zeros(mine.stop - mine.start, device=self._coded.device)
        decoded = torch.empty_like(coded_sum)
        for i, message in enumerate(self._wait()):
            exact_sum += message[:head].view(torch.float32)
            if i == index:
                coded_sum += self._own[mine]
            else:
                self._encoding.decode(message[head:], self._runs[index], decoded)
                coded_sum += decoded
        final = join_bytes([exact_sum, *self._encoding.encode(coded_sum, self._runs[index])])
        self.sent_nbytes += (self._rail.size - 1) * final.nbytes
        self._sum = coded_sum
        self._wait = _begin(self._rail, "all_gather", final)

    def receive(self) -> None:
        """Decode the sums of all parts."""
        exact_at = self._exact_at
        for i, message in enumerate(self._wait()):
            head = (exact_at[i + 1] - exact_at[i]) * _FLOAT_NBYTES
            self._exact_total[exact_at[i] : exact_at[i + 1]] = message[:head].view(torch.float32)
            self._encoding.decode(message[head:], self._runs[i], self._total[self._parts[i]])
        mine = self._parts[self._rail.index]
        self._own[mine] += self._total[mine] - self._sum


def _begin(rail: Group, op: str, given: Any) -> Callable[[], list[torch.Tensor]]:
    """Begin an operation where the group can, else do it."""
    if isinstance(rail, Pipelined):
        begun: Callable[[], list[torch.Tensor]] = getattr(rail, f"begin_{op}")(given)
        return begun
    found: list[torch.Tensor] = getattr(rail, op)(given)
    return lambda: found
