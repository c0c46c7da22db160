"""Residuals of error feedback, kept by parameter and interval, whatever the buckets are."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from topo_ar.compression.parts import as_bytes
from topo_ar.compression.protocol import Group, Layout, Piece


@dataclass(frozen=True, slots=True)
class Run:
    """The residual of some neighbouring elements of a parameter.

    Attributes
    ----------
    name, shape
        The parameter's.
    begin, end : int
        The interval of its flattened elements.
    values : Tensor
        fp32, flat, ``end - begin`` elements.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    values: torch.Tensor

    def cut(self, begin: int, end: int) -> "Run":
        """Return the part of the run within an interval that it contains."""
        values = self.values[begin - self.begin : end - self.begin]
        return replace(self, begin=begin, end=end, values=values)


class ResidualStore:
    """What this rank has not sent yet.

    Each element of each parameter is kept by at most one rank of a node. Residuals are flat
    tensors, one a layout, as they are used. When buckets are rebuilt, the old ones are cut where
    new pieces claim them; what a new piece needs and another rank of the node keeps is moved by
    `reshard`. Nothing is dropped, nothing doubled.

    Attributes
    ----------
    scale : float
        The loss scale that residuals are multiplied by.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._flat: dict[Layout, torch.Tensor] = {}
        self._loose: dict[str, list[Run]] = {}

    def get(self, layout: Layout, device: torch.device | None = None) -> torch.Tensor:
        """Return the residual of a layout, fp32 and flat: the kept tensor, not a copy.

        For a layout not seen before it is put together from what this rank keeps of its pieces;
        the rest is zero.
        """
        found = self._flat.get(layout)
        if found is not None:
            return found
        flat = torch.zeros(layout.numel, device=device)
        for piece in layout.pieces:
            for run in self._claim(piece):
                at = piece.offset + run.begin - piece.begin
                flat[at : at + run.end - run.begin] += run.values
        self._flat[layout] = flat
        return flat

    def put(self, layout: Layout, flat: torch.Tensor) -> None:
        """Replace the residual of a layout that `get` has returned before."""
        self._flat[layout] = flat

    def add(self, run: Run) -> None:
        """Keep one more run, until a layout claims it."""
        self._loose.setdefault(run.name, []).append(run)

    def clear(self) -> None:
        """Forget everything."""
        self._flat.clear()
        self._loose.clear()

    def runs(self) -> Iterator[Run]:
        """Yield all that is kept, ordered by parameter and interval; views, not copies."""
        found = [run for runs in self._loose.values() for run in runs]
        found += [run for layout in self._flat for run in self._runs_of(layout)]
        yield from sorted(found, key=lambda run: (run.name, run.begin))

    def multiply(self, factor: float) -> None:
        """Multiply every residual; exact if `factor` is a power of two."""
        for flat in self._flat.values():
            flat.mul_(factor)
        for runs in self._loose.values():
            for run in runs:
                run.values.mul_(factor)

    def rescale(self, scale: float) -> None:
        """Bring the residuals to another loss scale."""
        if scale != self.scale:
            self.multiply(scale / self.scale)
            self.scale = scale

    def missing(self, layout: Layout) -> list[Piece]:
        """Return the parts of a layout's pieces that this rank does not keep."""
        gaps = []
        runs = list(self.runs())
        for piece in layout.pieces:
            at = piece.begin
            for run in runs:
                if run.name != piece.name or run.end <= at or run.begin >= piece.end:
                    continue
                if run.begin > at:
                    gaps.append(_part(piece, at, run.begin))
                at = max(at, run.end)
            if at < piece.end:
                gaps.append(_part(piece, at, piece.end))
        return gaps

    def reshard(self, layout: Layout, node: Group, device: torch.device | str = "cpu") -> None:
        """Fetch from the ranks of the node what they keep of a layout's pieces.

        A collective of the node: all its ranks call it, each with its own layout, whenever the
        buckets have changed, and before `get`. `device` is where the node's group works.
        """
        wanted = json.dumps([(p.name, p.begin, p.end) for p in layout.pieces])
        headers, bodies = [], []
        for member, text in enumerate(node.all_gather(_text(wanted, device))):
            given: list[Run] = []
            if member != node.index:
                for name, begin, end in json.loads(_read(text)):
                    given += self._claim(Piece(name, (), begin, end, 0))
            header = json.dumps([(r.name, r.shape, r.begin, r.end) for r in given])
            headers.append(_text(header, device))
            empty = torch.empty(0, device=device)
            bodies.append(torch.cat([empty, *(r.values.to(device) for r in given)]))
        for text, body in zip(node.all_to_all(headers), node.all_to_all(bodies), strict=True):
            at = 0
            for name, shape, begin, end in json.loads(_read(text)):
                values = body[at : at + end - begin].clone()
                self.add(Run(name, tuple(shape), begin, end, values))
                at += end - begin

    def _runs_of(self, layout: Layout) -> list[Run]:
        flat = self._flat[layout]
        return [
            Run(p.name, p.shape, p.begin, p.end, flat[p.offset : p.offset + p.end - p.begin])
            for p in layout.pieces
            if p.end > p.begin
        ]

    def _claim(self, piece: Piece) -> list[Run]:
        """Take out what is kept of a piece; a layout that it overlaps is no longer in use."""
        for layout in [x for x in self._flat if any(_overlap(p, piece) for p in x.pieces)]:
            for run in self._runs_of(layout):
                self.add(run)
            del self._flat[layout]
        taken, left = [], []
        for run in self._loose.pop(piece.name, []):
            begin, end = max(run.begin, piece.begin), min(run.end, piece.end)
            if begin >= end:
                left.append(run)
                continue
            taken.append(run.cut(begin, end))
            if run.begin < begin:
                left.append(run.cut(run.begin, begin))
            if end < run.end:
                left.append(run.cut(end, run.end))
        if left:
            self._loose[piece.name] = left
        return taken


def union(state: dict[str, torch.Tensor], node: Group) -> dict[str, torch.Tensor]:
    """Return what any rank of the node has by name: a codec's state may be spread over it."""
    header = json.dumps(
        [(key, tuple(v.shape), str(v.dtype).removeprefix("torch.")) for key, v in state.items()]
    )
    device = next((value.device for value in state.values()), torch.device("cpu"))
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    mine = torch.cat([empty, *(as_bytes(value.reshape(-1)) for value in state.values())])
    found = {}
    texts, bodies = node.all_gather(_text(header, device)), node.all_gather(mine)
    for text, body in zip(texts, bodies, strict=True):
        at = 0
        for key, shape, kind in json.loads(_read(text)):
            dtype = getattr(torch, kind)
            nbytes = math.prod(shape) * dtype.itemsize
            found[key] = body[at : at + nbytes].clone().view(dtype).view(shape)
            at += nbytes
    return found


def _overlap(one: Piece, other: Piece) -> bool:
    return one.name == other.name and max(one.begin, other.begin) < min(one.end, other.end)


def _part(piece: Piece, begin: int, end: int) -> Piece:
    return replace(piece, begin=begin, end=end, offset=piece.offset + begin - piece.begin)


def _text(text: str, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def _read(text: torch.Tensor) -> bytes:
    return bytes(text.tolist())
