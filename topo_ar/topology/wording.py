"""Lists of names in messages, short enough to read."""

from collections.abc import Sequence


def some(names: Sequence[str], most: int = 8) -> str:
    """Return the first `most` names, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
