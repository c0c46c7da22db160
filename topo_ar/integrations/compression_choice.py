"""What a user may say to ``compression=``: which codec each parameter gets, and from when on."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from topo_ar.errors import ConfigError
from topo_ar.planning.codecs import NONE, Codec, parse_codec
from topo_ar.planning.policy import parse_policy

AUTO = "auto"
# Exact, but for sparse gradients, of which only rows travel; these do with every codec.
ROWS = "rows"

Choose = Callable[[str], Codec]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionSettings:
    """How gradients are compressed between nodes.

    Attributes
    ----------
    compression : str or mapping
        ``none``; a codec such as ``int8``, ``topk:0.01`` or ``powersgd:4``; ``rows``, which is
        exact and sends sparse gradients by rows; ``auto``, by which the planner chooses within
        `policy`; or codecs by patterns of parameter names, the first that matches.
    policy : str
        For ``auto``: ``exact``, ``lossy:BOUND`` or names of codecs; see `parse_policy`.
    optimizer : str
        Such as ``adamw``: with it, codecs that are a risk are left out by ``auto``, and warned of.
    start_step : int
        As many synchronised steps come first that are exact.
    warm_up_steps : int
        In as many steps from there on the density of ``topk`` and ``randomk`` falls from a quarter,
        by four at a time, to the one that is asked for.
    guard_steps : int
        Each time after so many steps one bucket is reduced exactly too, to see what is lost; 0
        never does.

    Raises
    ------
    ConfigError
        If one of them cannot be used.
    """

    compression: str | Mapping[str, str] = "none"
    policy: str = "exact"
    optimizer: str = ""
    start_step: int = 10
    warm_up_steps: int = 0
    guard_steps: int = 100

    def __post_init__(self) -> None:
        for name in ("start_step", "warm_up_steps", "guard_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        parse_policy(self.policy, self.optimizer)
        for codec in self.codecs:
            parse_codec(codec)

    def facts(self) -> dict[str, str]:
        """Return name and value of each option, for comparing."""
        return {name: str(getattr(self, name)) for name in self.__slots__}

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs that are asked for by name."""
        if isinstance(self.compression, str):
            return () if self.compression in (AUTO, ROWS) else (self.compression,)
        return tuple(dict.fromkeys(self.compression.values()))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is known against the codecs that are asked for by name."""
        return parse_policy(",".join(self.codecs) or "none", self.optimizer.lower()).warnings

    @property
    def wanted(self) -> bool:
        """Whether anything may ever be compressed."""
        return self.compression in (AUTO, ROWS) or any(
            parse_codec(codec) != NONE for codec in self.codecs
        )

    def choice(self, names: Iterable[str]) -> Choose:
        """Return the codec of each parameter; nothing is compressed before ``auto`` has decided.

        Raises
        ------
        ConfigError
            If a pattern fits none of `names`.
        """
        asked = self.compression
        if isinstance(asked, str):
            codec = NONE if asked in (AUTO, ROWS) else parse_codec(asked)
            return lambda name: codec
        patterns = {pattern: parse_codec(text) for pattern, text in asked.items()}
        names = list(names)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"compression: the pattern {pattern!r} fits no parameter; their names are like "
                    f"{', '.join(map(repr, names[:3]))}"
                )
        return lambda name: next(
            (codec for pattern, codec in patterns.items() if fnmatchcase(name, pattern)), NONE
        )


def compression_settings(
    module: nn.Module, *, optimizer: object = None, **options: Any
) -> CompressionSettings:
    """Return what is asked for `module`, given an optimizer as such or by name.

    Raises
    ------
    ConfigError
        If it cannot be used, or a pattern fits no parameter.
    """
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    name = "" if optimizer is None else name.lower()
    settings = CompressionSettings(optimizer=name, **options)
    settings.choice(name for name, _ in module.named_parameters())
    return settings
