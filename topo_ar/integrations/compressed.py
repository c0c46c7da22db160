"""Buckets whose shards travel compressed between nodes: the part of the hook that does it.

A bucket is summed exactly inside the node, each local rank reduces its shard over the rail by a
codec with error feedback, and the node gathers the shards: ``bucket = total / world size`` in the
bucket's dtype, with the same bits on all ranks.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from topo_ar.compression import drift as drifts
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.protocol import Compressor
from topo_ar.compression.registry import make
from topo_ar.compression.rows import average_rows
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.fingerprint import fingerprint
from topo_ar.execution.node_group import NodeGroup
from topo_ar.execution.rail_group import RailGroup
from topo_ar.integrations.bucket import Bucket
from topo_ar.integrations.compression_buckets import (
    BucketState,
    CompressionReport,
    Part,
    Place,
    arrange,
)
from topo_ar.integrations.compression_choice import Choose, CompressionSettings
from topo_ar.integrations.compression_costs import costs_here
from topo_ar.integrations.compression_stream import Stream
from topo_ar.planning.codec_costs import CPU_COSTS, GPU_COSTS
from topo_ar.planning.codecs import NONE, Codec

if TYPE_CHECKING:
    from topo_ar.integrations.compression_auto import Auto

logger = logging.getLogger("topo_ar")

Future = torch.futures.Future[torch.Tensor]
Done = Callable[[], None] | None

_COMPRESSIBLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Step:
    """The step at hand; the last two are written on the communication thread."""

    number: int = -1
    loss_scale: float = 1.0
    spoiled: bool = False
    drift: dict[Codec, drifts.Drift] = field(default_factory=dict)


class CompressedReduction:
    """Averages the buckets of a DDP, those that it may with codecs.

    All ranks make one together and call it for the same buckets in the same order. What it decides
    on the way it decides from figures that are the same on all of them.

    Parameters
    ----------
    communicator : Communicator
        Over the ranks of the DDP's process group.
    parameters : mapping of str to Parameter
        The model's.
    settings : CompressionSettings
        What is asked for.

    Attributes
    ----------
    auto : Auto or None
        Chooses the codecs where none are named.
    costs : CodecCosts
        What codecs cost: measured here, where there is something to compress.
    loss_scale : callable
        Returns what the loss of a step is multiplied by.
    reason : str
        Why nothing is compressed, or why what is.
    streams : dict
        By codec that was asked for.

    Raises
    ------
    ConfigError
        If a pattern of `settings` fits no parameter.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: Mapping[str, torch.Tensor],
        settings: CompressionSettings,
    ) -> None:
        self.communicator = communicator
        self.settings = settings
        self.parameters = {name: tuple(p.shape) for name, p in parameters.items()}
        self.choose = settings.choice(parameters)
        self.streams: dict[Codec, Stream] = {}
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.auto: Auto | None = None
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._step = _Step()
        self._num_seen = 0
        self._buckets: dict[int, tuple[tuple[object, ...], BucketState | None]] = {}
        self._said: set[str] = set()
        # The power of two by which sums are divided before they are rounded; that is exact.
        self._headroom = 2.0 ** math.ceil(math.log2(communicator.world_size))
        nodes = communicator.nodes
        node = next(node for node in nodes if communicator.rank in node)
        self._place = Place(node.index(communicator.rank), len(node), len(nodes))
        self.why_not = communicator.groups_reason or (
            "there is one node, and so no wire in between" if len(nodes) == 1 else ""
        )
        on_cpu = any(parameter.is_cpu for parameter in parameters.values())
        self.costs = (
            GPU_COSTS
            if not on_cpu
            else CPU_COSTS
            if self.why_not
            else costs_here(communicator, settings)
        )
        self.reason = self.why_not and f"nothing is compressed: {self.why_not}"
        self.say(self.reason)
        for warning in settings.warnings:
            self.say(warning, logging.WARNING)

    @property
    def next_step(self) -> int:
        """One more than the number of the step at hand."""
        return self._step.number + 1

    @property
    def stays_exact(self) -> bool | None:
        """Whether nothing is compressed from now on; None as long as that is to be decided."""
        if self.why_not:
            return True
        if self.auto is None:
            return not self.settings.codecs
        if not self.auto.done:
            return None
        return all(stream.off or stream.flushing for stream in self.streams.values())

    @property
    def scale(self) -> float:
        """What shards are multiplied by: the loss scale, less the headroom."""
        return self._step.loss_scale / self._headroom

    def begin(self, bucket: Bucket) -> None:
        """Take note of a call of the hook: the first bucket begins a step.

        The numbers of buckets restart in each synchronised backward, and for ranks that have run
        out of batches in its shadow: nothing else does on all ranks.
        """
        if bucket.index() or self.why_not:
            return
        self.settle()
        if self.ended():
            return
        for codec, found in self._step.drift.items():
            if text := self.streams[codec].heed(found):
                self._buckets.clear()
                self.say(f"step {self._step.number}: {text}", logging.WARNING)
        self._step = _Step(self._step.number + 1, float(self.loss_scale()))
        self._num_seen += 1
        for stream in self.streams.values():
            if stream.flushing:
                stream.flushing, stream.off = False, True
                self._buckets.clear()
        if self.auto is not None and self._step.number >= self.settings.start_step:
            self.auto.begin(self._num_seen)
        for stream in self.streams.values():
            self._warm_up(stream)

    def _warm_up(self, stream: Stream) -> None:
        if steps := self.settings.warm_up_steps:
            stream.warm_up((self._step.number - self.settings.start_step) / steps)

    def ended(self) -> bool:
        """Tell whether nothing is compressed any more, as when the job left the fast path."""
        reason = self.communicator.groups_reason
        if reason and not self.why_not:
            self.end(reason)
        return bool(self.why_not)

    def end(self, reason: str) -> None:
        """Compress no more, from the step that begins on; all ranks do so in the same step."""
        self.why_not = reason
        self.reason = f"compression ends, and what was not sent is dropped: {reason}"
        self._buckets.clear()
        self.say(self.reason, logging.WARNING)

    def settle(self) -> None:
        """End the step at hand: if anything was not finite, it leaves no trace anywhere."""
        feedbacks = [stream.feedback for stream in self.streams.values()]
        if self._step.spoiled or not all(feedback.finite() for feedback in feedbacks):
            for feedback in feedbacks:
                feedback.discard()
        for feedback in feedbacks:
            feedback.settle()

    def go_on(self, next_step: int) -> None:
        """Go on at another step, with buckets that fetch their residuals anew."""
        self.settle()
        self._step = _Step(next_step - 1)
        self._buckets.clear()

    def reduce(self, bucket: Bucket, tensor: torch.Tensor, on_done: Done) -> Future:
        """Average a bucket over all ranks, in place; see `Communicator.all_reduce`."""
        if self.why_not:
            return self._exactly(tensor, on_done)
        if tensor.layout is not torch.strided:
            return self._by_rows(bucket.index(), tensor, on_done)
        found = None
        if self._step.number >= self.settings.start_step:
            found = self._bucket(bucket, tensor)
        if found is None:
            return self._exactly(tensor, on_done)
        work = partial(self._work, found, tensor, self._goes_both_ways(bucket.index()))
        mark = found.fingerprint ^ self.next_step
        return self.communicator.run(tensor, work, mark, on_done, averages=True)

    def _exactly(self, tensor: torch.Tensor, on_done: Done) -> Future:
        def done() -> None:
            # A loss scaler that sees it here skips the step of all parameters.
            if self.streams:
                self._watch(tensor)
            if on_done is not None:
                on_done()

        return self.communicator.all_reduce(tensor, dist.ReduceOp.AVG, done, name="bucket")

    def _watch(self, tensor: torch.Tensor) -> None:
        values = tensor.detach()
        values = values.coalesce().values() if values.is_sparse else values
        if values.is_floating_point():
            wide = torch.promote_types(values.dtype, torch.float32)
            self._step.spoiled |= not math.isfinite(values.sum(dtype=wide))

    def _by_rows(self, index: int, tensor: torch.Tensor, on_done: Done) -> Future:
        if tensor.sparse_dim() != 1 or not tensor.is_floating_point() or not tensor.is_cpu:
            self.say("sparse gradients without whole rows of floats on CPU take the plain path")
            return self._exactly(tensor, on_done)
        self.say("sparse gradients are exact, their rows being exchanged, whatever the codec")
        mark = fingerprint(f"rows {index} {tuple(tensor.shape)} {tensor.dtype}".encode())
        work = partial(self._work_by_rows, tensor)
        mark ^= self.next_step
        return self.communicator.run(tensor, work, mark, on_done, averages=True)

    def _work_by_rows(self, tensor: torch.Tensor, node: NodeGroup, rail: RailGroup) -> None:
        average_rows(tensor, rail, node, self.communicator.world_size)
        self._watch(tensor)

    def _bucket(self, bucket: Bucket, tensor: torch.Tensor) -> BucketState | None:
        """Return what is known of a bucket; None where all of it is reduced exactly."""
        parameters = bucket.parameters()
        key = (tensor.dtype, tensor.device.type, *map(id, parameters))
        before, found = self._buckets.get(bucket.index(), ((), None))
        if before != key:
            named = {self._names[id(parameter)]: parameter for parameter in parameters}
            if tensor.is_cpu and tensor.dtype in _COMPRESSIBLE:
                streams = {n: self.stream_of(self._codec(n, tensor.dtype)) for n in named}
                found = arrange(bucket.index(), named, streams, tensor.dtype, self._place)
            else:
                self.say(
                    f"bucket {bucket.index()} ({', '.join(list(named)[:3])}, ...) stays exact: "
                    f"codecs take float buckets on the CPU, not {tensor.dtype} on "
                    f"{tensor.device.type}"
                )
                found = None
            self._buckets[bucket.index()] = key, found
        return found

    def _codec(self, name: str, dtype: torch.dtype) -> Codec:
        codec = self.choose(name)
        if codec == NONE or codec.shortens(dtype.itemsize):
            return codec
        self.say(f"gradients of {dtype} stay exact, for {codec} would not make them shorter")
        return NONE

    def stream_of(self, codec: Codec) -> Stream | None:
        """Return what reduces with a codec that was asked for; made if need be."""
        if codec == NONE:
            return None
        stream = self.streams.get(codec)
        if stream is None:
            stream = self.streams[codec] = Stream(codec, ErrorFeedback(make(codec)))
            self._warm_up(stream)
            self.say(f"step {self._step.number}: {codec} between nodes from here on")
        return None if stream.off else stream

    def _work(
        self,
        bucket: BucketState,
        tensor: torch.Tensor,
        both_ways: bool,
        node: NodeGroup,
        rail: RailGroup,
    ) -> None:
        """Reduce a bucket, on the communication thread."""
        before = rail.sent_nbytes
        fresh, bucket.fresh = bucket.fresh, False
        flat = tensor.view(-1)
        for part in bucket.parts:
            vector = part.take(flat)
            shard = node.reduce_scatter(vector, part.bounds)
            if part.stream is None:
                mean = rail.all_reduce(shard).div_(self.communicator.world_size)
                node.all_gather_into(vector, part.bounds, mean.to(vector.dtype))
                self._watch(vector)  # all of it, which is the same on all ranks
            else:
                if fresh:
                    part.stream.feedback.reshard(part.shard, node, step=self._step.number)
                self._compressed(part, part.stream, shard, vector, both_ways, node, rail)
            part.put(flat, vector)
        bucket.sent_nbytes = rail.sent_nbytes - before

    def _compressed(
        self,
        part: Part,
        stream: Stream,
        shard: torch.Tensor,
        vector: torch.Tensor,
        both_ways: bool,
        node: NodeGroup,
        rail: RailGroup,
    ) -> None:
        """Reduce a shard by its codec and write the mean of the whole part to `vector`."""
        feedback, layout = stream.feedback, part.shard
        shard.mul_(1 / self._headroom)
        reduced = feedback.reduce(shard, layout, rail, node, self._step.number, scale=self.scale)
        finite = not feedback.poisoned(layout)
        if both_ways and finite:
            lost = feedback.lost(layout)
            found = drifts.measure(shard, reduced.own, lost, reduced.total, rail, node)
            self._step.drift[stream.asked] = found
        divisor = self.communicator.world_size / self._headroom
        gather = getattr(feedback.compressor, "gather", None)
        if gather is None or not finite:
            mean = reduced.total.div_(divisor).to(vector.dtype)
            node.all_gather_into(vector, part.bounds, mean)
            return
        # Every rank decodes all shards where they belong, in place of copying them from another.
        wide = vector if vector.dtype == torch.float32 else torch.empty(vector.numel())
        gather(reduced, layout, node, [wide[a:b] for a, b in pairwise(part.bounds)])
        if divisor != 1:
            torch.div(wide, divisor, out=wide)
        if wide is not vector:
            vector.copy_(wide)

    def _goes_both_ways(self, index: int) -> bool:
        """Tell whether the drift guard looks at this bucket in this step: they take turns."""
        every = self.settings.guard_steps
        if not every or self.next_step % every or (self.auto and self.auto.trying):
            return False
        coded = sorted(number for number, (_, found) in self._buckets.items() if found)
        return coded[self.next_step // every % len(coded)] == index

    def change(self, codec: Codec, choose: Choose, compressor: Compressor) -> None:
        """Let all that is compressed go with another codec from the next bucket on.

        Residuals stay with their parameters; there is one stream.
        """
        self.choose = choose
        self._buckets.clear()
        if not self.streams:
            self.stream_of(codec)
        (stream,) = self.streams.values()
        stream.asked = codec
        stream.feedback.compressor = compressor
        self.streams = {codec: stream}

    def pause(self) -> None:
        """Compress nothing from the next bucket on; what was not sent is kept."""
        self.choose = lambda name: NONE
        self._buckets.clear()

    def flush(self) -> None:
        """Send exactly, in the step that begins, what was not sent; then nothing is compressed."""
        self._buckets.clear()
        ((asked, stream),) = self.streams.items()
        stream.feedback.compressor = make(NONE)
        stream.flushing = True
        self.choose = lambda name: asked

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Log a sentence once, on rank 0."""
        if text and text not in self._said:
            self._said.add(text)
            if self.communicator.rank == 0:
                logger.log(level, "%s", text)

    def report(self) -> CompressionReport:
        """Return what runs now."""
        known = (bucket for _, (_, bucket) in sorted(self._buckets.items()))
        buckets = tuple(b.report() for b in known if b is not None)
        return CompressionReport(self.reason, buckets, self.costs)
