"""What a codec does, and what it may ask of the ranks around it.

After the exact reduction inside a node each local rank holds a *shard*: the node's sum of some
elements of a bucket. The ranks that hold the same shard, one per node, are a *rail*. A codec adds
up the shards of a rail with fewer bytes than they have, and says what it lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from topo_ar.planning.codecs import Codec


class Group(Protocol):
    """Ranks that exchange tensors; all members call the same operations in the same order.

    `index` is this rank's position, `size` the number of members. Every operation returns the same
    bits on all members: each element is added up by one of them, in the order of positions, in at
    least fp32.
    """

    index: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the members' tensors of equal shape and dtype."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's tensor, in order of positions; lengths may differ."""
        ...

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``parts[i]`` to member i and return what each member sent here."""
        ...


@runtime_checkable
class Pipelined(Protocol):
    """A group that can work on while its messages are under way.

    What is begun may be waited for later, in the order in which it was begun.
    """

    def begin_all_gather(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begin an `all_gather`; what is returned ends it."""
        ...

    def begin_all_to_all(self, parts: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begin an `all_to_all`; what is returned ends it."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one parameter in a shard.

    Attributes
    ----------
    name : str
        The parameter's name in the model.
    shape : tuple of int
        The shape of the whole parameter.
    begin, end : int
        The run, in elements of the flattened parameter.
    offset : int
        Where the run begins in the shard.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What a shard is made of: pieces that tile it in order. `bucket` numbers the bucket."""

    bucket: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return sum(piece.end - piece.begin for piece in self.pieces)


class Reduced:
    """What a codec made of a rail's shards.

    Parameters
    ----------
    total : Tensor
        The sum over the rail as every member decodes it; the same bits on all members. fp32, flat.
    own : Tensor
        What of this member's shard is in `total`. The sum of `own` over the members is `total` (up
        to the rounding of fp32), so that ``shard - own`` over all members is exactly what was
        lost: the member that sums and encodes again takes that second loss upon itself. Valid
        until the bucket's next `reduce`.
    sent_nbytes : int
        Bytes that this member sent.
    """

    def __init__(self, total: torch.Tensor, own: torch.Tensor, sent_nbytes: int) -> None:
        self._total, self._own = total, own
        self.sent_nbytes = sent_nbytes

    @property
    def total(self) -> torch.Tensor:
        """The rail's sum."""
        return self._total

    @property
    def own(self) -> torch.Tensor:
        """What of this member is in it."""
        return self._own

    def poison(self) -> torch.Tensor:
        """Return zero, or NaN where `total` is not finite; nothing waits for the host."""
        return self.total.sum() * 0

    def take_from(self, shard: torch.Tensor) -> None:
        """Subtract `own` in place from the shard that was reduced: what is left was lost."""
        own = self.own
        if own.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
            self._own = own = own.clone()
        torch.sub(shard, own, out=shard)


class Compressor(Protocol):
    """A codec at work on this rank. It keeps no error memory; `ErrorFeedback` does, around any.

    `reduce` must leave every state of its own (such as PowerSGD's Q) as it was until `commit` is
    called: a step that turns out not to be finite is never committed.
    """

    codec: Codec

    def reduce(
        self, shard: torch.Tensor, layout: Layout, rail: Group, node: Group, step: int
    ) -> Reduced:
        """Add up the shards of the rail.

        Parameters
        ----------
        shard : Tensor
            fp32, flat, ``layout.numel`` elements; not changed. Finite, but for a codec with
            ``checks_finite = True``, whose `Reduced.poison` tells.
        layout : Layout
            What the shard is made of.
        rail : Group
            The ranks with the same shard, one per node.
        node : Group
            The co-located ranks, whose shards tile the bucket; all call `reduce` together.
        step : int
            Counts synchronised steps, the same on all ranks; the seed of what is random.
        """
        ...

    def commit(self, layout: Layout) -> None:
        """Keep the state that the last `reduce` of this layout's bucket made."""
        ...

    def share(self, node: Group) -> None:
        """Let each rank of the node know the state of all: its shards are about to change."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state by name, tensors only; the same on all nodes, by piece of parameter."""
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a state."""
        ...
