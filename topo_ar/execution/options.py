"""Options that have to be the same on all ranks."""

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from topo_ar.errors import ConfigError


def require_equal(all_gather: Callable[[bytes], list[bytes]], options: Mapping[str, str]) -> None:
    """Refuse options that differ between ranks, on all of them. Collective.

    Parameters
    ----------
    all_gather : callable
        Returns the bytes of every rank, in rank order.
    options : dict of str to str
        Name and value of each.

    Raises
    ------
    ConfigError
        If an option differs; names it and the ranks that have another value than most.
    """
    gathered = [
        msgspec.json.decode(data, type=dict[str, str])
        for data in all_gather(msgspec.json.encode(options))
    ]
    for name in options:
        values = [theirs[name] for theirs in gathered]
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            raise ConfigError(
                f"{name} is {values[odd[0]]} on rank {odd[0]} but {usual} on rank "
                f"{values.index(usual)} (ranks {odd[:16]} differ from the others); give all ranks "
                "the same options"
            )
