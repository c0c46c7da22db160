"""A bucket as compression sees it: its parameters by codec, and where a node's ranks cut them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from topo_ar.compression.parts import all_reduce_nbytes, part_of
from topo_ar.compression.protocol import Layout, Piece
from topo_ar.compression.shards import shard_bounds
from topo_ar.execution.fingerprint import fingerprint
from topo_ar.integrations.compression_stream import Stream
from topo_ar.planning.codec_costs import CPU_COSTS, CodecCosts
from topo_ar.planning.codecs import NONE, Codec, stays_exact


@dataclass(frozen=True, slots=True)
class Part:
    """The parameters of a bucket that share a codec.

    Attributes
    ----------
    stream : Stream or None
        None for those that are reduced exactly.
    runs : tuple of (int, int)
        Where they are in the bucket.
    bounds : tuple of int
        Where they are cut into the shards of the node, one run after the other.
    shard : Layout
        This rank's shard.
    """

    stream: Stream | None
    runs: tuple[tuple[int, int], ...]
    bounds: tuple[int, ...]
    shard: Layout

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of a flat bucket: a view where it is one run."""
        if len(self.runs) == 1:
            return flat[slice(*self.runs[0])]
        return torch.cat([flat[begin:end] for begin, end in self.runs])

    def put(self, flat: torch.Tensor, vector: torch.Tensor) -> None:
        """Write back what `take` returned."""
        if len(self.runs) == 1:
            return
        lengths = [end - begin for begin, end in self.runs]
        for (begin, end), run in zip(self.runs, torch.split(vector, lengths), strict=True):
            flat[begin:end] = run


@dataclass(slots=True)
class BucketState:
    """A bucket as it is now; `fresh` until its residuals have been fetched.

    `sent_nbytes` is what this rank sent for it in the last step, `dense_nbytes` what an exact
    all-reduce between nodes would send.
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    fingerprint: int
    dense_nbytes: int
    fresh: bool = True
    sent_nbytes: int = 0

    def report(self) -> "BucketReport":
        """Return it in words and figures."""
        codecs = (part.stream.codec if part.stream else NONE for part in self.parts)
        return BucketReport(
            tuple(map(str, codecs)), self.names, self.sent_nbytes, self.dense_nbytes
        )


@dataclass(frozen=True, slots=True)
class BucketReport:
    """What runs for a bucket, and the bytes that this rank sent to other nodes in the last step.

    `dense_nbytes` is what it would send for an exact all-reduce between nodes.
    """

    codecs: tuple[str, ...]
    parameters: tuple[str, ...]
    sent_nbytes: int
    dense_nbytes: int


@dataclass(frozen=True, slots=True)
class CompressionReport:
    """What compression does now.

    Attributes
    ----------
    reason : str
        Why nothing is compressed, or why what is; empty where that is just what was asked for.
    buckets : tuple of BucketReport
        Those that are compressed, in the order of the hook's calls.
    costs : CodecCosts
        What the planner takes codecs to cost; `costs.source` says whether they are measured, and
        `costs.measured` which.
    """

    reason: str = ""
    buckets: tuple[BucketReport, ...] = ()
    costs: CodecCosts = CPU_COSTS

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all these buckets that this rank sent in a step."""
        return sum(bucket.sent_nbytes for bucket in self.buckets)

    @property
    def dense_nbytes(self) -> int:
        """The same for exact all-reduces."""
        return sum(bucket.dense_nbytes for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: its place in the node, the node's number of ranks, the number of nodes."""

    local: int
    num_local: int
    num_nodes: int


def arrange(
    index: int,
    parameters: Mapping[str, torch.Tensor],
    streams: Mapping[str, Stream | None],
    dtype: torch.dtype,
    place: Place,
) -> BucketState | None:
    """Return the state of bucket `index`; None if all of it is reduced exactly.

    Parameters
    ----------
    index : int
        The bucket's number.
    parameters : mapping of str to Tensor
        Its parameters by name, in its order, without gaps between them.
    streams : mapping of str to Stream or None
        What reduces each of them.
    dtype : torch.dtype
        The bucket's.
    place : Place
        Where this rank is.
    """
    pieces: dict[Codec, list[Piece]] = {NONE: []}
    used = {stream.asked: stream for stream in streams.values() if stream}
    at = 0
    for name, parameter in parameters.items():
        stream = streams[name]
        piece = Piece(name, tuple(parameter.shape), 0, parameter.numel(), at)
        # Codecs send as fp32 what they leave in full, and that is not exact here.
        if dtype == torch.float64 and stays_exact(piece.shape):
            stream = None
        pieces.setdefault(stream.asked if stream else NONE, []).append(piece)
        at += parameter.numel()
    for asked, stream in used.items():
        if not stream.flushing and not any(
            stream.codec.compresses(piece.shape) for piece in pieces[asked]
        ):
            pieces[NONE] += pieces.pop(asked)
    if pieces.keys() == {NONE}:
        return None
    parts = tuple(
        _part(index, used.get(asked), sorted(found, key=lambda piece: piece.offset), place)
        for asked, found in pieces.items()
        if found
    )
    cuts = [(str(part.stream and part.stream.codec), part.bounds) for part in parts]
    text = f"{index} {dtype} {list(parameters)} {cuts}"
    mine = sum(part.shard.numel for part in parts)
    dense = all_reduce_nbytes(place.num_nodes, mine * dtype.itemsize)
    return BucketState(tuple(parameters), parts, fingerprint(text.encode()), dense)


def _part(index: int, stream: Stream | None, pieces: Sequence[Piece], place: Place) -> Part:
    runs: list[tuple[int, int]] = []
    packed = []
    at = 0
    for piece in pieces:
        begin, end = piece.offset, piece.offset + piece.end
        if runs and runs[-1][1] == begin:
            begin, _ = runs.pop()
        runs.append((begin, end))
        packed.append(Piece(piece.name, piece.shape, 0, piece.end, at))
        at += piece.end
    whole = Layout(index, tuple(packed))
    bounds = shard_bounds(whole, stream.codec if stream else NONE, place.num_local)
    shard = part_of(whole, bounds[place.local], bounds[place.local + 1])
    return Part(stream, tuple(runs), bounds, shard)
