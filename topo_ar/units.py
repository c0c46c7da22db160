"""Human units at the edge: sizes, rates and durations to and from SI numbers.

Inside the package sizes are bytes, rates are bytes per second and durations are seconds.
Single letters are binary as in nccl-tests (``4M`` is 4 MiB); ``KB MB GB`` are decimal.
"""

import re

from topo_ar.errors import ConfigError

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_BINARY = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_DECIMAL = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Return the number of bytes that `text` names.

    Parameters
    ----------
    text : str
        ``65536``, ``64K``, ``25M``, ``1G`` (binary), ``25MB`` (decimal) or ``25MiB`` (binary).

    Raises
    ------
    ConfigError
        If `text` is not a size or not a whole number of bytes.

    Examples
    --------
    >>> parse_size("64K"), parse_size("25MB")
    (65536, 25000000)
    """
    match = _NUMBER.fullmatch(text)
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{text!r} is not a size; write bytes, 64K, 25M or 1G (binary), or 25MB (decimal)"
        )
    value = float(match[1]) * unit
    if value != int(value):
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_rate(text: str) -> float:
    """Return bytes per second for a rate such as ``1gbit`` or ``200mbit``.

    Raises
    ------
    ConfigError
        If `text` is not a positive rate in ``bit``, ``kbit``, ``mbit`` or ``gbit``.

    Examples
    --------
    >>> parse_rate("1gbit")
    125000000.0
    """
    match = _NUMBER.fullmatch(text)
    unit = _RATE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise ConfigError(f"{text!r} is not a link rate; write 1gbit, 2.5gbit or 200mbit")
    return float(match[1]) * unit / 8


def parse_seconds(text: str) -> float:
    """Return seconds for a duration such as ``0.25ms``, ``50us`` or ``1s``.

    Raises
    ------
    ConfigError
        If `text` is not a number with the unit ``s``, ``ms`` or ``us``.

    Examples
    --------
    >>> parse_seconds("0.25ms")
    0.00025
    """
    match = _NUMBER.fullmatch(text)
    unit = _TIME_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a duration; write 0.25ms, 50us or 1s")
    return float(match[1]) * unit


def format_size(nbytes: int, like: int | None = None) -> str:
    """Return `nbytes` in the unit that shows it exactly and shortest, ``4 MiB`` or ``25 MB``.

    With `like` in binary or decimal units as that size is shown, rounded where it must be: sizes
    that are read together should compare.
    """
    if like is not None:
        binary = like >= 1 << 10 and like % (1 << 10) == 0
        steps = _BINARY if binary else _DECIMAL
        factor, name = next((step for step in steps if nbytes >= step[0]), (1, "B"))
        return f"{nbytes / factor:.4g} {name}"
    for factor, name in _BINARY:
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {name}"
    return format_size(nbytes, like=1)


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in bytes per second with the SI prefix that suits it, ``125 MB/s``."""
    for factor, name in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.4g} {name}"
    return f"{bytes_per_s:.4g} B/s"


def format_seconds(seconds: float) -> str:
    """Return a duration with the SI prefix that suits it, ``209 ms``."""
    for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {name}"
    return f"{seconds * 1e9:.3g} ns"
