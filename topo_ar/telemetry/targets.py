"""What the steps of a job may take.

A TOML file::

    step_seconds = 0.5
    exposed_share = 0.3             # of a step, waiting for communication
    step_bytes_between = "40MB"     # what leaves all nodes together, in a step
    loss_drift = 0.1                # the loss may lie this much above its lowest level
    cost_per_step = 0.002           # in the currency of the price list
    prices = "prices.toml"          # beside this file; see `prices`
    patience_steps = 2              # steps in a row that miss a target make a breach
    warm_up_steps = 10              # the first steps are not judged
    on_breach = "roll back"         # or "warn"

Targets that are left out are not watched.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.telemetry.prices import PriceList, read_prices
from topo_ar.units import parse_size

NAMES = ("step_seconds", "exposed_share", "step_bytes_between", "loss_drift", "cost_per_step")


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that each figure may be; None where it is not watched. See the module."""

    step_seconds: float | None = None
    exposed_share: float | None = None
    step_bytes_between: float | str | None = None
    loss_drift: float | None = None
    cost_per_step: float | None = None
    prices: str | PriceList | None = None
    patience_steps: int = 2
    warm_up_steps: int = 10
    on_breach: Literal["roll back", "warn"] = "roll back"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        watched = [name for name in NAMES if getattr(self, name) is not None]
        if not watched:
            raise ConfigError(f"targets hold no target; give one of {', '.join(NAMES)}")
        for name in watched:
            limit = self.limit(name)
            if not 0 < limit < math.inf:
                raise ConfigError(f"target {name} is {limit}; it must be above 0")
        if self.patience_steps < 1 or self.warm_up_steps < 0:
            raise ConfigError("patience_steps must be 1 or more, warm_up_steps 0 or more")
        if self.cost_per_step is not None and self.prices is None:
            raise ConfigError("target cost_per_step needs prices, the name of a price list")

    def limit(self, name: str) -> float:
        """Return the most that a watched figure may be, as a number."""
        value = getattr(self, name)
        return float(parse_size(value)) if isinstance(value, str) else float(value)

    def missed(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the figures that are above their targets; one that is not a number is too."""
        return {
            name: value
            for name, value in figures.items()
            if getattr(self, name) is not None and not value <= self.limit(name)
        }


def read_targets(path: Path) -> Targets:
    """Return the targets in a TOML file, with their price list.

    Raises
    ------
    ConfigError
        If it cannot be read or holds no targets; the message names file and field.
    """
    try:
        targets = msgspec.toml.decode(path.read_bytes(), type=Targets)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} holds no targets: {error}; write limits such as step_seconds = 0.5"
        ) from None
    if isinstance(targets.prices, str):
        prices = read_prices(path.parent / targets.prices)
        targets = msgspec.structs.replace(targets, prices=prices)
    return targets


def targets_of(asked: "str | os.PathLike[str] | Targets | None") -> Targets | None:
    """Return what ``targets=`` asks for; None for nothing."""
    return asked if asked is None or isinstance(asked, Targets) else read_targets(Path(asked))
