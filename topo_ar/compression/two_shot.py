"""The two-shot all-reduce of encodings that cannot be added.

Each member owns a part of the shard. First shot: every member encodes each part and sends it to
its owner, which decodes and adds in fp32. Second shot: the owner encodes the sum and sends it to
all. Each member sends ``2 (n-1)/n`` of an encoded shard, whatever n is; an all-gather of encoded
shards would send ``n-1`` of them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from topo_ar.compression.parts import alone, cuts, join_bytes, split
from topo_ar.compression.protocol import Group, Layout, Reduced
from topo_ar.compression.stateless import Stateless
from topo_ar.planning.codecs import Codec

_FLOAT_NBYTES = 4


class Encoding(Protocol):
    """Turns fp32 values to fewer bytes and back. `align`: elements that must stay together."""

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
        at = cuts(coded.numel(), rail.size, self.encoding.align)
        exact_at = cuts(exact.numel(), rail.size)
        runs = [kinds.runs_within(at[i], at[i + 1]) for i in range(rail.size)]
        messages, own = [], torch.empty_like(coded)
        for i in range(rail.size):
            part = slice(at[i], at[i + 1])
            encoded = join_bytes(self.encoding.encode(coded[part], runs[i]))
            self.encoding.decode(encoded, runs[i], own[part])
            messages.append(join_bytes([exact[exact_at[i] : exact_at[i + 1]], encoded]))

        mine = slice(at[rail.index], at[rail.index + 1])
        found = rail.all_to_all(messages)
        head = (exact_at[rail.index + 1] - exact_at[rail.index]) * _FLOAT_NBYTES
        exact_sum = torch.zeros(head // _FLOAT_NBYTES, device=shard.device)
        coded_sum = torch.zeros(mine.stop - mine.start, device=shard.device)
        decoded = torch.empty_like(coded_sum)
        for i, message in enumerate(found):
            exact_sum += message[:head].view(torch.float32)
            if i == rail.index:
                coded_sum += own[mine]
            else:
                self.encoding.decode(message[head:], runs[rail.index], decoded)
                coded_sum += decoded

        again = self.encoding.encode(coded_sum, runs[rail.index])
        final = join_bytes([exact_sum, *again])
        total, exact_total = torch.empty_like(coded), torch.empty_like(exact)
        for i, message in enumerate(rail.all_gather(final)):
            length = exact_at[i + 1] - exact_at[i]
            exact_total[exact_at[i] : exact_at[i + 1]] = message[: length * _FLOAT_NBYTES].view(
                torch.float32
            )
            self.encoding.decode(
                message[length * _FLOAT_NBYTES :], runs[i], total[at[i] : at[i + 1]]
            )
        own[mine] += total[mine] - coded_sum
        sent = sum(m.nbytes for i, m in enumerate(messages) if i != rail.index)
        return Reduced(
            kinds.join(total, exact_total),
            kinds.join(own, exact),
            sent + (rail.size - 1) * final.nbytes,
        )
