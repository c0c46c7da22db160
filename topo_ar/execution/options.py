"""The options of a communicator, which have to be the same on all ranks."""

import math
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.execution.plans import MODES
from topo_ar.planning.plan import Family, Plan

_FLAT = ("flat", Family.FLAT_RING)


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


def check_options(plan: str | Plan, timeout_s: float, *, reproducible: bool) -> bool:
    """Return whether `plan` keeps to the plain path.

    Raises
    ------
    ConfigError
        If an argument of a communicator is not usable.
    """
    if isinstance(plan, str) and plan not in MODES:
        raise ConfigError(f"plan={plan!r} is not one of {', '.join(MODES)} or a Plan")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s={timeout_s!r} is not a positive number of seconds")
    flat = plan.family is Family.FLAT_RING if isinstance(plan, Plan) else plan in _FLAT
    if reproducible and flat:
        raise ConfigError(
            "reproducible=True fixes the order of summation, which a flat plan leaves to "
            "torch.distributed; use another plan"
        )
    return flat
