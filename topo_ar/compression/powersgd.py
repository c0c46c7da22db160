"""PowerSGD: matrices as products of two thin factors, which can be added up.

A matrix M (a x b) is replaced by its projection on r directions: P = M Q, P^ an orthonormal basis
of P's columns, Q = M' P^, and P^ Q' stands for M; a basis of Q starts the next step. Both P and Q
are linear in M, so that two all-reduces give the projection of the sum, and the rows of M may be
spread over the ranks of a node: all is as if one rank held them (a test compares the two). Tensors
whose factors are not at least twice smaller travel exactly, in the same messages.

Factors are kept transposed, r x a and r x b: on CPU their products with M are many times faster so.

No matrix is transposed to make P the smaller factor: the bytes are the same, orthogonalising is a
small part of the work, and the result must not depend on how the shards are cut.

References
----------
T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019.
A. Ramesh et al., "Zero-Shot Text-to-Image Generation", ICML 2021, appendix E (shards of a node).
S. Shi et al., "ACP-SGD: Alternate Low-rank Compression", ICDCS 2023 (one all-reduce a step).
"""

import math
from collections.abc import Mapping, Sequence

import torch

from topo_ar.compression.factors import Factors, decode, draw, flat, unflat
from topo_ar.compression.matrices import Arrangement, Matrix, arrange, exchange_layouts
from topo_ar.compression.orthogonal import orthogonalize
from topo_ar.compression.parts import all_reduce_nbytes, alone
from topo_ar.compression.powersgd_job import Job, LowRank, Sums
from topo_ar.compression.protocol import Group, Layout, Reduced
from topo_ar.compression.state import union
from topo_ar.errors import ConfigError
from topo_ar.planning.codecs import Codec


class PowerSGD:
    """PowerSGD on the shards of a node, in the local form of error feedback.

    What `reduce` reports as a node's own is ``P^ (P^' M_node)``: the projection of what this node
    contributed, so that the error memory stays bounded even where nodes see different data.

    All replicas decode from the same bits: each left factor is added up and orthogonalised by one
    node, between the two halves of its all-reduce; the right ones are all-reduced.

    Parameters
    ----------
    rank : int
        Columns of the factors, r.
    seed : int
        Of the first Q, which is drawn by (seed, parameter name), in whatever order.
    alternating : bool
        One all-reduce a step instead of two, with half the bytes: even steps renew Q with the P
        of the step before, odd steps renew P. Here each node orthogonalises for itself, so that
        bit-identical replicas need processors of one kind.

    Raises
    ------
    ConfigError
        If `rank` is not at least 1.

    Notes
    -----
    A node may send a little more or less than the planned bytes of the first all-reduce, because
    one node answers for a whole matrix; the sum over the nodes is exact.

    A `Layout` object stands for one bucketing: the ranks of a node exchange their layouts whenever
    they are given a new object, so all must get one together.
    """

    def __init__(self, rank: int, *, seed: int = 0, alternating: bool = False) -> None:
        if rank < 1:
            raise ConfigError(f"powersgd:{rank}: the rank must be at least 1")
        self.rank = rank
        self.alternating = alternating
        self.codec = Codec("powersgd", rank)
        self._seed = seed
        self._state: dict[str, torch.Tensor] = {}
        self._arranged: dict[int, tuple[Layout, Arrangement]] = {}
        self._pending: dict[int, dict[str, torch.Tensor]] = {}
        self._last: dict[int, Sums] = {}

    @property
    def checks_finite(self) -> bool:
        """Whether `Reduced.poison` finds also a shard that is not finite."""
        return not self.alternating

    def reduce(
        self, shard: torch.Tensor, layout: Layout, rail: Group, node: Group, step: int
    ) -> Reduced:
        """Add up the shards of the rail; see `Compressor`. fp64 shards are computed in fp64.

        `sent_nbytes` counts what goes along the rail, not what is exchanged inside the node. With
        one node nothing is compressed.

        Raises
        ------
        PlanError
            If a shard cuts through a row of a matrix; the same on all ranks of a node.
        """
        if rail.size == 1:
            self._last.pop(layout.bucket, None)
            return alone(shard)
        arrangement = self._arrangement(layout, rail, node, shard.device)
        job = Job(shard, arrangement, self.rank, rail, node)
        if not self.alternating:
            sums, kept = self._two_rounds(job)
        elif step % 2 == 0:
            sums, kept = self._renew_right(job)
        else:
            sums, kept = self._renew_left(job)
        self._last[layout.bucket] = sums
        self._pending[layout.bucket] = kept
        return LowRank(sums, job, arrangement, shard)

    def gather(
        self, reduced: Reduced, layout: Layout, node: Group, outs: Sequence[torch.Tensor]
    ) -> None:
        """Write the totals of all shards of the node to `outs`, from their factors.

        All ranks of the node call it together, with what `reduce` returned last for this bucket.
        It moves r (a + b) elements of a matrix where the total has a b.

        Parameters
        ----------
        outs : sequence of Tensor
            By local rank, flat, of the dtype of the shards; each gets the bits of that `total`.
        """
        if layout.bucket not in self._last:
            for out, total in zip(outs, node.all_gather(reduced.total), strict=True):
                out.copy_(total)
            return
        sums = self._last[layout.bucket]
        _, arrangement = self._arranged[layout.bucket]
        held = arrangement.held(node.index)
        mine = [sums.tail]
        mine += [sums.left[m.name] for m in held]
        mine += [sums.right[m.name] for m in held if not m.spread]
        messages = node.all_gather(flat(mine, sums.tail))
        for local, (message, out) in enumerate(zip(messages, outs, strict=True)):
            held = arrangement.held(local)
            numel = sum(arrangement.tail_shares[local])
            arrangement.put_tail(out, local, message[:numel])
            rows = {m.name: (self.rank, m.blocks[local].rows) for m in held}
            left, rest = unflat(message[numel:], rows)
            columns = {m.name: (self.rank, m.columns) for m in held if not m.spread}
            right = sums.right | unflat(rest, columns)[0]
            for matrix in held:
                decode(left[matrix.name], right[matrix.name], matrix.view(out, local))

    def commit(self, layout: Layout) -> None:
        """Keep the factors that the last `reduce` of this layout's bucket made."""
        kept = self._pending.pop(layout.bucket, {})
        outdated = {key.rpartition("/")[0] for key in kept if "/p/" in key}
        self._state = {k: v for k, v in self._state.items() if k.rpartition("/")[0] not in outdated}
        self._state.update(kept)

    def share(self, node: Group) -> None:
        """Let each rank of the node know the factors in use: another may hold the rows next."""
        self._state = union(self.state_dict(), node)

    def state_dict(self) -> Factors:
        """Return what this rank uses: Q (r x b) as ``NAME/q``; alternating also ``NAME/p/BEGIN``.

        The latter are rows of P from row BEGIN on (r x rows). A node's state is the union of its
        ranks'; all nodes have the same.
        """
        used = {
            matrix.name
            for layout, arrangement in self._arranged.values()
            for matrix in arrangement.matrices
            if matrix.spread or any(piece.name == matrix.name for piece in layout.pieces)
        }
        return {
            key: factor.clone()
            for key, factor in self._state.items()
            if not used or key.removesuffix("/q").partition("/p/")[0] in used
        }

    def load_state_dict(self, state: Factors) -> None:
        """Take over the state of a node, whatever the cut of its shards was.

        Raises
        ------
        ConfigError
            If it was made with another rank.
        """
        for key, factor in state.items():
            if factor.shape[0] != self.rank:
                raise ConfigError(
                    f"the state of {key!r} was made with rank {factor.shape[0]}, not {self.rank}; "
                    f"load it into powersgd:{factor.shape[0]}, or start without it"
                )
        self._state = {key: factor.clone() for key, factor in state.items()}
        self._pending.clear()

    def _arrangement(
        self, layout: Layout, rail: Group, node: Group, device: torch.device
    ) -> Arrangement:
        found = self._arranged.get(layout.bucket)
        if found is None or found[0] is not layout:
            layouts = exchange_layouts(layout, node, device)
            found = layout, arrange(layouts, self.rank, rail.size)
            self._arranged[layout.bucket] = found
        return found[1]

    def _two_rounds(self, job: Job) -> tuple[Sums, Factors]:
        queries = self._rights(job)
        left, tail, sent = job.sum_left(job.times_columns(queries))
        own_right, right, _, more = job.sum_right(job.times_rows(left), job.tail[:0])
        sums = Sums(left, right, left, own_right, tail, sent + more)
        return sums, _renewed(right, queries)

    def _renew_right(self, job: Job) -> tuple[Sums, Factors]:
        left = job.orthogonalize(job.known, {m.name: self._left(m, job) for m in job.known})
        own_right, right, tail, sent = job.sum_right(job.times_rows(left), job.tail)
        sums = Sums(left, right, left, own_right, tail, sent)
        return sums, _renewed(right, self._rights(job))

    def _renew_left(self, job: Job) -> tuple[Sums, Factors]:
        right = self._rights(job)
        own_left = job.times_columns(right)
        message = flat([*own_left.values(), job.tail], job.tail)
        left, tail = unflat(job.rail.all_reduce(message), job.rows(job.held))
        sent = all_reduce_nbytes(job.rail.size, message.nbytes)
        kept = {f"{m.name}/p/{m.blocks[job.local].begin}": left[m.name] for m in job.held}
        return Sums(left, right, own_left, right, tail, sent), kept

    def _rights(self, job: Job) -> Factors:
        """Return Q of each matrix that this rank knows: as it was kept, or a basis drawn."""
        rights = {}
        for matrix in job.known:
            right = self._state.get(f"{matrix.name}/q")
            if right is None:
                right = self._drawn(matrix.name, matrix.columns, job.tail)
            rights[matrix.name] = right.to(job.tail)
        return rights

    def first_state(self, shapes: Mapping[str, Sequence[int]]) -> Factors:
        """Return the state before the first step, for parameters of these shapes by name."""
        return {
            f"{name}/q": self._drawn(name, math.prod(shape[1:]), torch.empty(0))
            for name, shape in shapes.items()
            if self.codec.compresses(tuple(shape))
        }

    def _drawn(self, name: str, columns: int, like: torch.Tensor) -> torch.Tensor:
        drawn = draw(self._seed, f"{name}/q", self.rank, columns)
        return orthogonalize([drawn.to(like)])[0]

    def _left(self, matrix: Matrix, job: Job) -> torch.Tensor:
        """Return the rows of P here; where none are kept, they are drawn."""
        block = matrix.blocks[job.local]
        last = max(b.end for b in matrix.blocks)
        left = draw(self._seed, f"{matrix.name}/p", self.rank, last).to(job.tail)
        prefix = f"{matrix.name}/p/"
        for key, rows in self._state.items():
            if key.startswith(prefix):
                begin = int(key.removeprefix(prefix))
                left[:, begin : begin + rows.shape[1]] = rows
        return left[:, block.begin : block.end].contiguous()


def _renewed(right: Factors, before: Factors) -> Factors:
    """Return bases of the right factors to start the next step from.

    Orthonormal, so that its P has the condition of M and not of M M'. A direction in which there
    was nothing stays as it was before.
    """
    kept = {}
    for (name, new), basis in zip(right.items(), orthogonalize(list(right.values())), strict=True):
        found = new.any(1, keepdim=True) & (basis.square().sum(1, keepdim=True) > 0.5)
        kept[f"{name}/q"] = torch.where(found, basis, before[name])
    return kept
