"""What a planner must know of a codec: bytes on the wire, rounds, error, where it is safe.

A codec compresses the stage between nodes; reductions inside a node stay exact. Nothing here
computes on gradients.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from topo_ar.errors import ConfigError

Shape = tuple[int, ...]

# Elements that share one fp32 scale in int8 and int4.
BLOCK = 128
# Tensors of fewer elements are never compressed.
SMALL = 1024
# Elements of a shard that two-shot codecs encode at once on CPUs, while others are on the wire:
# 1 MiB, whose parts are whole blocks of every codec on up to 2048 nodes.
RUN = 1 << 18
_SCALE_NBYTES = 4
_INDEX_NBYTES = 4
_FLOAT_NBYTES = 4
# A matrix is worth its factors when they are this many times smaller (pytorch/pytorch#52034).
_MIN_RATE = 2


@dataclass(frozen=True, slots=True)
class Message:
    """One collective between nodes: `nbytes` is the whole vector that it reduces or shares out."""

    op: Literal["all_reduce", "all_to_all", "all_gather"]
    nbytes: int

    def sent_nbytes(self, num_nodes: int) -> float:
        """Return the bytes that each member sends: (n-1)/n of the vector, twice to all-reduce."""
        passes = 2 if self.op == "all_reduce" else 1
        return passes * (num_nodes - 1) * self.nbytes / num_nodes

    def hops(self, num_nodes: int) -> int:
        """Return the messages on a ring that wait for each other."""
        return (2 if self.op == "all_reduce" else 1) * (num_nodes - 1)


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec with its argument.

    Attributes
    ----------
    name : str
        ``none``, ``fp16``, ``bf16``, ``int8``, ``int4``, ``sign``, ``topk``, ``randomk`` or
        ``powersgd``.
    argument : float or None
        The density of ``topk`` and ``randomk``, the rank of ``powersgd``.
    """

    name: str
    argument: float | None = None

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument:g}"

    @property
    def lossy(self) -> bool:
        """Whether the decoded gradient may differ from the one that was encoded."""
        return self.name != "none"

    @property
    def linear(self) -> bool:
        """Whether encoded gradients can be added, so that one all-reduce does."""
        return self.name in _LINEAR

    @property
    def whole(self) -> bool:
        """Whether it needs a whole bucket at once: the matrices of PowerSGD cross chunks."""
        return self.name == "powersgd"

    @property
    def by_runs(self) -> bool:
        """Whether a shard may be encoded in runs of `RUN` elements, whatever else is in it."""
        return self.name in ("fp16", "bf16", "int8", "int4")

    def shortens(self, itemsize: int) -> bool:
        """Tell whether elements of `itemsize` bytes get shorter: those of 16 bits by no cast."""
        return self.lossy and (itemsize > 2 or self.name not in ("fp16", "bf16"))

    def compresses(self, shape: Shape) -> bool:
        """Tell whether a tensor of `shape` is compressed, and not sent in full beside others."""
        if self.name == "powersgd":
            return factors_pay(shape, int(self._number))
        return self.lossy and not stays_exact(shape)

    @property
    def relative_error(self) -> float:
        """A proven limit of ``|x - decode(encode(x))| / |x|`` (2-norms) for any finite gradient x.

        This is the error class that a policy ``lossy:BOUND`` speaks of: the worst case of one
        encoding, without error feedback, which returns later what was lost. Typical gradients lose
        far less. Rounding to fp16 and bf16: the unit roundoff, 2^-11 and 2^-8 (for values in the
        format's normal range). int8 and int4: half a step in each of 128 elements of a block whose
        largest is at least its norm over sqrt(128). Top-k: ``sqrt(1 - density)`` (Stich et al.,
        "Sparsified SGD with Memory", 2018); random-k the same in expectation. Sign and PowerSGD
        promise no more than 1, a projection's limit.
        """
        if self.name in _ERRORS:
            return _ERRORS[self.name]
        return math.sqrt(1 - self._number)

    def messages(
        self, shapes: Sequence[Shape], num_nodes: int, itemsize: int = 4
    ) -> tuple[Message, ...]:
        """Return the dependent collectives between nodes for gradients of these `shapes`.

        Parameters
        ----------
        shapes : sequence of tuple of int
            The bucket's tensors; PowerSGD compresses those whose factors are at least twice
            smaller, the other codecs those that are not `stays_exact`, and send the others as
            they are in the same messages.
        num_nodes : int
            Members of the group, n.
        itemsize : int
            Bytes of an element of the gradient. Codecs work on fp32, whatever they are given; what
            they leave in full travels as that too, or in fp64.
        """
        name = self.name
        if self.lossy:
            itemsize = max(itemsize, _FLOAT_NBYTES)
        if name == "powersgd":
            return self._factors(shapes, itemsize)
        coded = [shape for shape in shapes if name != "none" and not stays_exact(shape)]
        numel = sum(map(math.prod, coded))
        exact = itemsize * (sum(map(math.prod, shapes)) - numel)
        if name in ("none", "fp16", "bf16"):
            return (Message("all_reduce", exact + 2 * numel),)
        if name in _BITS:
            scales = len(coded) if name == "sign" else -(-numel // BLOCK)
            nbytes = exact + -(-numel * _BITS[name] // 8) + _SCALE_NBYTES * scales
            return Message("all_to_all", nbytes), Message("all_gather", nbytes)
        # Rounded up, so that the limit of the error holds for every size.
        kept = math.ceil(Fraction(repr(self._number)) * numel)
        if name == "randomk":  # a common seed chooses the same elements everywhere
            return (Message("all_reduce", exact + _FLOAT_NBYTES * kept),)
        pairs = (_FLOAT_NBYTES + _INDEX_NBYTES) * kept
        return (Message("all_gather", num_nodes * (exact + pairs)),)

    def _factors(self, shapes: Sequence[Shape], itemsize: int) -> tuple[Message, ...]:
        rank = int(self._number)
        left = right = rest = 0
        for shape in shapes:
            rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
            if factors_pay(shape, rank):
                left += min(rows, columns, rank) * rows
                right += min(rows, columns, rank) * columns
            else:
                rest += rows * columns
        if not left:
            return (Message("all_reduce", itemsize * rest),)
        return (
            Message("all_reduce", _FLOAT_NBYTES * left + itemsize * rest),
            Message("all_reduce", _FLOAT_NBYTES * right),
        )

    def sent_nbytes(self, shapes: Sequence[Shape], num_nodes: int, itemsize: int = 4) -> float:
        """Return the bytes a node sends to the others, over all its NICs."""
        return sum(m.sent_nbytes(num_nodes) for m in self.messages(shapes, num_nodes, itemsize))

    def ratio(self, shapes: Sequence[Shape], num_nodes: int, itemsize: int = 4) -> float:
        """Return rho: the bytes it sends over those of an exact all-reduce between nodes."""
        exact = NONE.sent_nbytes(shapes, num_nodes, itemsize)
        return self.sent_nbytes(shapes, num_nodes, itemsize) / exact if exact else 1.0

    def warning(self, optimizer: str) -> str:
        """Return why this codec is a risk with `optimizer`; empty where it is none that we know.

        The figures come from small experiments on MNIST-1D and digits with 8 ranks.
        """
        if self.name == "topk" and self._number < 0.05 and optimizer.startswith("adam"):
            return (
                f"{self} is not safe with {optimizer}: in a small experiment Adam with 1 % top-k "
                "reached 69 % accuracy, without compression 88 %; int8, int4 and PowerSGD "
                "reached 87 %"
            )
        if self.name == "sign":
            return "sign diverged in a small experiment with error feedback at a high learning rate"
        if self.name == "randomk" and self._number < 0.05:
            return f"{self} with error feedback ended in NaN in a small experiment at 1 %"
        return ""

    @property
    def _number(self) -> float:
        assert self.argument is not None
        return self.argument


_LINEAR = frozenset({"none", "fp16", "bf16", "randomk", "powersgd"})
_BITS = {"int8": 8, "int4": 4, "sign": 1}
_ERRORS = {
    "none": 0.0,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "int8": math.sqrt(BLOCK) / (2 * 127),
    "int4": math.sqrt(BLOCK) / (2 * 7),
    "sign": 1.0,
    "powersgd": 1.0,
}
NONE = Codec("none")
# What `lossy:BOUND` looks through.
BUILT_IN = (
    Codec("fp16"),
    Codec("bf16"),
    Codec("int8"),
    Codec("int4"),
    Codec("sign"),
    Codec("topk", 0.01),
    Codec("randomk", 0.01),
    Codec("powersgd", 1),
    Codec("powersgd", 2),
    Codec("powersgd", 4),
    Codec("powersgd", 8),
)


def stays_exact(shape: Shape) -> bool:
    """Tell whether element-wise codecs leave a tensor of `shape` in full: a vector or a small one.

    Biases and the parameters of norms are a small part of the bytes and sensitive to errors.
    """
    return len(shape) < 2 or math.prod(shape) < SMALL


def factors_pay(shape: Shape, rank: int) -> bool:
    """Tell whether PowerSGD of `rank` compresses a tensor of `shape` at least twofold.

    A tensor is a matrix of its first dimension by all others, a x b; the rule is
    ``(a + b) min(a, b, rank) 2 < a b`` (pytorch/pytorch#52034). Vectors are never compressed.
    """
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows + columns) * min(rows, columns, rank) * _MIN_RATE < rows * columns


def parse_codec(text: str) -> Codec:
    """Return the codec that `text` names: ``none``, ``bf16``, ``topk:0.01``, ``powersgd:4``.

    Raises
    ------
    ConfigError
        If there is no such codec or its argument is missing, superfluous or out of range.
    """
    name, colon, argument = text.strip().partition(":")
    if name in ("topk", "randomk", "powersgd"):
        what, holds = _ARGUMENTS[name]
        try:
            value = float(argument)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise ConfigError(f"codec {text!r}: {name} needs {what}")
        return Codec(name, value)
    if name not in _ERRORS:
        raise ConfigError(
            f"{text!r} is not a codec; choose none, fp16, bf16, int8, int4, sign, topk:DENSITY, "
            "randomk:DENSITY or powersgd:RANK"
        )
    if colon:
        raise ConfigError(f"codec {text!r}: {name} takes no argument")
    return Codec(name)


def _is_density(value: float) -> bool:
    return 0 < value <= 1


def _is_rank(value: float) -> bool:
    return value >= 1 and value.is_integer()


_ARGUMENTS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "topk": ("a density above 0 and at most 1, such as topk:0.01", _is_density),
    "randomk": ("a density above 0 and at most 1, such as randomk:0.01", _is_density),
    "powersgd": ("a whole rank of at least 1, such as powersgd:4", _is_rank),
}
