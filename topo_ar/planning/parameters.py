"""A model as the planner sees it: the names, shapes and dtypes of its parameters."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from topo_ar.errors import ConfigError

Shape = tuple[int, ...]

ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex128": 16,
    "complex64": 8,
}

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Where only a count is known: matrices of the size that a transformer's layers have.
_ASSUMED_SIDE = 1024


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trained tensor."""

    name: str
    shape: Shape
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the parameter, and of its gradient."""
        return self.numel * itemsize(self.dtype)


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of `dtype`, named as in torch without ``torch.``.

    Raises
    ------
    ConfigError
        If gradients cannot have this dtype.
    """
    if dtype not in ITEMSIZES:
        raise ConfigError(f"{dtype!r} is not a dtype; choose {', '.join(ITEMSIZES)}")
    return ITEMSIZES[dtype]


def parse_count(text: str) -> int:
    """Return the number of parameters that `text` names: ``25557032``, ``340M``, ``1.5B``.

    Raises
    ------
    ConfigError
        If `text` is no positive count; letters are decimal.
    """
    match = _COUNT.fullmatch(text.strip())
    value = float(match[1]) * _SCALES[match[2].lower()] if match else 0
    if value < 1 or value != int(value):
        raise ConfigError(
            f"{text!r} is not a number of parameters; write 25557032, 340M or 1.5B (decimal)"
        )
    return int(value)


def assumed_parameters(count: int, dtype: str = "float32") -> tuple[Parameter, ...]:
    """Return `count` elements as 1024 x 1024 matrices and a rest: an assumption about shapes."""
    itemsize(dtype)
    each = _ASSUMED_SIDE**2
    whole = [
        Parameter(f"assumed.{i}", (_ASSUMED_SIDE, _ASSUMED_SIDE), dtype)
        for i in range(count // each)
    ]
    rest = [Parameter("assumed.rest", (count % each,), dtype)] if count % each else []
    return (*whole, *rest)


def read_parameters(path: Path, dtype: str = "float32") -> tuple[Parameter, ...]:
    """Return the parameters listed in a file: a line ``name,shape`` each, such as ``fc,1000x512``.

    They stand in the order of ``module.named_parameters()``. Empty lines and lines that begin with
    ``#`` are skipped; a shape may be empty for a single number.

    Raises
    ------
    ConfigError
        If the file cannot be read, a line is none of these, a name is repeated or nothing is
        listed; the message names the line.
    """
    itemsize(dtype)
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {path}: {reason}") from None
    found: dict[str, Parameter] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, comma, sizes = line.strip().rpartition(",")
        try:
            shape = tuple(int(size) for size in sizes.strip().split("x")) if sizes.strip() else ()
        except ValueError:
            shape = (-1,)
        if not comma or not name or min(shape, default=0) < 0:
            raise ConfigError(
                f"{path}, line {number}: {line.strip()!r} is not name,shape; write it as "
                "layer.weight,1024x512"
            )
        if name in found:
            raise ConfigError(f"{path}, line {number}: {name!r} is listed twice; remove one")
        found[name] = Parameter(name, shape, dtype)
    if not found:
        raise ConfigError(f"{path} lists no parameter; write lines such as layer.weight,1024x512")
    return tuple(found.values())


def total_numel(parameters: Sequence[Parameter]) -> int:
    """Return the number of elements of all parameters."""
    return sum(parameter.numel for parameter in parameters)
