"""How much accuracy a user gives up for speed: ``exact``, ``lossy:BOUND`` or named codecs."""

import math
from dataclasses import dataclass

from topo_ar.errors import ConfigError
from topo_ar.planning.codecs import BUILT_IN, NONE, Codec, parse_codec


@dataclass(frozen=True, slots=True)
class Policy:
    """The codecs that may be used beside exact sums.

    Attributes
    ----------
    text : str
        What the user wrote.
    allowed : tuple of Codec
        Never holds ``none``, which is always allowed.
    excluded : tuple of (Codec, str)
        Those it leaves out, with the reason.
    warnings : tuple of str
        What is known against the codecs that the user named.
    risks : tuple of str
        The same of those that are left out for it, though their error would be allowed.
    """

    text: str
    allowed: tuple[Codec, ...] = ()
    excluded: tuple[tuple[Codec, str], ...] = ()
    warnings: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()


def parse_policy(text: str = "exact", optimizer: str = "") -> Policy:
    """Return the policy that `text` names.

    Parameters
    ----------
    text : str
        ``exact``; ``lossy:0.05``, which allows the built-in codecs whose `Codec.relative_error` is
        at most 0.05; or names such as ``bf16,powersgd:4``.
    optimizer : str
        With ``lossy``, codecs that are known to be a risk with it are left out; named codecs are
        kept with a warning.

    Raises
    ------
    ConfigError
        If `text` is none of these.

    Examples
    --------
    >>> [str(codec) for codec in parse_policy("lossy:0.05").allowed]
    ['fp16', 'bf16', 'int8']
    """
    kind, colon, bound = text.strip().partition(":")
    if kind == "exact" and not colon:
        return Policy("exact", excluded=tuple((codec, "the policy is exact") for codec in BUILT_IN))
    if kind == "lossy":
        return _lossy(text.strip(), _bound(text, bound), optimizer)
    codecs = tuple(dict.fromkeys(parse_codec(name) for name in text.split(",")))
    named = tuple(codec for codec in codecs if codec != NONE)
    warnings = tuple(warning for codec in named if (warning := codec.warning(optimizer)))
    return Policy(text.strip(), named, (), warnings)


def _bound(text: str, bound: str) -> float:
    try:
        value = float(bound)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ConfigError(
            f"policy {text!r} needs a relative error above 0, such as lossy:0.01 (fp16 and bf16), "
            "lossy:0.05 (int8 too) or lossy:1 (everything)"
        )
    return value


def _lossy(text: str, bound: float, optimizer: str) -> Policy:
    allowed, excluded, risks = [], [], []
    for codec in BUILT_IN:
        if codec.relative_error > bound:
            excluded.append((codec, f"its error may be {codec.relative_error:.2g}"))
        elif warning := codec.warning(optimizer):
            excluded.append((codec, warning))
            risks.append(warning)
        else:
            allowed.append(codec)
    return Policy(text, tuple(allowed), tuple(excluded), risks=tuple(risks))
