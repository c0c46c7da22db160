"""PowerSGD as `torch.distributed`'s `powerSGD_hook` computes it, bit for bit.

For comparison with results made with that hook. It inherits its behaviour: the global form of error
feedback, Gram-Schmidt for ranks up to 2, factors drawn from a stream by order of buckets. What it
does not inherit is that a step takes effect before it is known to be finite.
"""

import numpy as np
import torch

from topo_ar.compression.factors import flat
from topo_ar.compression.parts import all_reduce_nbytes
from topo_ar.compression.protocol import Group, Layout, Reduced
from topo_ar.errors import ConfigError, PlanError
from topo_ar.planning.codecs import Codec, factors_pay

_State = dict[str, torch.Tensor]


class TorchPowerSGD:
    """`powerSGD_hook` of torch on whole buckets: one rank per node, all ranks in one rail.

    It has an error memory of its own, ``M - mean of all`` (the global form), also for tensors that
    are not compressed, as torch has; so `own` is the whole shard, and an `ErrorFeedback` around it
    keeps nothing. The mean equals torch's bit for bit where the number of ranks is a power of two;
    elsewhere the sum that `Reduced.total` asks for rounds once more.

    Parameters
    ----------
    rank : int
        ``matrix_approximation_rank``.
    seed : int
        ``random_seed``.
    epsilon : float
        ``orthogonalization_epsilon``. With torch's default of 0, a gradient of zeros gives NaN for
        ranks up to 2.

    Raises
    ------
    ConfigError
        If `rank` is not at least 1.
    """

    def __init__(self, rank: int, *, seed: int = 0, epsilon: float = 0.0) -> None:
        if rank < 1:
            raise ConfigError(f"powersgd:{rank}: the rank must be at least 1")
        self.rank = rank
        self.codec = Codec("powersgd", rank)
        self._epsilon = epsilon
        self._stream = np.random.RandomState(seed)
        self._seeds: dict[int, int] = {}
        self._state: _State = {}
        self._pending: dict[int, _State] = {}

    def reduce(
        self, shard: torch.Tensor, layout: Layout, rail: Group, node: Group, step: int
    ) -> Reduced:
        """Add up the buckets of the rail; see `Compressor`.

        Raises
        ------
        PlanError
            If a rank has less than whole buckets.
        """
        if node.size > 1:
            raise PlanError(
                f"torch's PowerSGD compresses whole buckets, but {node.size} ranks of a node hold "
                "shards of this one; use powersgd:RANK, or a plan without stages"
            )
        key = str(layout.bucket)
        work = shard.clone()
        if f"error/{key}" in self._state:
            work += self._state[f"error/{key}"]
        sent_in = work.clone()
        pieces = [work[p.offset : p.offset + p.end - p.begin].view(p.shape) for p in layout.pieces]
        pays = [factors_pay(p.shape, self.rank) for p in layout.pieces]
        matrices = [t.view(len(t), -1) for t, yes in zip(pieces, pays, strict=True) if yes]
        tail = [t for t, yes in zip(pieces, pays, strict=True) if not yes]

        rights = self._rights(layout.bucket, matrices)
        lefts = [torch.bmm(m[None], q) for m, q in zip(matrices, rights, strict=True)]
        message = flat([*lefts, *tail], work)
        sent = all_reduce_nbytes(rail.size, message.nbytes)
        message = rail.all_reduce(message)
        _unpack(message, lefts)
        _unpack(message[sum(p.numel() for p in lefts) :].div_(rail.size), tail)
        for left in lefts:
            _orthogonalize(left, self._epsilon)
        rights = [
            torch.bmm(m[None].transpose(1, 2), p) for m, p in zip(matrices, lefts, strict=True)
        ]
        message = flat(rights, work)
        if message.numel():
            sent += all_reduce_nbytes(rail.size, message.nbytes)
            message = rail.all_reduce(message).div_(rail.size)
            _unpack(message, rights)
        for m, p, q in zip(matrices, lefts, rights, strict=True):
            torch.bmm(p, q.transpose(1, 2), out=m[None])
        self._pending[layout.bucket] = {f"q/{key}": message, f"error/{key}": sent_in - work}
        return Reduced(work * rail.size, shard, sent)

    def commit(self, layout: Layout) -> None:
        """Keep the error memory and Q of the last `reduce` of this layout's bucket."""
        self._state.update(self._pending.pop(layout.bucket, {}))

    def share(self, node: Group) -> None:
        """Do nothing: the node has one rank."""

    def state_dict(self) -> _State:
        """Return, by number of the bucket, Q of all its matrices and this rank's own error memory.

        As in torch, both fit only the same buckets, and the error only the same rank.
        """
        return {key: value.clone() for key, value in self._state.items()}

    def load_state_dict(self, state: _State) -> None:
        """Take over a state."""
        self._state = {key: value.clone() for key, value in state.items()}
        self._pending.clear()

    def _rights(self, bucket: int, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        rights = [m.new_empty(1, m.shape[1], self.rank) for m in matrices]
        if f"q/{bucket}" in self._state:
            _unpack(self._state[f"q/{bucket}"], rights)
        else:
            if bucket not in self._seeds:
                self._seeds[bucket] = self._stream.randint(1_000_000_000)
            generator = torch.Generator().manual_seed(self._seeds[bucket])
            for q in rights:
                q.copy_(torch.randn(*q.shape, dtype=q.dtype, generator=generator))
        for q in rights:
            _orthogonalize(q, self._epsilon)
        return rights


def _unpack(message: torch.Tensor, targets: list[torch.Tensor]) -> None:
    offset = 0
    for target in targets:
        target.copy_(message[offset : offset + target.numel()].view(target.shape))
        offset += target.numel()


def _orthogonalize(matrices: torch.Tensor, epsilon: float) -> None:
    """Orthonormalise the columns in place, as torch does."""
    rank = matrices.shape[2]
    if rank > 2:
        matrices.copy_(torch.linalg.qr(matrices).Q)
        return
    for i in range(rank):
        column = matrices[:, :, i : i + 1]
        column /= torch.norm(column, dim=1, keepdim=True) + epsilon
        rest = matrices[:, :, i + 1 :]
        if i + 1 < rank:
            rest -= torch.sum(column * rest, dim=1, keepdim=True) * column
