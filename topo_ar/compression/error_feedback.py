"""Error feedback: what a codec lost in one step is added to the gradient of the next.

The local form: with e the residual of this rank and g its shard, ``M = g + e`` is reduced, and the
new residual is M minus what of *this member's* M is in the total. It stays bounded where members
see different data; the difference to the mean over all members does not.

References
----------
S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019. H. Tang et al., "DoubleSqueeze", ICML 2019 (errors of both directions).
"""

import functools
from dataclasses import dataclass

import torch

from topo_ar.compression.parts import all_reduce_nbytes
from topo_ar.compression.protocol import Compressor, Group, Layout, Reduced
from topo_ar.compression.state import ResidualStore
from topo_ar.errors import ConfigError

# A learning rate that rises again after a decay to nearly zero must not blow the residual up.
_MAX_RATE_RATIO = 10.0


@dataclass(slots=True)
class _Pending:
    """A bucket's residual of the step at hand, not yet valid."""

    residual: torch.Tensor
    alive: torch.Tensor
    poison: torch.Tensor


class ErrorFeedback:
    """A compressor with the memory of what it lost.

    A step counts only as a whole: residuals and the codec's state change when all its buckets
    turned out finite, at the first call of the next step or in `settle`. Until then they are what
    they were, bit for bit, so a step that a loss scaler skips leaves no trace.

    Parameters
    ----------
    compressor : Compressor
        What reduces.
    decay : float
        Residuals are multiplied by this in each step; 1 keeps everything.

    Attributes
    ----------
    store : ResidualStore
        The residuals, in the units of the shards.
    next_step : int
        One more than the last step seen.
    """

    def __init__(self, compressor: Compressor, decay: float = 1.0) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"the decay of residuals is {decay:g}; it must be between 0 and 1")
        self.compressor = compressor
        self.decay = decay
        self.store = ResidualStore()
        self.next_step = 0
        self._rate: float | None = None
        self._pending: dict[Layout, _Pending] = {}
        self._spare: dict[Layout, torch.Tensor] = {}
        self._discarded = False
        self._shared_for: int | None = None

    def reduce(
        self,
        shard: torch.Tensor,
        layout: Layout,
        rail: Group,
        node: Group,
        step: int,
        *,
        scale: float = 1.0,
        rate: float | None = None,
    ) -> Reduced:
        """Add up shards and residuals of the rail.

        All ranks of the job call this for the same buckets in the same order.

        Parameters
        ----------
        shard : Tensor
            Flat, fp32, fp16 or bf16, ``layout.numel`` elements; not changed.
        layout : Layout
            What the shard is made of.
        rail, node : Group
            See `Compressor.reduce`.
        step : int
            Counts synchronised steps, the same on all ranks; a skipped step counts too.
        scale : float
            The loss scale that the gradients are multiplied by.
        rate : float, optional
            The learning rate; if given, residuals are multiplied by the ratio of the last rate to
            this one, so that what they will do to the weights does not change with the schedule
            (Zheng et al., "Communication-Efficient Distributed Blockwise Momentum SGD with
            Error-Feedback", 2019).

        Returns
        -------
        Reduced
            `total` and `own` in fp32. If any rank of the job had something that is not finite, or
            the codec made it so, `total` is NaN everywhere.
        """
        if step != self.next_step - 1:
            self.settle()
            self.next_step = step + 1
            self._adapt(scale, rate)
        gradient = shard.float()
        residual = self.store.get(layout, shard.device)
        alive = _alive(gradient, layout)
        mass = self._add(gradient, residual, alive, layout)
        on_host = not shard.is_cuda
        poison = mass.new_zeros(())
        if not getattr(self.compressor, "checks_finite", False):
            poison = mass.sum() * 0
            if not on_host:
                mass = torch.where(poison.isnan(), 0, mass)
            elif poison.isnan():
                mass.zero_()
        reduced = self.compressor.reduce(mass, layout, rail, node, step)
        poison = _agree(poison + reduced.poison(), rail, node)
        reduced.take_from(mass)
        self._pending[layout] = _Pending(mass, alive, poison)
        reduced.sent_nbytes += all_reduce_nbytes(rail.size, poison.nbytes)
        # Where nothing is wrong the poison is zero; adding it would only make +0 of -0.
        if not on_host:
            return Reduced(reduced.total + poison, reduced.own, reduced.sent_nbytes)
        if poison.isnan():
            nothing = torch.full_like(gradient, torch.nan)
            return Reduced(nothing, reduced.own, reduced.sent_nbytes)
        return reduced

    def settle(self) -> bool:
        """End the step at hand; return False if it was not finite and leaves no trace.

        Called by the first `reduce` of the next step, and by whoever reads the state.
        """
        finite = self.finite()
        self._discarded = False
        for layout, pending in self._pending.items():
            if finite:
                self._keep(layout, pending)
            else:
                self._spare[layout] = pending.residual
        self._pending.clear()
        return finite

    def finite(self) -> bool:
        """Tell whether all of the step at hand is finite so far."""
        return not (self._discarded or any(map(self.poisoned, self._pending)))

    def poisoned(self, layout: Layout) -> bool:
        """Tell whether the last `reduce` of a layout met something that is not finite, anywhere."""
        return bool(self._pending[layout].poison.isnan())

    def lost(self, layout: Layout) -> torch.Tensor:
        """Return what the last `reduce` of a layout left out here, not to be changed."""
        return self._pending[layout].residual

    def discard(self) -> None:
        """Let the step at hand leave no trace: another part of its gradient is not finite."""
        self._discarded = True

    def reset(self) -> None:
        """Forget residuals and the step at hand, as a new one would be; the codec stays."""
        self._pending.clear()
        self._discarded = False
        self._spare.clear()
        self.store.clear()
        self.next_step = 0
        self._rate = None

    def reshard(
        self,
        layout: Layout,
        node: Group,
        device: torch.device | str = "cpu",
        step: int | None = None,
    ) -> None:
        """Fetch the residuals of a bucket that is new, and the codec's state, inside the node.

        With the number of the step that it is for, buckets of the same step may have been reduced
        already; they are not settled before all are. See `ResidualStore.reshard`.
        """
        if step is None or step != self.next_step - 1:
            self.settle()
        if step is None or step != self._shared_for:
            self.compressor.share(node)
            self._shared_for = step
        self._spare.clear()
        self.store.reshard(layout, node, device)

    def _adapt(self, scale: float, rate: float | None) -> None:
        self.store.rescale(scale)
        if rate is not None and rate > 0:
            if self._rate is not None and rate != self._rate:
                self.store.multiply(min(self._rate / rate, _MAX_RATE_RATIO))
            self._rate = rate

    def _add(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor,
        alive: torch.Tensor,
        layout: Layout,
    ) -> torch.Tensor:
        """Return gradient plus residual, and zero where a piece of the gradient is all zero."""
        out = self._spare.pop(layout, None)
        if out is None:
            out = torch.empty_like(gradient)
        if gradient.is_cuda:
            lengths = _lengths(layout, alive.device)
            mask = alive.float().repeat_interleave(lengths, output_size=layout.numel)
            return torch.addcmul(gradient, residual, mask, value=self.decay, out=out)
        torch.add(gradient, residual, alpha=self.decay, out=out)
        for piece, lives in zip(layout.pieces, alive.tolist(), strict=True):
            if not lives:
                out[piece.offset : piece.offset + piece.end - piece.begin] = 0
        return out

    def _keep(self, layout: Layout, pending: _Pending) -> None:
        before = self.store.get(layout)
        for piece, lives in zip(layout.pieces, pending.alive.tolist(), strict=True):
            if not lives:
                part = slice(piece.offset, piece.offset + piece.end - piece.begin)
                pending.residual[part] += before[part]
        self.store.put(layout, pending.residual)
        self._spare[layout] = before
        self.compressor.commit(layout)


def _alive(gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return for each piece whether its gradient has an element that is not zero.

    A parameter that nobody used keeps its old gradient whatever is reduced for it (DDP gives None),
    so a residual that were sent for it would be lost.
    """
    parts = [gradient[p.offset : p.offset + p.end - p.begin] for p in layout.pieces]
    if gradient.is_cuda:
        return torch.stack([part.any() for part in parts]) if parts else gradient[:0].bool()
    # Nearly always the first few elements tell.
    return torch.tensor([bool(part[:64].any()) or bool(part.any()) for part in parts])


@functools.lru_cache(maxsize=1024)
def _lengths(layout: Layout, device: torch.device) -> torch.Tensor:
    """Return how long each piece is; kept, since copying them makes the host wait."""
    return torch.tensor([p.end - p.begin for p in layout.pieces], device=device)


def _agree(poison: torch.Tensor, rail: Group, node: Group) -> torch.Tensor:
    """Return NaN on all ranks of the job if it is NaN on any; each rank is in one of each group.

    A float per bucket, and thus one that can ride in a message of the codec.
    """
    return rail.all_reduce(node.all_reduce(poison.reshape(1))).reshape(())
