"""What is reduced with one codec, and how that changes in the course of a training."""

from dataclasses import dataclass

from topo_ar.compression import drift as drifts
from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.registry import make
from topo_ar.planning.codecs import NONE, Codec


@dataclass(slots=True)
class Stream:
    """What is reduced with one codec: its error memory, and what has become of it.

    Attributes
    ----------
    asked : Codec
        The codec that was asked for; the drift guard may have taken another.
    backed_off, off : bool
        What the guard has done.
    flushing : bool
        The step sends exactly what was not sent before, and is the last one.
    """

    asked: Codec
    feedback: ErrorFeedback
    backed_off: bool = False
    off: bool = False
    flushing: bool = False

    @property
    def codec(self) -> Codec:
        """The codec in use."""
        return NONE if self.off else self.feedback.compressor.codec

    def warm_up(self, done: float) -> None:
        """Let a codec that sends a part of the entries begin with more of them.

        Parameters
        ----------
        done : float
            What part of the warm-up is over; see `warm_up_density`.
        """
        codec = self.asked
        if self.backed_off or codec.name not in ("topk", "randomk"):
            return
        assert codec.argument is not None
        density = drifts.warm_up_density(codec.argument, done)
        self.feedback.compressor.codec = Codec(codec.name, density)

    def heed(self, found: drifts.Drift) -> str:
        """Back off where the codec drifts, the second time for good; return what happens.

        The same on all ranks, as `found` is; empty where nothing does.
        """
        what = drifts.beyond(found, self.codec)
        if not what or self.off:
            return ""
        text = f"{self.codec} drifts: {what}; all ranks "
        softer = None if self.backed_off else drifts.gentler(self.codec)
        if softer is None:
            self.off = True
            self.feedback.reset()
            return text + "stop to compress, and what was not sent is dropped"
        self.backed_off = True
        self.feedback.compressor = make(softer)
        return text + f"go on with {softer}"
