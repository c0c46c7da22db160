"""What all ranks have ready, worked out alike on each of them from what all announce.

Gradients become ready in an order that may differ from rank to rank. Ranks therefore announce what
they have by name, in rounds; what all have announced is due, in an order that follows from the
messages alone, which every rank has seen in full.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import msgspec

# Signatures that are numbered, so that a repeated announcement takes a few bytes.
_MAX_NUMBERED = 4096
_SUMS = ("Average", "Sum")


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """What a rank asks for.

    Attributes
    ----------
    kind : str
        ``allreduce``, ``codec``, ``sparse``, ``allgather``, ``broadcast``, ``alltoall`` or
        ``barrier``.
    name : str
        By which the ranks' requests find each other.
    dtype, device : str
        Of all its tensors; `device` is a type.
    shapes : tuple
        The shape of each tensor; a sparse one's dense shape.
    op : str
        Of an all-reduce, the rank that sends a broadcast, or a codec.
    factors : tuple of float
        By which an all-reduce multiplies before and after.
    splits : tuple of int
        Rows for each rank, of an all-to-all.
    repeats : bool
        Whether the same is likely to be asked for again.
    """

    kind: str
    name: str
    dtype: str = ""
    device: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    factors: tuple[float, float] = (1.0, 1.0)
    splits: tuple[int, ...] = ()
    repeats: bool = False

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(map(prod, self.shapes))

    @property
    def bundle(self) -> tuple[str, ...]:
        """What has to be equal for requests to travel together; empty for those that travel alone.

        A joined rank takes part in what it knows by its signature, so both tell the same.
        """
        if self.kind in ("allreduce", "broadcast"):
            return self.kind, self.dtype, self.device, self.op
        return ()

    def agreed(self) -> tuple[object, ...]:
        """Return what all ranks must ask for alike."""
        shapes = self.shapes
        if self.kind in ("allgather", "alltoall"):
            shapes = tuple(shape[1:] for shape in shapes)
        return self.kind, self.dtype, self.device, shapes, self.op, self.factors


class Message(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says in a round.

    Attributes
    ----------
    completed : int
        Batches that are complete here.
    joined : bool
        Whether it has no more data; it will take part in what the others do.
    numbered : list of int
        Numbers of signatures announced before, announced again.
    new : list of Signature
        Announced.
    """

    completed: int
    joined: bool
    numbered: list[int]
    new: list[Signature]


@dataclass(frozen=True, slots=True)
class Due:
    """A request that all ranks have made, or those that have not joined.

    Attributes
    ----------
    signatures : dict of int to Signature
        By rank.
    problem : str
        Why it cannot be done; empty if it can.
    """

    name: str
    signatures: dict[int, Signature]
    problem: str = ""

    @property
    def first(self) -> Signature:
        """The signature of the first rank that has one."""
        return self.signatures[min(self.signatures)]


class Negotiation:
    """The state that all ranks of a group hold alike.

    Attributes
    ----------
    completed : int
        Batches that are complete on all ranks, as far as they have said.
    last_joined : int or None
        The rank that was the last to join, when all have; None before.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.completed = 0
        self.last_joined: int | None = None
        self._numbers: dict[Signature, int] = {}
        self._signatures: list[Signature] = []
        self._waiting: dict[str, dict[int, Signature]] = {}
        self._joined: list[int] = []

    def announce(self, wanted: Iterable[Signature], completed: int, joined: bool) -> bytes:
        """Return the message of a rank with new requests."""
        numbered, new = [], []
        for signature in wanted:
            number = self._numbers.get(signature)
            if number is None:
                new.append(signature)
            else:
                numbered.append(number)
        return msgspec.msgpack.encode(Message(completed, joined, numbered, new))

    def hear(self, messages: Sequence[bytes]) -> list[Due]:
        """Take in a round, a message of each rank in rank order; return what is due now.

        It is the same on all ranks, and in the same order.
        """
        heard = [msgspec.msgpack.decode(message, type=Message) for message in messages]
        self.completed = min(message.completed for message in heard)
        for rank, message in enumerate(heard):
            for number in message.numbered:
                self._note(rank, self._signatures[number])
        for rank, message in enumerate(heard):
            for signature in message.new:
                self._note(rank, signature)
                if signature.repeats and len(self._signatures) < _MAX_NUMBERED:
                    if signature not in self._numbers:
                        self._signatures.append(signature)
                    self._numbers.setdefault(signature, len(self._signatures) - 1)
            if message.joined and rank not in self._joined:
                self._joined.append(rank)
        due = self._take_due()
        self.last_joined = None
        if len(self._joined) == self.world_size:
            self.last_joined = self._joined[-1]
            self._joined.clear()
        return due

    def _note(self, rank: int, signature: Signature) -> None:
        self._waiting.setdefault(signature.name, {})[rank] = signature

    def _take_due(self) -> list[Due]:
        due = []
        for name, signatures in list(self._waiting.items()):
            if len(signatures.keys() | set(self._joined)) == self.world_size:
                del self._waiting[name]
                due.append(Due(name, signatures, self._problem(name, signatures)))
        return due

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have neither asked for what others wait for nor joined."""
        there = self._waiting.get(name, {}).keys() | set(self._joined)
        return [rank for rank in range(self.world_size) if rank not in there]

    def _problem(self, name: str, signatures: dict[int, Signature]) -> str:
        by_rank = sorted(signatures.items())
        (first_rank, first), *others = by_rank
        for rank, signature in others:
            if signature.agreed() != first.agreed():
                return (
                    f"ranks ask for different things by the name {name!r}: "
                    f"{_text(first)} on rank {first_rank}, {_text(signature)} on rank {rank}"
                )
        if len(by_rank) < self.world_size:
            joined = sorted(set(range(self.world_size)) - signatures.keys())
            if first.kind not in ("allreduce", "sparse") or first.op not in _SUMS:
                what = f"{first.kind} with {first.op}" if first.kind == "allreduce" else first.kind
                return (
                    f"{what} {name!r} needs all ranks and {joined} have joined: they can only "
                    "take part in sums and averages"
                )
        return ""


def batches(due: Iterable[Due], threshold_nbytes: int, itemsize: dict[str, int]) -> list[list[Due]]:
    """Return what travels together: runs of requests that fit, up to a size.

    Parameters
    ----------
    threshold_nbytes : int
        The most bytes of a batch of several requests.
    itemsize : dict of str to int
        Bytes of an element by dtype.
    """
    found: list[list[Due]] = []
    ordered = sorted(due, key=lambda each: each.first.bundle)  # stable: the same on all ranks
    for bundle, members in groupby(ordered, key=lambda each: each.first.bundle):
        room = -1
        for member in members:
            nbytes = member.first.numel * itemsize.get(member.first.dtype, 1)
            if not bundle or nbytes > room:
                found.append([])
                room = threshold_nbytes
            found[-1].append(member)
            room -= nbytes
    return found


def _text(signature: Signature) -> str:
    shapes = ", ".join(str(list(shape)) for shape in signature.shapes)
    parts = [signature.kind, signature.op, signature.dtype, shapes, signature.device]
    text = " ".join(part for part in parts if part)
    return text if signature.factors == (1.0, 1.0) else f"{text} by {signature.factors}"
